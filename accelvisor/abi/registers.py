"""PCI identity, BARs, BAR0 registers and the layout of the BAR2 window.

BAR0 is trapped: each access is one vfio-user message, so it holds what is read once or changed
rarely. BAR2 is the *window*: shared memory that the guest maps without exits; it holds the queues'
control pages, the rings, and staging memory. Private device memory is never mapped by the guest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

VENDOR_ID = 0xACCE
DEVICE_ID = 0x0001
SUBSYSTEM_VENDOR_ID = 0xACCE
SUBSYSTEM_ID = 0x0001
CLASS_CODE = 0x120000  # processing accelerator
REVISION = 0x01

BAR0_BYTES = 0x10000
BAR_REGISTERS = 0
BAR_WINDOW = 2  # 64-bit prefetchable, so it takes BAR2 and BAR3

#: Reads of a register return one of these while a device is absent or in transition (a migration
#: leaves BARs unmapped for a moment; a dead server reads as all-ones): back off and try again.
IN_TRANSITION_32 = (0x0000_0000, 0xFFFF_FFFF)

MAGIC = 0x46564341  # "ACVF"


class Reg(IntEnum):
    """BAR0 offsets. 32-bit unless the name ends in ``_64``; RO unless the comment differs."""

    MAGIC = 0x000
    ABI_VERSION = 0x004
    FEATURES_64 = 0x008
    STATUS = 0x010  # Status flags
    CONTROL = 0x014  # WO: Control bits, each acts once
    INTERRUPT_CAUSE = 0x018  # RW1C: Interrupt flags
    INTERRUPT_MASK = 0x01C  # RW: a set bit keeps that cause from raising the MSI
    UUID = 0x020  # 16 bytes, RFC 4122 order
    WINDOW_BYTES_64 = 0x030
    MEMORY_BYTES_64 = 0x038
    QUEUES = 0x040
    RING_ENTRIES = 0x044
    CORES = 0x048
    EPOCH = 0x04C  # changes when the function was moved or restored
    STAGING_OFFSET_64 = 0x050
    RESET_COUNT = 0x058  # changes at each reset: contexts of before are gone
    MIGRATION_STATE = 0x05C  # VFIO v2 device state numbers
    MODEL_CLOCK_64 = 0x060  # cycles of the emulated hardware
    FAULTS = 0x068  # context faults since reset
    WORKER_STARTS = 0x06C
    CHIPS = 0x070
    SCRATCH = 0x078  # RW: no meaning to the device, for tests of the path
    DOORBELL = 0x100  # WO: + 4 * queue, any value
    QUEUE = 0x1000  # + QUEUE_STRIDE * queue, then QueueReg


QUEUE_STRIDE = 0x40


class QueueReg(IntEnum):
    """Offsets within a queue's register block."""

    CONTROL = 0x00  # RW: QueueControl
    STATUS = 0x04  # RO: QueueStatus
    FAULT = 0x08  # RO: Status code of the context's fault, 0 if none
    FAULT_COMMAND = 0x0C  # RO: cookie of the command that faulted
    CONTEXT = 0x10  # RO: context number + 1, 0 if none is open


class Status(IntFlag):
    READY = 1 << 0
    FAULTED = 1 << 1  # at least one context has faulted since the last reset
    FROZEN = 1 << 2  # stopped for a checkpoint or a migration; commands wait
    BROKEN = 1 << 3  # the holder gave up: no command will complete
    REVOKED = 1 << 4  # the function has no cores and no memory any more
    QUARANTINED = 1 << 5  # it faulted again and again: commands wait until the host looks


class Control(IntFlag):
    RESET = 1 << 0  # same as a function-level reset of everything behind BAR0


class Interrupt(IntFlag):
    COMPLETION = 1 << 0
    FAULT = 1 << 1
    SHAPE = 1 << 2  # the function's resources changed: read the registers again
    MOVED = 1 << 3  # EPOCH changed


class QueueControl(IntEnum):
    DISABLE = 0  # closes the context with all its objects
    ENABLE = 1  # zeroes the queue's indices and starts it


class QueueStatus(IntEnum):
    DISABLED = 0
    ENABLED = 1
    FAULTED = 2  # its context stopped; DISABLE then ENABLE to begin again


# --- the window -----------------------------------------------------------------------------------

PAGE = 4096
#: Queue control page (page number = queue number); one cache line each. Indices are free-running
#: u32 counters; the entry is ``index % RING_ENTRIES``.
SQ_TAIL = 0x000  # written by the guest
SQ_HEAD = 0x040  # written by the device: entries before it may be reused
CQ_HEAD = 0x080  # written by the guest
CQ_TAIL = 0x0C0  # written by the device
#: 1 when the device sleeps: after moving SQ_TAIL the guest reads this (behind a full fence: taking
#: and releasing a lock does it) and rings DOORBELL if it is set. The device sets it, fences, and
#: looks at SQ_TAIL once more before it sleeps, so that no command is lost.
NEED_WAKEUP = 0x100

COMMAND_BYTES = 64
COMPLETION_BYTES = 32


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Where things lie in a window of ``queues`` queues and ``entries`` entries a ring. Bytes."""

    queues: int
    entries: int

    def control(self, queue: int) -> int:
        return queue * PAGE

    def submission(self, queue: int) -> int:
        return self._rings + queue * self._pair

    def completion(self, queue: int) -> int:
        return self.submission(queue) + self.entries * COMMAND_BYTES

    @property
    def staging(self) -> int:
        """First byte that belongs to the guest's own use, page aligned."""
        end = self._rings + self.queues * self._pair
        return (end + PAGE - 1) // PAGE * PAGE

    @property
    def _rings(self) -> int:
        return self.queues * PAGE

    @property
    def _pair(self) -> int:
        return self.entries * (COMMAND_BYTES + COMPLETION_BYTES)
