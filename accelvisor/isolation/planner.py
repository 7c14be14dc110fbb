"""What turns today's partition into the wanted one: the steps, who has to stand still, what has to
be scrubbed, and about how long it takes. A plan is data; what carries it out is
accelvisor/daemon/shaping.py.

A resize keeps what already matches: the cores and the memory that the function has, as far as they
are wanted, stay where they are, so its addresses stay true. Neighbours are never touched. One that
has links keeps these and its chips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, UsageError
from accelvisor.isolation.placing import Cpus, Free, Reason
from accelvisor.isolation.resources import NOTHING, Card, Placement, Policy, Range
from accelvisor.limits import LIMITS, MIB

#: What giving pages back to the host takes, by measurement (docs/performance.md).
SCRUB_BYTES_PER_MS = 16 * MIB
#: The longest that a function takes to an instruction boundary, and what else a step costs.
QUIESCE_MS = int(LIMITS.tile_s * 1000)
STEP_MS = 1
#: A process that waits, warm, becomes a function in a tenth of a second; without one it takes more.
START_MS = 100


class Verb(StrEnum):
    CREATE = "create"
    RESIZE = "resize"
    REVOKE = "revoke"


class Action(StrEnum):
    QUIESCE = "quiesce"  # the function comes to an instruction boundary and stays there
    SCRUB = "scrub"  # memory that goes is zeroed, and read back
    RELEASE = "release"  # resources go back to the card
    TAKE = "take"  # resources come from the card
    TRANSLATE = "translate"  # another segment table, another epoch
    NOTIFY = "notify"  # the guest is told: interrupt, registers
    RESUME = "resume"
    START = "start"  # its process, with nothing in it


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens, in words for people."""

    action: Action
    text: str
    estimate_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """From ``before`` to ``after`` for one function, under ``epoch``.

    Attributes:
        moves: cores that are exchanged for others: ((chip, core), (chip, core)).
        quiesce: UUIDs of the functions that stand still meanwhile.
        scrub_bytes: memory that has to be zeroed before it is anybody else's.
    """

    verb: Verb
    function: str
    epoch: int
    before: Placement
    after: Placement
    moves: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    scrub_bytes: int
    steps: Sequence[Step]

    @property
    def quiesce(self) -> Sequence[str]:
        return (self.function,) if not self.same and self.before.cores else ()

    @property
    def same(self) -> bool:
        """Nothing has to be done."""
        return self.before == self.after

    @property
    def estimate_ms(self) -> int:
        return sum(step.estimate_ms for step in self.steps)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The size that a function is to have: cores over all its chips, bytes of memory."""

    cores: int
    memory_bytes: int
    policy: Policy = Policy.BURSTABLE


def resize(
    cards: Sequence[Card],
    held: Mapping[str, Placement],
    function: str,
    wanted: Wanted,
    epoch: int,
    cpus: Sequence[int] = (),
) -> Plan:
    """Give ``function`` another size.

    Args:
        held: every placement of this host by UUID, the function's own included.
        epoch: of the function now; the plan's is the next.
        cpus: of the host, for guaranteed functions.

    Raises:
        UsageError: ``resize-invalid``: no function has that size.
        CapacityError: ``no-room``, with every reason.
    """
    before = held[function]
    _check(before, wanted)
    card = next((item for item in cards if item.name == before.card), None)
    if card is None:
        raise CapacityError(
            f'card "{before.card}" is not configured any more',
            code="no-room",
            where="planner",
            hint="put it back into the configuration, or create the function anew",
        )
    others = [item for uuid, item in held.items() if uuid != function]
    left = Free(card, others)
    reasons: list[Reason] = []
    cores = _cores(left, before, wanted.cores // len(before.cores), reasons)
    ranges = _ranges(left, before, wanted.memory_bytes, reasons)
    own = _cpus(Cpus(cpus, others), before, wanted, reasons)
    if reasons:
        raise CapacityError(
            f"no room for that size: {'; '.join(map(str, reasons))}",
            code="no-room",
            where="planner",
            hint="delete a function, or move this one to a host with more room",
        )
    after = Placement(before.card, cores, ranges, before.queues, before.vector, own, before.links)
    return _plan(Verb.RESIZE, function, before, after, epoch)


def create(after: Placement) -> Plan:
    """A function that begins at ``after``, which :mod:`accelvisor.isolation.placing` found."""
    text = _what("take", after.pairs(), after.memory_bytes)
    steps = [
        Step(Action.TAKE, f"{text} of {after.card}", STEP_MS),
        Step(Action.START, "start its process, with memory that nobody had", START_MS),
    ]
    return Plan(Verb.CREATE, "", 1, NOTHING, after, (), 0, steps)


def revoke(held: Mapping[str, Placement], function: str, epoch: int) -> Plan:
    """Take everything away from ``function``; its guest keeps a device that does nothing."""
    return _plan(Verb.REVOKE, function, held[function], NOTHING, epoch)


def _check(before: Placement, wanted: Wanted) -> None:
    chips = len(before.cores)
    wrong = ""
    if not before.cores:
        wrong = "the function was revoked: it has no place on a card to grow from"
    elif wanted.cores < 1 or wanted.cores % chips:
        wrong = f"{wanted.cores} cores do not spread evenly over its {chips} chips"
    elif not PAGE <= wanted.memory_bytes <= LIMITS.memory_bytes or wanted.memory_bytes % PAGE:
        wrong = f"{wanted.memory_bytes} bytes of memory: 4 KiB to 64 GiB, a multiple of 4 KiB"
    if wrong:
        raise UsageError(
            wrong,
            code="resize-invalid",
            where="planner",
            hint="the number of chips, queues and the window's size stay as they were created",
        )


def _cores(
    left: Free, before: Placement, each: int, reasons: list[Reason]
) -> Mapping[int, Sequence[int]]:
    """The cores that it has, on each chip the first ``each``, and more of the same chips; where one
    has too few, of other chips, unless links join these.
    """
    free = left.cores
    able = sorted(
        (chip for chip, cores in enumerate(free) if len(cores) >= each),
        key=lambda chip: (chip not in before.cores, len(free[chip]), chip),
    )
    if before.links:
        able = [chip for chip in able if chip in before.cores]
    if len(able) < len(before.cores):
        text = (
            f"{left.card.name}: {len(able)} of {left.card.chips} chips have {each} cores for it,"
            f" {len(before.cores)} wanted"
        )
        if before.links:
            text = (
                f"{left.card.name}: {len(able)} of its {len(before.cores)} chips, which links"
                f" join, have {each} cores for it"
            )
        reasons.append(Reason("cores", text))
        return before.cores
    chips = list(before.cores)
    if not before.cores.keys() <= set(able):
        chips = sorted(able[: len(chips)])
    found: dict[int, tuple[int, ...]] = {}
    for chip in chips:
        own = [core for core in before.cores.get(chip, ()) if core in free[chip]][:each]
        more = [core for core in free[chip] if core not in own]
        found[chip] = tuple(sorted(own + more[: each - len(own)]))
    return found


def _ranges(
    left: Free, before: Placement, nbytes: int, reasons: list[Reason]
) -> Sequence[Range]:
    """The first ``nbytes`` of what it has; more is taken behind the last piece, or elsewhere."""
    kept: list[Range] = []
    need = nbytes
    for piece in before.ranges:
        if need:
            size = min(need, piece.nbytes)
            kept.append(Range(piece.bank, piece.start, size))
            need -= size
    if not need:
        return tuple(kept)
    left.take(Placement(left.card.name, {}, kept))
    last = kept[-1]
    behind = [gap for gap in left.gaps if (gap.bank, gap.start) == (last.bank, last.end)]
    if behind:
        size = min(need, behind[0].nbytes)
        kept[-1] = Range(last.bank, last.start, last.nbytes + size)
        left.take(Placement(left.card.name, {}, (Range(last.bank, last.end, size),)))
        need -= size
    more = left.ranges(need, LIMITS.segments - len(kept)) if need else []
    if need and not more:
        text = (
            f"{left.card.name}: {left.memory_bytes // MIB} MiB of memory free,"
            f" {need // MIB} MiB more wanted, in at most {LIMITS.segments} pieces"
        )
        reasons.append(Reason("memory", text))
    return (*kept, *more)


def _cpus(host: Cpus, before: Placement, wanted: Wanted, reasons: list[Reason]) -> Sequence[int]:
    if wanted.policy is not Policy.GUARANTEED:
        return ()
    kept = tuple(cpu for cpu in before.cpus if cpu in host.shared)[: wanted.cores]
    host.take(Placement("", {}, cpus=kept))
    missing = wanted.cores - len(kept)
    more = host.exclusive(missing)
    if missing and not more:
        able = max(0, len(host.shared) - 1)
        text = f"the host can give {able} of its CPUs away, {missing} more wanted"
        reasons.append(Reason("cpus", text))
    return tuple(sorted((*kept, *more)))


def _plan(
    verb: Verb, function: str, before: Placement, after: Placement, epoch: int
) -> Plan:
    gone, come = before.pairs() - after.pairs(), after.pairs() - before.pairs()
    less, more = _pages(before.ranges, after.ranges), _pages(after.ranges, before.ranges)
    moves = list(zip(sorted(gone), sorted(come), strict=False)) if gone and come else []
    steps: list[Step] = []
    if before != after:
        steps = _steps(verb, (gone, come), (less, more), before.memory_bytes, epoch + 1)
    scrub = 0 if before == after else before.memory_bytes if verb is Verb.REVOKE else less
    return Plan(verb, function, epoch + 1, before, after, moves, scrub, steps)


def _steps(
    verb: Verb,
    cores: tuple[set[tuple[int, int]], set[tuple[int, int]]],
    memory: tuple[int, int],
    all_memory: int,
    epoch: int,
) -> list[Step]:
    gone, come = cores
    less, more = memory
    steps: list[Step] = []
    if come or more:
        steps.append(Step(Action.TAKE, _what("take", come, more), STEP_MS))
    steps.append(Step(Action.QUIESCE, "wait for an instruction boundary", QUIESCE_MS))
    scrub = all_memory if verb is Verb.REVOKE else less
    if scrub:
        text = f"zero {_size(scrub)} and read it back"
        steps.append(Step(Action.SCRUB, text, STEP_MS + scrub // SCRUB_BYTES_PER_MS))
    steps.append(Step(Action.TRANSLATE, f"write the segment table of epoch {epoch}", STEP_MS))
    steps.append(Step(Action.NOTIFY, "interrupt the guest, change its registers", STEP_MS))
    steps.append(Step(Action.RESUME, "go on, with every address looked up anew", STEP_MS))
    if gone or less:
        steps.append(Step(Action.RELEASE, _what("give back", gone, less), STEP_MS))
    return steps


def _what(verb: str, cores: set[tuple[int, int]], nbytes: int) -> str:
    named = ", ".join(f"{chip}.{core}" for chip, core in sorted(cores))
    parts = [f"cores {named}"] if cores else []
    parts += [_size(nbytes)] if nbytes else []
    return f"{verb} {' and '.join(parts)}"


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // 1024} KiB"


def _pages(some: Sequence[Range], without: Sequence[Range]) -> int:
    """Bytes of ``some`` that are in none of ``without``."""
    total = 0
    for piece in some:
        shared = sum(
            max(0, min(piece.end, other.end) - max(piece.start, other.start))
            for other in without
            if other.bank == piece.bank
        )
        total += piece.nbytes - shared
    return total
