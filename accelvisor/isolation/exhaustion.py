"""What happens to a VM that wants a static function when none is free: wait, deny, or migrate.

A value without clock and IO: times are seconds of the caller's monotonic clock. A *slot* is one
part of one static card. The rules, which the tests search for a way around:

* A VM has one slot at most, and stands in the queue at most once.
* First come, first served: while anybody waits nothing is free that they would take, so nobody who
  comes later gets a slot first, however many are released at once.
* A deadline is exact: who has not been served before it is not served at it.
* A slot is free, held or gone, and never two of these. A card whose slots are *withheld* gives none
  away, free or released, until they are allowed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from accelvisor.errors import AccelvisorError, CapacityError, ConflictError
from accelvisor.limits import LIMITS


class OnExhaustion(StrEnum):
    WAIT = "wait"  # for the next slot, until a deadline
    DENY = "deny"  # at once
    MIGRATE = "migrate"  # the VM goes where a slot is free


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Part ``index``, from 0 on, of a static card."""

    card: str
    index: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another host, as it is known now; ``free`` counts its slots."""

    host: str
    free: int
    trusted: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """The VM has this slot."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Waiting:
    """It is number ``position`` of those that wait, counted from 1."""

    position: int


@dataclass(frozen=True, slots=True)
class Denied:
    """It gets none; ``error`` says why and what can be done."""

    error: AccelvisorError


@dataclass(frozen=True, slots=True)
class Migrate:
    """It may have one at these hosts: the best first, at least one."""

    candidates: Sequence[Candidate]


Decision: TypeAlias = Granted | Waiting | Denied | Migrate


@dataclass(frozen=True, slots=True)
class _Waiter:
    who: str
    deadline: float
    card: str | None = None

    def takes(self, slot: Slot) -> bool:
        return self.card in (None, slot.card)


def ranked(candidates: Iterable[Candidate]) -> Sequence[Candidate]:
    """Hosts that a VM can go to: trusted, with a free slot, most of these first, then by name."""
    usable = [item for item in candidates if item.trusted and item.free > 0]
    return sorted(usable, key=lambda item: (-item.free, item.host))


class Waiters:
    """The slots of one host, who holds them, and who waits for one.

    Args:
        free: slots that nobody holds.
        held: by whom the others are, as after a restart of the daemon.
    """

    def __init__(self, free: Iterable[Slot] = (), held: Mapping[Slot, str] | None = None) -> None:
        self._free = set(free)
        self._held = dict(held or {})
        self._queue: deque[_Waiter] = deque()
        self._lapsed: list[str] = []
        self._withheld: set[str] = set()

    @property
    def free(self) -> Sequence[Slot]:
        """Those that nobody holds, of cards that are not withheld."""
        return sorted(slot for slot in self._free if slot.card not in self._withheld)

    @property
    def held(self) -> Mapping[Slot, str]:
        return dict(self._held)

    @property
    def waiting(self) -> Sequence[str]:
        """Who waits, in order; also those whose deadline passed since anybody looked."""
        return [item.who for item in self._queue]

    def waiting_for(self, card: str) -> Sequence[str]:
        """Those of them that would take a slot of this card."""
        return [item.who for item in self._queue if item.card in (None, card)]

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`expired` will have something to tell; None when nobody waits.

        Those that lapsed meanwhile are told at once: then it is a time that has passed.
        """
        if self._lapsed:
            return float("-inf")
        return min((item.deadline for item in self._queue), default=None)

    def ask(
        self,
        who: str,
        policy: OnExhaustion,
        deadline: float,
        now: float,
        candidates: Iterable[Candidate] = (),
        card: str | None = None,
    ) -> Decision:
        """A VM wants a slot.

        Args:
            who: the VM, by a name that stays its own.
            deadline: until when it waits; ``inf`` for ever. Of ``wait`` only.
            candidates: other hosts. Of ``migrate`` only.
            card: the only one whose slots it wants; None for any.

        Returns:
            ``Denied`` with ``one-function-per-vm``, it has one or waits for one already (until
            :meth:`expired` has named it); ``no-function-free``, and it may not or cannot wait or
            go elsewhere; ``waiters-full``, too many wait.
        """
        self._lapse(now)
        if who in self._held.values() or who in self.waiting or who in self._lapsed:
            return Denied(_second(who))
        place = "here" if card is None else f'on card "{card}"'
        usable = [slot for slot in self.free if card in (None, slot.card)]
        if usable:
            self._hold(usable[0], who)
            return Granted(usable[0])
        if policy is OnExhaustion.MIGRATE:
            able = ranked(candidates)
            return Migrate(able) if able else Denied(_none(who, "here or at a trusted host"))
        if policy is OnExhaustion.DENY:
            return Denied(_none(who, place))
        if not now < deadline:
            return Denied(_none(who, f"{place}, and the time to wait for one is over"))
        if len(self._queue) >= LIMITS.function_waiters:
            return Denied(_full(who))
        self._queue.append(_Waiter(who, deadline, card))
        return Waiting(len(self._queue))

    def released(self, slot: Slot, now: float) -> str | None:
        """Its holder is done with ``slot``, and nothing of the holder is left in it.

        Returns:
            Who holds it now, having waited; None when it is free.

        Raises:
            ConflictError: ``slot-not-held``, nobody holds it.
        """
        if self._held.pop(slot, None) is None:
            raise ConflictError(
                f'no VM holds function {slot.index} of card "{slot.card}"',
                code="slot-not-held",
                where=f"card:{slot.card}",
            )
        return self._offer(slot, now)

    def added(self, slots: Iterable[Slot], now: float) -> Mapping[Slot, str]:
        """A card was enabled: its slots go to those that wait, in the order of their numbers.

        Returns:
            Who got which; the others are free.

        Raises:
            ConflictError: ``slot-exists``, one of them is known already; nothing was added.
        """
        new = sorted(set(slots))
        for slot in new:
            if slot in self._free or slot in self._held:
                raise ConflictError(
                    f'function {slot.index} of card "{slot.card}" is there already',
                    code="slot-exists",
                    where=f"card:{slot.card}",
                )
        given = {slot: self._offer(slot, now) for slot in new}
        return {slot: who for slot, who in given.items() if who is not None}

    def removed(self, card: str) -> Sequence[Slot]:
        """A card is disabled: its slots are no more.

        Returns:
            Which they were.

        Raises:
            ConflictError: ``card-in-use``, a VM holds one of them; nothing was removed.
        """
        if any(slot.card == card for slot in self._held):
            raise ConflictError(
                f'card "{card}": functions exist on it',
                code="card-in-use",
                where=f"card:{card}",
                hint="delete them, or move them to another card or host",
            )
        gone = sorted(slot for slot in self._free if slot.card == card)
        self._free.difference_update(gone)
        self._withheld.discard(card)
        return gone

    def withhold(self, card: str) -> None:
        """Nobody gets a slot of this card from here on; who holds one keeps it."""
        self._withheld.add(card)

    def allow(self, card: str, now: float) -> Mapping[Slot, str]:
        """They may be had again; returns who of those that wait got which."""
        if card not in self._withheld:
            return {}
        self._withheld.discard(card)
        slots = sorted(slot for slot in self._free if slot.card == card)
        given = {slot: self._offer(slot, now) for slot in slots}
        return {slot: who for slot, who in given.items() if who is not None}

    def expired(self, now: float) -> Sequence[str]:
        """Whose deadline has come since the last call, by deadline, then in the order in which they
        came. They wait no more; each is told once.
        """
        self._lapse(now)
        lapsed, self._lapsed = self._lapsed, []
        return lapsed

    def withdraw(self, who: str) -> bool:
        """The VM wants none any more; what it holds it keeps.

        Returns:
            Whether it waited, or its expiry was still to be told.
        """
        before = len(self._queue) + len(self._lapsed)
        self._queue = deque(item for item in self._queue if item.who != who)
        self._lapsed = [item for item in self._lapsed if item != who]
        return len(self._queue) + len(self._lapsed) < before

    def _offer(self, slot: Slot, now: float) -> str | None:
        self._lapse(now)
        takers = () if slot.card in self._withheld else self._queue
        first = next((item for item in takers if item.takes(slot)), None)
        if first is None:
            self._free.add(slot)
            return None
        self._queue.remove(first)
        self._hold(slot, first.who)
        return first.who

    def _hold(self, slot: Slot, who: str) -> None:
        self._free.discard(slot)
        self._held[slot] = who

    def _lapse(self, now: float) -> None:
        """Take those out of the queue whose deadline has come."""
        over = [item for item in self._queue if item.deadline <= now]
        if over:
            self._queue = deque(item for item in self._queue if item.deadline > now)
            self._lapsed += [item.who for item in sorted(over, key=lambda item: item.deadline)]


def _second(who: str) -> ConflictError:
    return ConflictError(
        f'VM "{who}" has a function or waits for one, and a VM has at most one',
        code="one-function-per-vm",
        where=f"domain:{who}",
        hint="detach the other first, or use a card whose functions are not static",
    )


def _none(who: str, place: str) -> CapacityError:
    return CapacityError(
        f'VM "{who}": no static function is free {place}',
        code="no-function-free",
        where=f"domain:{who}",
        hint="start it when another VM has given its function back",
    )


def _full(who: str) -> CapacityError:
    return CapacityError(
        f'VM "{who}": {LIMITS.function_waiters} VMs wait for a function already',
        code="waiters-full",
        where=f"domain:{who}",
        hint="start it when fewer wait, or on another host",
    )
