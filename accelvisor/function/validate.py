"""Is a state section of the device's own making? Checked before a loaded state takes effect.

The rest of the worker trusts its state: addresses in the object table become numpy arrays, queue
numbers become offsets. So everything that is used as an index or an address is checked here.
"""

from __future__ import annotations

from accelvisor.abi.commands import Opcode
from accelvisor.abi.dtypes import DType
from accelvisor.abi.registers import CQ_TAIL, PAGE, SQ_HEAD, SQ_TAIL, QueueStatus
from accelvisor.errors import StateError
from accelvisor.function import state as s
from accelvisor.function.links import NAMES
from accelvisor.function.objects import KINDS, RECORD, TENSOR
from accelvisor.function.records import share_of
from accelvisor.function.spec import Spec

#: What a command's intent can name at most.
_INTENTS: dict[int, int] = {
    Opcode.CONTEXT_OPEN: s.CONTEXTS,
    Opcode.CONTEXT_CLOSE: s.CONTEXTS,
    Opcode.TENSOR_CREATE: s.OBJECTS,
    Opcode.TENSOR_DESTROY: s.OBJECTS,
    Opcode.PROGRAM_LOAD: s.OBJECTS,
    Opcode.PROGRAM_UNLOAD: s.OBJECTS,
    Opcode.GRAPH_LOAD: s.OBJECTS,
    Opcode.GRAPH_UNLOAD: s.OBJECTS,
}


def check_state(section: bytes | bytearray | memoryview, spec: Spec) -> None:
    """``section`` is the state from PCI_AT to DIGEST_END.

    Raises:
        StateError: a record is impossible.
    """
    base = s.PCI_AT
    words = memoryview(section).cast("I")
    extents: list[tuple[int, int]] = []
    owners = _check_contexts(words, base, spec)
    outstanding = _check_commands(words, base, spec)
    for queue in range(s.QUEUES):
        _check_queue(words, base, queue, spec, owners, extents)
        record = s.queue_word(queue) - base // 4
        taken = words[record + s.Q_TAKEN] - words[record + s.Q_DONE] & 0xFFFF_FFFF
        if taken != outstanding.get(queue, 0):
            raise _bad(f"queue {queue} has {outstanding.get(queue, 0)} commands of {taken} taken")
    _check_runs(section, words, base, spec, extents)
    for link in range(s.LINKS):
        if words[2 * s.link_word(link) - base // 4] >= len(NAMES):
            raise _bad(f"link {link} is in an unknown state")
    for slot in range(s.OBJECTS):
        at = s.object_at(slot) - base
        if words[at // 4]:
            _check_object(section, at, slot, owners, extents)
    extents.sort()
    end = 0
    for address, size in extents:
        if address < end or address % PAGE or size % PAGE:
            raise _bad(f"extent at {address:#x} overlaps another or is not aligned")
        end = address + size
    if end > spec.memory_bytes:
        raise _bad(f"an extent ends at {end:#x}, beyond the device's memory")


def _check_contexts(words: memoryview, base: int, spec: Spec) -> dict[int, int]:
    """Context number -> queue."""
    owners: dict[int, int] = {}
    for context in range(s.CONTEXTS):
        queue = words[(s.context_at(context) - base) // 4]
        if queue:
            if queue > spec.queues or queue - 1 in owners.values():
                raise _bad(f"context {context} belongs to queue {queue - 1}")
            owners[context] = queue - 1
    return owners


def _check_queue(
    words: memoryview,
    base: int,
    queue: int,
    spec: Spec,
    owners: dict[int, int],
    extents: list[tuple[int, int]],
) -> None:
    record = s.queue_word(queue) - base // 4
    cursor = s.cursor_word(queue) - base // 4
    status = words[record + s.Q_STATUS]
    if status > max(QueueStatus) or (status and queue >= spec.queues):
        raise _bad(f"queue {queue} has status {status}")
    context = words[record + s.Q_CONTEXT]
    if context and owners.get(context - 1) != queue:
        raise _bad(f"queue {queue} claims context {context - 1}")
    if words[record + s.Q_CLOSING] > 2 or words[cursor + s.C_PHASE] > s.PHASE_RESULT:
        raise _bad(f"queue {queue} is in an unknown phase")
    phase, done = words[cursor + s.C_PHASE], words[record + s.Q_DONE]
    published = words[cursor + s.C_INDEX] + 1 & 0xFFFF_FFFF
    if (phase and words[cursor + s.C_INDEX] != done) and (
        phase != s.PHASE_RESULT or done != published
    ):
        raise _bad(f"queue {queue} completed {done} commands and works on number {published - 1}")
    intent = words[cursor + s.C_INTENT]
    most = _INTENTS.get(words[cursor + s.C_ENTRY] & 0xFFFF, 0)
    if words[cursor + s.C_BINDINGS] > s.SLOTS + 1 or intent > most:
        raise _bad(f"the cursor of queue {queue} is out of range")
    _claim(words, cursor, extents)


def _check_commands(words: memoryview, base: int, spec: Spec) -> dict[int, int]:
    """How many commands that are not ordered each queue has."""
    found: dict[int, int] = {}
    share = share_of(spec.queues)
    for command in range(s.COMMANDS):
        word = s.command_word(command) - base // 4
        phase, queue = words[word + s.K_PHASE], words[word + s.K_QUEUE]
        if phase == s.K_FREE:
            if any(words[word : word + s.COMMAND_RECORD_BYTES // 4]):
                raise _bad(f"command {command} is nobody's and has a record")
            continue
        working = phase in (s.K_RUNNING, s.K_RESULT)
        if phase > s.K_RESULT or queue >= spec.queues or command // share != queue:
            raise _bad(f"command {command} of queue {queue} is in phase {phase}")
        run = words[word + s.K_RUN]
        if (run and not working) or (phase == s.K_RUNNING and not run):
            raise _bad(f"command {command} is on an engine, or is not, against its phase")
        found[queue] = found.get(queue, 0) + 1
    return found


def _check_runs(
    section: bytes | bytearray | memoryview,
    words: memoryview,
    base: int,
    spec: Spec,
    extents: list[tuple[int, int]],
) -> None:
    """Each engine works on one command at most, and has nothing of any other."""
    busy: dict[int, int] = {}
    for command in range(s.COMMANDS):
        run = words[s.command_word(command) + s.K_RUN - base // 4]
        if not run:
            continue
        if run > 2 * spec.chips or busy.setdefault(run - 1, command) != command:
            raise _bad(f"command {command} is on engine {run - 1}")
    for run in range(s.RUNS):
        cursor = s.run_word(run) - base // 4
        at = cursor * 4
        if run not in busy:
            if bytes(section[at : at + s.CURSOR_BYTES]).strip(b"\0"):
                raise _bad(f"engine {run} has a cursor and no command")
            continue
        if words[cursor + s.C_BINDINGS] > s.RUN_SLOTS + 1 or words[cursor + s.C_INTENT]:
            raise _bad(f"the cursor of engine {run} is out of range")
        _claim(words, cursor, extents)


def _claim(words: memoryview, cursor: int, extents: list[tuple[int, int]]) -> None:
    """The scratch memory of a cursor."""
    at = cursor + s.C_SCRATCH64
    address, size = (words[at + n] | words[at + n + 1] << 32 for n in (0, 2))
    if size:
        extents.append((address, size))


def check_rings(
    section: bytes | bytearray | memoryview, window: memoryview, spec: Spec
) -> None:
    """Do the rings in a window (all of its bytes) agree with the queue records? A source that was
    stopped properly has seen to it (``Frontend.settle``).

    Raises:
        StateError: heads, tails and records contradict each other.
    """
    words = memoryview(section).cast("I")
    ring = window.cast("B").cast("I")
    layout = spec.layout
    for queue in range(spec.queues):
        record = s.queue_word(queue) - s.PCI_AT // 4
        cursor = s.cursor_word(queue) - s.PCI_AT // 4
        status = words[record + s.Q_STATUS]
        if not status or words[cursor + s.C_PHASE]:
            continue
        control = layout.control(queue)
        done, taken = words[record + s.Q_DONE], words[record + s.Q_TAKEN]
        head, completed, tail = (ring[(control + n) // 4] for n in (SQ_HEAD, CQ_TAIL, SQ_TAIL))
        if head != taken or completed != done:
            raise _bad(
                f"queue {queue} took {taken} and completed {done}, its rings say {head} and"
                f" {completed}"
            )
        if status == QueueStatus.ENABLED and (tail - taken & 0xFFFF_FFFF) > layout.entries:
            raise _bad(f"the tail of queue {queue} is beyond its ring")


def _check_object(
    section: bytes | bytearray | memoryview,
    at: int,
    slot: int,
    owners: dict[int, int],
    extents: list[tuple[int, int]],
) -> None:
    kind, _, context, dtype, rank, _, *rest = RECORD.unpack_from(section, at)
    dims, (address, nbytes, extent, _) = rest[:8], rest[8:]
    if kind not in KINDS or context not in owners or rank > 8 or any(dims[rank:]):
        raise _bad(f"object {slot} is impossible")
    if kind != TENSOR and (dtype or rank):
        raise _bad(f"object {slot} has the shape of a tensor and is none")
    if kind == TENSOR:
        if dtype not in {int(d) for d in DType}:
            raise _bad(f"object {slot} has an unknown dtype")
        expected = DType(dtype).itemsize
        for dim in dims[:rank]:
            expected *= dim
        if expected != nbytes:
            raise _bad(f"object {slot} has {nbytes} bytes, its shape has {expected}")
    if nbytes > extent:
        raise _bad(f"object {slot} is larger than its extent")
    if extent:
        extents.append((address, extent))


def _bad(why: str) -> StateError:
    return StateError(
        f"the saved state is damaged: {why}", where="migration", hint="save it again at its source"
    )


