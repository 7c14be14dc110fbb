"""The layout of the ``state`` memfd: everything of a function that must outlive its worker.

Fixed little-endian records at fixed offsets, reached as 32- and 64-bit words. A store of an aligned
word either happened or it did not when the worker is killed, and stores happen in program order, so
each change writes its fields first and the word that makes them count last. Unused bytes are zero:
equal states have equal bytes, and :meth:`State.digest` is a name for the state.

Standard library only; sections of a connection (DMA map, receive and send records) come last and
are not part of the digest.
"""

from __future__ import annotations

import mmap

from accelvisor.errors import StateError
from accelvisor.limits import LIMITS

MAGIC = 0x5445_5453_5643_4146
VERSION = 3

QUEUES = LIMITS.queues
CONTEXTS = LIMITS.contexts
OBJECTS = LIMITS.objects
SLOTS = LIMITS.program_slots
COMMANDS = LIMITS.commands
#: Engines: two for each chip. Each works on one command that is not ordered at a time.
RUNS = 2 * LIMITS.chips
#: Bindings of a launch that is not ordered.
RUN_SLOTS = 128
LINKS = LIMITS.function_links
COMPLETED = LIMITS.completed_ids
#: Distinct files that a client may have mapped at a time, and the interrupt's eventfd.
FD_SLOTS = 128

_PAGE = 4096


def _up(n: int) -> int:
    return (n + _PAGE - 1) // _PAGE * _PAGE


# --- sections (byte offset, bytes) ---------------------------------------------------------------

HEADER_AT = 0
PCI_AT = _PAGE
PCI_BYTES = _PAGE
REGS_AT = PCI_AT + PCI_BYTES
QUEUES_AT = REGS_AT + _PAGE
QUEUE_BYTES = 64
CURSORS_AT = QUEUES_AT + _up(QUEUES * QUEUE_BYTES)
CURSOR_BYTES = 256
CONTEXTS_AT = CURSORS_AT + _up(QUEUES * CURSOR_BYTES)
CONTEXT_BYTES = 1024
OBJECTS_AT = CONTEXTS_AT + _up(CONTEXTS * CONTEXT_BYTES)
OBJECT_BYTES = 128
BINDINGS_AT = OBJECTS_AT + _up(OBJECTS * OBJECT_BYTES)
BINDING_BYTES = 16
COMMANDS_AT = BINDINGS_AT + _up(QUEUES * SLOTS * BINDING_BYTES)
COMMAND_RECORD_BYTES = 128
RUNS_AT = COMMANDS_AT + _up(COMMANDS * COMMAND_RECORD_BYTES)
RUN_BINDINGS_AT = RUNS_AT + _up(RUNS * CURSOR_BYTES)
COMPLETED_AT = RUN_BINDINGS_AT + _up(RUNS * RUN_SLOTS * BINDING_BYTES)
GRAPHS_AT = COMPLETED_AT + _up(QUEUES * COMPLETED * 4)
GRAPH_QUEUE_BYTES = 32
GRAPH_BYTES = RUNS * GRAPH_QUEUE_BYTES
LINKS_AT = GRAPHS_AT + _up((QUEUES + RUNS) * GRAPH_BYTES)
LINK_BYTES = 64
DIGEST_END = LINKS_AT + _up(LINKS * LINK_BYTES)

COUNTERS_AT = DIGEST_END
CONNECTION_AT = COUNTERS_AT + _PAGE
DMA_AT = CONNECTION_AT + _PAGE
DMA_BYTES = 32
DMA_RECORDS = LIMITS.dma_maps
RX_AT = DMA_AT + _up(DMA_RECORDS * DMA_BYTES)
RX_DATA_AT = RX_AT + _PAGE
TX_AT = RX_DATA_AT + _up(LIMITS.vfio_message_bytes)
TX_DATA_AT = TX_AT + _PAGE
SHAPE_AT = TX_DATA_AT + _up(LIMITS.vfio_message_bytes)  # shape.py
SHAPE_RECORD_BYTES = 1024
STATE_BYTES = SHAPE_AT + _PAGE

# --- the track memfd (track.py): a byte a page, of device memory, then of each client file -------

TRACK_MEMORY_BYTES = LIMITS.memory_bytes // _PAGE
TRACK_FILE_BYTES = LIMITS.guest_file_bytes // _PAGE
#: Nearly all of it is holes: only marks that are set take memory.
TRACK_BYTES = TRACK_MEMORY_BYTES + FD_SLOTS * TRACK_FILE_BYTES

# --- header: 64-bit words -------------------------------------------------------------------------

H_MAGIC = HEADER_AT // 8
H_VERSION = H_MAGIC + 1
H_BYTES = H_MAGIC + 2

# --- registers: 32-bit word indices into the whole state -----------------------------------------

R = REGS_AT // 4
R_CAUSE = R + 0
R_MASK = R + 1
R_SCRATCH = R + 2
R_RESETS = R + 3
R_EPOCH = R + 4
R_MIGRATION = R + 5  # VFIO v2 device state
R_FAULTS = R + 6
R_FREEZE = R + 7  # Freeze bits
R_RESETTING = R + 8  # 1 while a reset is being carried out
R_ROW = R + 9  # faults since a program last ran to its end
R_CLOCK64 = (REGS_AT + 64) // 8  # cycles of queues that are disabled by now

FREEZE_CONTROL = 1  # asked for on the control socket
FREEZE_MIGRATION = 2  # the device state is neither RUNNING nor PRE_COPY
FREEZE_DETACHED = 4  # no client is connected
FREEZE_FENCED = 8  # the daemon says who owns the function, and so far it is not here
FREEZE_SHAPE = 16  # its part of the card is being changed
FREEZE_QUARANTINE = 32  # it faulted too often; somebody has to look

# --- queue records: words relative to queue_word(q) -----------------------------------------------

Q_STATUS = 0  # QueueStatus
Q_FAULT = 1
Q_FAULT_COMMAND = 2
Q_CONTEXT = 3  # context number + 1
Q_DONE = 4  # commands completed since ENABLE, free-running: CQ_TAIL
Q_CLOSING = 5  # 1 while a DISABLE is being carried out
Q_TAKEN = 6  # commands taken from the ring, an ordered one with its completion: SQ_HEAD
Q_SYNCS = 7  # ids that were put among the completed ones, free-running
Q_CYCLES64 = 12  # byte 48: model cycles of this queue since ENABLE

# --- cursor records: words relative to cursor_word(q) ---------------------------------------------

C_ENTRY = 0  # 16 words: the device's own copy of the command
C_PHASE = 16
C_INDEX = 17  # the command's free-running number
C_DEATHS = 18  # points of blame since the command last came further
C_BINDINGS = 19  # number of bindings + 1 once they are in the state
C_INTENT = 20  # slot + 1 of the object or context that the command creates or destroys
C_STATUS = 21  # result: CommandStatus
C_POSITION64 = 22  # byte 88: launch: repeat << 32 | operation << 20 | tile; copy: bytes done
C_SNAPSHOT64 = 24  # byte 96: (repeat << 12 | operation) + 1 whose read operands the scratch holds
C_SCRATCH64 = 26  # byte 104: device address
C_SCRATCH_BYTES64 = 28  # byte 112
C_VALUE64 = 30  # byte 120: result
C_COST64 = 32  # byte 128: result, cycles
C_CYCLES64 = 34  # byte 136: Q_CYCLES64 after the command, so that adding twice adds once
C_REACHED = 36  # checksum of how far the command was when a worker last took it over

C_TURN = 37  # graph: how often it has come to its end

PHASE_IDLE = 0
PHASE_RUNNING = 1
PHASE_RESULT = 2  # the result is decided, perhaps not yet published

POSITION_TILES = 1 << 20
POSITION_OPERATIONS = 1 << 12

# --- records of commands that are not ordered: words relative to command_word(n) ------------------

K_ENTRY = 0  # 16 words: the device's own copy
K_PHASE = 16  # written last when the command is taken, and first when it is forgotten
K_QUEUE = 17
K_INDEX = 18  # its number among those that were taken from the queue
K_RUN = 19  # the engine that works on it + 1
K_STATUS = 20  # result, as in a cursor
K_POST = 21  # the number of its completion
K_VALUE64 = 22  # byte 88
K_COST64 = 24  # byte 96
K_CYCLES64 = 26  # byte 104: Q_CYCLES64 after the command

K_FREE = 0
K_WAITING = 1  # for what it depends on
K_READY = 2  # for an engine
K_RUNNING = 3
K_RESULT = 4  # the result is decided
K_POSTING = 5  # the number of its completion, too

# --- graph records: 64-bit words relative to graph_word(g) + 4 * queue of the graph ---------------

G_POSITION = 0  # turn << 32 | entries of the queue that are done
G_TILE = 1  # as C_POSITION64, of the node in progress
G_SNAPSHOT = 2  # as C_SNAPSHOT64
G_NODE = 3  # the position that these two belong to + 1

# --- link records: 64-bit words relative to link_word(n) ------------------------------------------

L_STATE = 0  # fabric.links.LinkState
L_FLITS = 1  # carried, free-running: the next one's sequence number
L_BYTES = 2
L_TRANSFERS = 3

# --- context records: bytes relative to context_at(c) ---------------------------------------------

X_OPEN = 0  # u32: queue + 1, written last
X_PID = 4
X_FAULT = 8  # u32: CommandStatus of the last refusal or fault
X_COOKIE = 12
X_NAME = 16  # 48 bytes
X_TEXT = 64  # 960 bytes of UTF-8
X_NAME_BYTES = 48
X_TEXT_BYTES = CONTEXT_BYTES - X_TEXT

# --- counters: 64-bit words, for people only ------------------------------------------------------

COUNTER_NAMES = (
    "commands", "refusals", "faults", "interrupts", "doorbells", "bytes_in", "bytes_out",
    "launches", "tiles", "instructions", "snapshots", "sleeps", "resets", "requests", "connections",
    "port_bytes", "port_waits", "port_wait_us",
)  # fmt: skip
K = {name: COUNTERS_AT // 8 + i for i, name in enumerate(COUNTER_NAMES)}
W_STARTS = COUNTERS_AT // 8 + 64
W_PORT_RATE = COUNTERS_AT // 8 + 128  # bytes a second that may pass the host port; 0: unlimited
W_PORT_UNTIL = W_PORT_RATE + 1  # CLOCK_MONOTONIC, ns: until then what passed was more than that
W_FAULT_RESETS = W_STARTS + 1  # resets because of faults in a row
W_FAULT_TIMES = W_STARTS + 2  # when the last of them were: nanoseconds, a ring

# --- connection: 32-bit words ---------------------------------------------------------------------

N = CONNECTION_AT // 4
N_SEEN = N + 0  # number of the connection that the device was reset for
N_DMA_TOP = N + 2  # DMA records below this one may be live
N_IRQ_SLOT = N + 1  # descriptor slot + 1 of the MSI's eventfd
N_STREAM64 = (CONNECTION_AT + 64) // 8  # migration stream position
N_STREAM_START64 = N_STREAM64 + 1  # the same, before the message in flight
N_LOGGING = N + 32  # bytes of the request that began dirty page logging, 0 while it is off
N_FAILED = N + 33  # 1 while the migration state is ERROR, whose number is 0
N_LOADING = N + 35  # 1 while a loaded state takes the place of the old one
N_TRACKING = N + 36  # 1 while what the device writes is tracked (track.py)
N_AGREEMENT = N + 34  # bytes of the negotiated agreement
N_AGREEMENT_AT = CONNECTION_AT + 256
N_AGREEMENT_BYTES = 768
N_LOGGING_AT = CONNECTION_AT + 1024
N_LOGGING_BYTES = _PAGE - 1024


def queue_word(queue: int) -> int:
    """First 32-bit word of a queue's record."""
    return (QUEUES_AT + queue * QUEUE_BYTES) // 4


def cursor_word(queue: int) -> int:
    """First 32-bit word of a queue's cursor."""
    return (CURSORS_AT + queue * CURSOR_BYTES) // 4


def context_at(context: int) -> int:
    """First byte of a context's record."""
    return CONTEXTS_AT + context * CONTEXT_BYTES


def object_at(slot: int) -> int:
    """First byte of an object's record."""
    return OBJECTS_AT + slot * OBJECT_BYTES


def bindings_at(queue: int) -> int:
    """First byte of the bindings of a queue's launch in progress."""
    return BINDINGS_AT + queue * SLOTS * BINDING_BYTES


def command_word(command: int) -> int:
    """First 32-bit word of the record of a command that is not ordered."""
    return (COMMANDS_AT + command * COMMAND_RECORD_BYTES) // 4


def run_word(run: int) -> int:
    """First 32-bit word of an engine's cursor."""
    return (RUNS_AT + run * CURSOR_BYTES) // 4


def run_bindings_at(run: int) -> int:
    """First byte of the bindings of the launch that an engine works on."""
    return RUN_BINDINGS_AT + run * RUN_SLOTS * BINDING_BYTES


def completed_word(queue: int) -> int:
    """First 32-bit word of a queue's completed ids."""
    return (COMPLETED_AT + queue * COMPLETED * 4) // 4


def link_word(link: int) -> int:
    """First 64-bit word of a link's record, in the specification's order."""
    return (LINKS_AT + link * LINK_BYTES) // 8


def graph_word(graph: int) -> int:
    """First 64-bit word of a graph's progress: the queue's, or QUEUES + the engine's."""
    return (GRAPHS_AT + graph * GRAPH_BYTES) // 8


class State:
    """A mapped state memfd.

    ``u8``, ``u32`` and ``u64`` are views of the same bytes; indices are in elements. Components
    keep references to the views in local variables, since most accesses are on the MMIO path.

    Raises:
        StateError: the file is of another size, magic or version.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd  # stays the caller's
        self.map = mmap.mmap(fd, STATE_BYTES)
        self.u8 = memoryview(self.map)
        self.u32 = self.u8.cast("I")
        self.u64 = self.u8.cast("Q")
        u64 = self.u64
        if not u64[H_MAGIC]:
            u64[H_VERSION] = VERSION
            u64[H_BYTES] = STATE_BYTES
            u64[H_MAGIC] = MAGIC
        if (u64[H_MAGIC], u64[H_VERSION], u64[H_BYTES]) != (MAGIC, VERSION, STATE_BYTES):
            raise StateError(
                f"magic {u64[H_MAGIC]:#x}, version {u64[H_VERSION]}, {u64[H_BYTES]} bytes",
                where="function-state",
                hint="the state belongs to another version of accelvisor: restart the function",
            )

    def zero(self, at: int, count: int) -> None:
        """Clear ``count`` bytes from byte ``at`` on."""
        self.u8[at : at + count] = bytes(count)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter. Counters are for people: a killed worker may lose one."""
        self.u64[K[name]] += amount

    def digest(self) -> str:
        """SHA-256 over the canonical part: configuration space, registers, queues, objects."""
        import hashlib  # loads OpenSSL; the holder never asks

        return hashlib.sha256(self.u8[PCI_AT:DIGEST_END]).hexdigest()

    def close(self) -> None:
        """Unmap. Views handed out before must be gone."""
        self.u32.release()
        self.u64.release()
        self.u8.release()
        self.map.close()
