"""BAR0: the trapped control registers (layout: accelvisor/abi/registers.py).

Accesses of any size and alignment within the BAR are defined: they are cut into aligned 32-bit
words and byte lanes, low word first. Reads have no effect. Writes to read-only and unused registers
are ignored; write-1-to-clear and act-once registers see only the lanes that were written.
"""

from __future__ import annotations

import errno
from typing import Protocol

from accelvisor.abi import ABI_VERSION
from accelvisor.abi.registers import (
    BAR0_BYTES,
    MAGIC,
    QUEUE_STRIDE,
    Control,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
    Status,
)
from accelvisor.function import state as s
from accelvisor.function.interrupts import Interrupts
from accelvisor.function.spec import Spec
from accelvisor.function.state import State
from accelvisor.vfio_user.model import Refusal

_ALL = 0xFFFF_FFFF
_READY = int(Status.READY)
_FAULTED = int(Status.FAULTED)
_FROZEN = int(Status.FROZEN)
_REVOKED = int(Status.REVOKED)
_QUARANTINED = int(Status.QUARANTINED)
_CORES = int(Reg.CORES)
_DOORBELL = int(Reg.DOORBELL)
_QUEUE = int(Reg.QUEUE)


class Actions(Protocol):
    """What register writes set in motion. None of these may wait longer than one tile."""

    def doorbell(self, queue: int) -> None: ...

    def queue_control(self, queue: int, value: int) -> None: ...

    def function_reset(self) -> None: ...


class Registers:
    """Reads and writes of BAR0 over the state memfd."""

    def __init__(
        self, state: State, spec: Spec, interrupts: Interrupts, actions: Actions
    ) -> None:
        self._u32 = state.u32
        self._u64 = state.u64
        self._interrupts = interrupts
        self._actions = actions
        self._queues = spec.queues
        self._constant = _constants(spec)
        self._stored = {
            int(Reg.INTERRUPT_CAUSE): s.R_CAUSE,
            int(Reg.INTERRUPT_MASK): s.R_MASK,
            int(Reg.SCRATCH): s.R_SCRATCH,
            int(Reg.RESET_COUNT): s.R_RESETS,
            int(Reg.EPOCH): s.R_EPOCH,
            int(Reg.MIGRATION_STATE): s.R_MIGRATION,
            int(Reg.FAULTS): s.R_FAULTS,
            int(Reg.WORKER_STARTS): s.W_STARTS * 2,
        }

    def reshape(self, spec: Spec) -> None:
        """The function has another size."""
        self._constant = _constants(spec)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``.

        Raises:
            Refusal: the access leaves the BAR (EINVAL).
        """
        if count == 4 and not offset & 3 and 0 <= offset < BAR0_BYTES:
            return self.read32(offset).to_bytes(4, "little")
        _check(offset, count)
        first = offset & ~3
        words = range(first, (offset + count + 3) & ~3, 4)
        raw = b"".join(self.read32(at).to_bytes(4, "little") for at in words)
        return raw[offset - first : offset - first + count]

    def write(self, offset: int, data: bytes) -> None:
        """Store ``data`` at ``offset``.

        Raises:
            Refusal: the access leaves the BAR (EINVAL).
        """
        count = len(data)
        if count == 4 and not offset & 3 and 0 <= offset < BAR0_BYTES:
            self.write32(offset, int.from_bytes(data, "little"), _ALL)
            return
        _check(offset, count)
        first = offset & ~3
        lanes = (bytes(offset - first) + b"\xff" * count).ljust((count + 10) & ~3, b"\0")
        padded = (bytes(offset - first) + data).ljust(len(lanes), b"\0")
        for at in range(0, len(lanes), 4):
            mask = int.from_bytes(lanes[at : at + 4], "little")
            if mask:
                self.write32(first + at, int.from_bytes(padded[at : at + 4], "little"), mask)

    def read32(self, offset: int) -> int:
        """One aligned word."""
        value = self._constant.get(offset)
        if value is not None:
            return value
        index = self._stored.get(offset)
        if index is not None:
            return self._u32[index]
        if offset >= _QUEUE:
            return self._read_queue(offset - _QUEUE)
        if offset == Reg.STATUS:
            return self._status()
        if offset & ~4 == Reg.MODEL_CLOCK_64:
            return self.model_clock() >> (offset & 4) * 8 & _ALL
        return 0

    def write32(self, offset: int, value: int, mask: int) -> None:
        """One aligned word, of which only the bits in ``mask`` were written."""
        value &= mask
        if offset >= _QUEUE:
            queue, register = divmod(offset - _QUEUE, QUEUE_STRIDE)
            if register == QueueReg.CONTROL and queue < self._queues and mask & 0xFF:
                self._actions.queue_control(queue, value)
        elif offset >= _DOORBELL:
            queue = (offset - _DOORBELL) >> 2
            if queue < self._queues:
                self._actions.doorbell(queue)
        elif offset == Reg.INTERRUPT_CAUSE:
            self._interrupts.acknowledge(value)
        elif offset == Reg.INTERRUPT_MASK:
            self._interrupts.set_mask(self._u32[s.R_MASK] & ~mask | value)
        elif offset == Reg.CONTROL:
            if value & Control.RESET:
                self._actions.function_reset()
        elif offset == Reg.SCRATCH:
            self._u32[s.R_SCRATCH] = self._u32[s.R_SCRATCH] & ~mask | value

    def model_clock(self) -> int:
        """Cycles of the emulated hardware: all finished commands of all queues."""
        u64 = self._u64
        total = u64[s.R_CLOCK64]
        for queue in range(self._queues):
            total += u64[s.queue_word(queue) // 2 + s.Q_CYCLES64 // 2]
        return total & 0xFFFF_FFFF_FFFF_FFFF

    def _status(self) -> int:
        u32 = self._u32
        status = 0 if u32[s.R_RESETTING] else _READY
        if u32[s.R_FAULTS]:
            status |= _FAULTED
        frozen = u32[s.R_FREEZE]
        if frozen:
            status |= _FROZEN
            if frozen & s.FREEZE_QUARANTINE:
                status |= _QUARANTINED
        if not self._constant[_CORES]:
            status |= _REVOKED
        return status

    def _read_queue(self, offset: int) -> int:
        queue, register = divmod(offset, QUEUE_STRIDE)
        if queue >= self._queues:
            return 0
        word = s.queue_word(queue)
        if register == QueueReg.CONTROL:
            disabled = self._u32[word + s.Q_STATUS] == QueueStatus.DISABLED
            return int(QueueControl.DISABLE if disabled else QueueControl.ENABLE)
        field = _QUEUE_FIELDS.get(register)
        return 0 if field is None else self._u32[word + field]


_QUEUE_FIELDS = {
    int(QueueReg.STATUS): s.Q_STATUS,
    int(QueueReg.FAULT): s.Q_FAULT,
    int(QueueReg.FAULT_COMMAND): s.Q_FAULT_COMMAND,
    int(QueueReg.CONTEXT): s.Q_CONTEXT,
}


def _constants(spec: Spec) -> dict[int, int]:
    words = {
        int(Reg.MAGIC): MAGIC,
        int(Reg.ABI_VERSION): ABI_VERSION,
        int(Reg.QUEUES): spec.queues,
        int(Reg.RING_ENTRIES): spec.ring_entries,
        int(Reg.CORES): spec.cores,
        int(Reg.CHIPS): spec.chips,
    }
    for at in range(0, 16, 4):
        words[Reg.UUID + at] = int.from_bytes(spec.uuid_bytes[at : at + 4], "little")
    for register, value in (
        (Reg.FEATURES_64, 0),
        (Reg.WINDOW_BYTES_64, spec.window_bytes),
        (Reg.MEMORY_BYTES_64, spec.memory_bytes),
        (Reg.STAGING_OFFSET_64, spec.layout.staging),
    ):
        words[int(register)] = value & _ALL
        words[register + 4] = value >> 32
    return words


def _check(offset: int, count: int) -> None:
    if offset < 0 or count < 0 or offset + count > BAR0_BYTES:
        raise Refusal(errno.EINVAL, f"BAR0 access of {count} bytes at {offset:#x}", where="bar0")
