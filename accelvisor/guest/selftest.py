"""``accelguest selftest``: does this function, as this guest reaches it, do what it should?

Every path is tried both ways with data that a wrong path would show: each check is one short
function that raises :class:`Broken` or returns a remark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi import commands, programs
from accelvisor.abi.commands import SEGMENT, Flag, Memory, Space, Transfer
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Operation, Role, Slot
from accelvisor.abi.registers import PAGE, Interrupt, Reg
from accelvisor.errors import AccelvisorError, CapacityError, PermissionDenied, ProgramError
from accelvisor.guest.errors import DeviceFault
from accelvisor.guest.expected import EXPECTED, Case
from accelvisor.guest.instructions import Instruction
from accelvisor.guest.staging import pieces

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

Array = npt.NDArray[Any]


class Broken(Exception):  # noqa: N818 - what a check says of the device
    """The device does not do what it should; the message says how it differs."""


class Absent(Exception):  # noqa: N818
    """This guest cannot try that here; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check. ``state``: ``ok``, ``failed`` or ``absent``."""

    name: str
    state: str
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def run(function: Function) -> Iterator[Outcome]:
    """All checks in order, each as it ends. The last ones fault the context and restart it."""
    for name, check in CHECKS:
        started = time.perf_counter()
        try:
            state, detail = "ok", check(function)
        except Absent as why:
            state, detail = "absent", str(why)
        except Broken as how:
            state, detail = "failed", str(how)
        except AccelvisorError as error:
            state, detail = "failed", f"{error} [{error.code}]"
        yield Outcome(name, state, detail, time.perf_counter() - started)


# --- registers and rings --------------------------------------------------------------------------


def _identity(fn: Function) -> str:
    first, second = fn.registers.identity(), fn.registers.identity()
    if first != second:
        raise Broken("two reads of the identity differ")
    told = fn.info()
    if told.get("uuid") not in (None, first.uuid):
        raise Broken(f"registers say {first.uuid}, the device's own answer {told['uuid']}")
    return f"{first.uuid}, ABI {first.abi[0]}.{first.abi[1]}"


def _scratch(fn: Function) -> str:
    patterns = [0, 0xFFFFFFFF, 0x55555555, 0xAAAAAAAA, *[1 << i for i in range(32)]]
    for pattern in patterns:
        fn.transport.write32(Reg.SCRATCH, pattern)
        found = fn.transport.read32(Reg.SCRATCH)
        if found != pattern:
            raise Broken(f"wrote {pattern:#010x}, read {found:#010x}")
    return f"{len(patterns)} patterns"


def _commands(fn: Function) -> str:
    count = 4 * fn.identity.ring_entries
    entry = commands.nop(0)
    cookies = [fn.queue.submit(entry) for _ in range(16)]
    for _ in range(16, count):
        fn.check(fn.queue.wait(cookies.pop(0), fn.timeout_s))
        cookies.append(fn.queue.submit(entry))
    for cookie in cookies:
        fn.check(fn.queue.wait(cookie, fn.timeout_s))
    fn.call(commands.fence(0))
    return f"{count} commands, the rings wrapped {count // fn.identity.ring_entries} times"


def _interrupts(fn: Function) -> str:
    if not getattr(fn.transport, "interrupts", True):
        raise Absent("this driver has none: waiting is by short sleeps")
    fn.transport.write32(Reg.INTERRUPT_CAUSE, Interrupt.COMPLETION)
    while fn.transport.wait_interrupt(0.0):
        pass  # one of an earlier command
    cookie = fn.queue.submit(commands.nop(0, Flag.INTERRUPT))
    got = fn.transport.wait_interrupt(2.0)
    fn.check(fn.queue.wait(cookie, fn.timeout_s))
    if not got:
        raise Broken("a command that asked for an interrupt completed without one")
    return "one command, one interrupt"


# --- copies ---------------------------------------------------------------------------------------


def _pattern(nbytes: int, seed: int) -> Array:
    return np.random.RandomState(seed).randint(0, 256, nbytes, dtype=np.uint8)


def _same(found: Array, wanted: Array, what: str) -> None:
    if not np.array_equal(found, wanted):
        at = int(np.flatnonzero(found != wanted)[0])
        raise Broken(f"{what}: byte {at} is {int(found[at]):#04x}, not {int(wanted[at]):#04x}")


def _sizes(fn: Function) -> list[int]:
    most = max(fn.identity.memory_bytes // 8, PAGE)
    return [n for n in (1, 63, 64, 4095, 4096, 4097, 70_001, 1 << 20) if n <= most]


def _window(fn: Function) -> str:
    before = fn.copies.bounce_from
    fn.copies.bounce_from = 1 << 62  # everything through the window, in as many steps as it takes
    try:
        return _round_trips(fn, _sizes(fn))
    finally:
        fn.copies.bounce_from = before


def _bounce(fn: Function) -> str:
    _need_dma(fn)
    before = fn.copies.bounce_from
    fn.copies.bounce_from = 0
    try:
        return _round_trips(fn, _sizes(fn))
    finally:
        fn.copies.bounce_from = before


def _round_trips(fn: Function, sizes: list[int]) -> str:
    for size in sizes:
        data = _pattern(size, size)
        with fn.tensor(data) as tensor:
            _same(tensor.numpy(), data, f"{size} bytes")
    return f"up to {sizes[-1]} bytes, in and out"


def _need_dma(fn: Function) -> None:
    try:
        fn.dma.give(fn.dma.take(PAGE))
    except (PermissionDenied, CapacityError) as error:
        raise Absent(f"{error} [{error.code}]") from None


def _pinned(fn: Function) -> str:
    _need_dma(fn)
    size = 3 * PAGE + 5
    array = fn.pinned((size,), "uint8")
    try:
        data = _pattern(size, 3)
        array.array[:] = data
        with fn.tensor(data[::-1].copy()) as tensor:
            tensor.copy_(array.array)
            array.array[:] = 0
            tensor.numpy(out=array.array)
            _same(array.array.copy(), data, "pinned memory")
        segments = len(pieces(array.buffer, 0, size))
    finally:
        array.release()
    return f"{size} bytes in {segments} segment{'s' * (segments != 1)}"


def _scatter(fn: Function) -> str:
    """A list of odd pieces of guest memory, in an order of its own."""
    _need_dma(fn)
    buffer, table = fn.dma.take(4 * PAGE), fn.dma.take(PAGE)
    try:
        data = _pattern(4 * PAGE, 4)
        buffer.view[: 4 * PAGE] = data.data
        cuts = [(3 * PAGE + 7, 100), (5, 1), (PAGE + 64, 2000), (2 * PAGE - 3, 6), (0, 3)]
        spans = [span for at, n in cuts for span in pieces(buffer, at, n)]
        for i, span in enumerate(spans):
            SEGMENT.pack_into(table.view, i * SEGMENT.size, *span)
        total = sum(n for _, n in cuts)
        source = Memory(Space.GUEST, Transfer.SCATTER, table.address, total, len(spans))
        wanted = np.concatenate([data[at : at + n] for at, n in cuts])
        with fn.empty((total,), "uint8") as tensor:
            fn.call(commands.copy_in(0, tensor.handle, 0, source))
            _same(tensor.numpy(), wanted, "gathered")
            tensor.copy_(wanted[::-1])
            fn.call(commands.copy_out(0, tensor.handle, 0, source))
        back = np.frombuffer(bytes(buffer.view[: 4 * PAGE]), np.uint8)
        _same(np.concatenate([back[at : at + n] for at, n in cuts]), wanted[::-1], "scattered")
        untouched = np.ones(4 * PAGE, np.bool_)
        for at, n in cuts:
            untouched[at : at + n] = False
        _same(back[untouched], data[untouched], "memory outside the list")
    finally:
        fn.dma.give(buffer)
        fn.dma.give(table)
    return f"{len(spans)} segments, {total} bytes"


# --- instructions ---------------------------------------------------------------------------------


def _instructions(fn: Function) -> str:
    wrong: list[str] = []
    unknown: list[str] = []
    for seed, name in enumerate(fn.instructions):
        case = EXPECTED.get(name)
        try:
            if case is None:
                unknown.append(name + execute(fn, fn.instructions[name]))
            else:
                compare(fn, name, case, seed)
        except Broken as how:
            wrong.append(f"{name}: {how}")
        except AccelvisorError as error:
            wrong.append(f"{name}: {error} [{error.code}]")
    if wrong:
        raise Broken("; ".join(wrong))
    known = len(fn.instructions) - len(unknown)
    more = f"; no formula for {', '.join(unknown)}" if unknown else ""
    return f"{known} agree with numpy{more}"


def compare(fn: Function, name: str, case: Case, seed: int = 0) -> None:
    """Run an instruction on small arrays and compare with its formula.

    Raises:
        Broken: they differ.
    """
    arrays = case.arrays(seed)
    wanted = case.compute(*[a.copy() for a in arrays], **case.attributes)
    found = fn.ops.call(
        name,
        *[fn.tensor(a) for a in arrays],
        shape=case.shape,
        dtype=case.dtype,
        **dict[str, Any](case.attributes),
    )
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    found = found if isinstance(found, tuple) else (found,)
    for i, (f, w) in enumerate(zip(found, wanted, strict=True)):
        got = f.numpy()
        if not case.agrees(got, np.asarray(w)):
            which = f" (result {i})" if len(found) > 1 else ""
            if got.shape != np.shape(w):
                raise Broken(f"shape {got.shape}, not {np.shape(w)}{which}")
            off = np.abs(got.astype(np.float64) - np.asarray(w, np.float64)).max()
            raise Broken(f"differs by up to {off:.3g}{which}")


def execute(fn: Function, row: Instruction) -> str:
    """Run an instruction that we have no formula for, if arguments for it can be made up.

    Returns:
        "" when it ran, else why not, in parentheses.
    """
    shapes: list[tuple[int, ...]] = []
    sizes: dict[str, int] = {}
    for i in row.reads:
        dims: list[int] = []
        for word in row.operands[i].shape.split():
            if word.startswith("*"):
                dims += [2, 3]
            elif word.isdigit():
                dims.append(int(word))
            elif word.isidentifier():
                dims.append(sizes.setdefault(word, 4 + len(sizes)))
            else:
                return " (not tried: its shapes cannot be made up)"
        shapes.append(tuple(dims))
    tensors = [
        fn.zeros(shape, row.operands[i].dtypes[0])
        for i, shape in zip(row.reads, shapes, strict=True)
    ]
    try:
        fn.ops.call(row.name, *tensors)
    except ProgramError as error:
        return f" (not tried: {error})"
    return ""


# --- wrong things ---------------------------------------------------------------------------------


def _bad_program(fn: Function) -> str:
    slots = (Slot(DType.FLOAT32, (4,), Role.OUTPUT),)
    unknown = programs.encode(programs.Program(slots, (Operation(0xFFFE, (0,)),)))
    for data, what in ((unknown, "an unknown opcode"), (b"nonsense" * 4, "no program at all")):
        try:
            fn.load(data)
        except ProgramError:
            continue
        raise Broken(f"{what} was accepted")
    if fn.call(commands.nop(0)).status:
        raise Broken("the context did not go on after a refusal")
    return "refused, and the context goes on"


def _bad_address(fn: Function) -> str:
    """DMA to where no memory is must stop this context, and nothing else."""
    with fn.empty((PAGE,), "uint8") as tensor:
        nowhere = Memory(Space.GUEST, Transfer(0), 0xFFFF_FFFF_F000, PAGE, 0)
        try:
            fn.call(commands.copy_in(0, tensor.handle, 0, nowhere))
        except DeviceFault as fault:
            code = fault.code
        else:
            raise Broken("DMA to where no memory is succeeded")
        try:
            fn.call(commands.copy_in(0, tensor.handle, 0, nowhere))
        except DeviceFault:
            pass
        else:
            raise Broken("the context went on after a fault")
        fn.restart()
    data = _pattern(1000, 9)
    with fn.tensor(data) as tensor:
        _same(tensor.numpy(), data, "after the fault")
    return f"{code}, and a new context works"


CHECKS: tuple[tuple[str, Callable[[Function], str]], ...] = (
    ("identity", _identity),
    ("scratch register", _scratch),
    ("commands", _commands),
    ("interrupts", _interrupts),
    ("copies by window", _window),
    ("copies by DMA", _bounce),
    ("copies of pinned memory", _pinned),
    ("scatter lists", _scatter),
    ("instructions", _instructions),
    ("a bad program", _bad_program),
    ("a bad address", _bad_address),
)

__all__ = ["CHECKS", "Absent", "Broken", "Outcome", "compare", "execute", "run"]
