"""The VFIO migration verbs: freezing by state, the saved state as a stream, dirty pages.

The stream: a header that says what kind of function it is, then chunks of (area, offset, bytes)
in a fixed order, the state section last, then an end mark. While the device is stopped its
content cannot change, so the stream is a function of its position: reading goes on after a worker
died. What is loaded takes effect with the step RESUMING -> STOP, after it has been checked; a
stream that does not check out leaves a device that must be reset.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelvisor.abi.registers import Interrupt
from accelvisor.errors import DeadlineError, StateError
from accelvisor.function import state as s
from accelvisor.function.validate import check_state
from accelvisor.limits import LIMITS, MIB
from accelvisor.vfio_user.dirty import DirtyLog
from accelvisor.vfio_user.features import Features
from accelvisor.vfio_user.migration import MigrationMachine
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import (
    PAGE_BYTES,
    Feature,
    FeatureFlag,
    MigrationFlag,
    MigState,
)

if TYPE_CHECKING:
    from accelvisor.function.device import Device

_MAGIC = 0x4156_4D49_4752_0001
#: magic and version, window bytes, memory bytes, queues, ring entries, bytes of the state section
_HEADER = struct.Struct("<QQQIIQ")
_CHUNK = struct.Struct("<IIQQ")  # area, -, offset, bytes
_STATE, _WINDOW, _MEMORY, _END = 1, 2, 3, 4
_STATE_BYTES = s.DIGEST_END - s.PCI_AT
_MOST = MIB
_ZEROS = bytes(_MOST)

_RUNNING = frozenset((MigState.RUNNING, MigState.PRE_COPY))


class Migration:
    """State machine, stream and dirty log of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        state = device.state
        known = state.u32[s.R_MIGRATION]
        if known == 0 and not state.u32[s.N_FAILED]:
            known = state.u32[s.R_MIGRATION] = int(MigState.RUNNING)
        if known == MigState.RESUMING or state.u32[s.N_LOADING]:
            # What was received lay in the predecessor's memory, or was put in place by half.
            known = self._store(MigState.ERROR)
        # A predecessor may have died between the state and the freeze that goes with it.
        if known in _RUNNING:
            state.u32[s.R_FREEZE] &= ~s.FREEZE_MIGRATION
        else:
            state.u32[s.R_FREEZE] |= s.FREEZE_MIGRATION
        self.machine = MigrationMachine(self._arc, self._rollback, MigState(known))
        self.dirty = DirtyLog()
        supported = MigrationFlag.STOP_COPY | MigrationFlag.P2P
        self.features = _Persistent(self, Features(self.machine, self.dirty, supported))
        #: The client's verbs come on the connection's thread, the daemon's on the control socket's.
        self.lock = threading.RLock()
        self._loading: _Loader | None = None
        self._reader: _Reader | None = None
        self._relog()

    def wrote(self, address: int, count: int) -> None:
        """The device wrote to client memory."""
        self.dirty.mark(address, count)

    def doubt(self, address: int, count: int) -> None:
        """Take a range for dirty that a report is about to cover: what was known of it is lost."""
        if count <= LIMITS.vfio_transfer_bytes * 8 * PAGE_BYTES:  # no larger report is answered
            self.dirty.mark(address, count)

    def reset(self) -> None:
        """A device reset leads to RUNNING from every state."""
        with self.lock:
            self.machine.reset()
            self._loading = None
            self.dirty.stop()
            self._device.state.u32[s.N_LOGGING] = 0
            self._device.state.u32[s.N_LOADING] = 0
            self._store(MigState.RUNNING)
            self._device.engine.thaw(s.FREEZE_MIGRATION)

    def fail(self) -> None:
        """What was being loaded must not be used: only a reset leads on."""
        self.machine.fail()
        self._store(MigState.ERROR)

    def install(self, section: bytearray) -> None:
        """A checked state section takes the place of the state; ``N_LOADING`` is the caller's."""
        device = self._device
        u8, u32 = device.state.u8, device.state.u32
        words = memoryview(section).cast("I")
        base = s.PCI_AT // 4
        for kept in (s.R_MIGRATION, s.R_FREEZE, s.R_RESETTING):
            words[kept - base] = u32[kept]
        epoch = max(u32[s.R_EPOCH], words[s.R_EPOCH - base]) + 1 & 0xFFFF_FFFF
        words[s.R_EPOCH - base] = epoch
        words[s.R_ROW - base] = 0
        u8[s.PCI_AT : s.DIGEST_END] = section
        device.take_epoch(epoch)
        device.reload()

    # --- states -----------------------------------------------------------------------------------

    def _arc(self, before: MigState, after: MigState) -> None:
        engine = self._device.engine
        if before in _RUNNING and after not in _RUNNING:
            try:
                engine.freeze(s.FREEZE_MIGRATION, LIMITS.vfio_reply_s)
            except DeadlineError as error:
                raise Refusal(errno.EBUSY, error.message, where="migration") from error
        if after in (MigState.STOP_COPY, MigState.PRE_COPY):
            self._device.state.u64[s.N_STREAM64] = 0
            self._reader = None
        if after is MigState.RESUMING:
            self._loading = _Loader(self._device)
        if before is MigState.RESUMING:
            loader, self._loading = self._loading, None
            if loader is not None:
                loader.finish()
        self._store(after)
        if before not in _RUNNING and after in _RUNNING:
            engine.thaw(s.FREEZE_MIGRATION)

    def _rollback(self, after: MigState, before: MigState) -> None:
        if before is MigState.RESUMING:
            raise Refusal(errno.EIO, "the loaded state is damaged: reset", where="migration")
        self._store(before)

    def _store(self, state: MigState) -> int:
        word = self._device.state.u32
        word[s.N_FAILED] = int(state is MigState.ERROR)
        word[s.R_MIGRATION] = int(state)
        return int(state)

    # --- stream -----------------------------------------------------------------------------------

    def read(self, count: int) -> bytes:
        """The next bytes of the saved state; empty at the end, and in PRE_COPY, that saves none."""
        if self.machine.state in (MigState.PRE_COPY, MigState.PRE_COPY_P2P):
            return b""
        if self.machine.state is not MigState.STOP_COPY:
            raise Refusal(errno.EINVAL, "no saved state is open", where="migration")
        u64 = self._device.state.u64
        start = u64[s.N_STREAM64]
        if self._reader is None or self._reader.at != start:
            self._reader = _Reader(self._parts(), start)
        out = self._reader.read(count)
        u64[s.N_STREAM64] = start + len(out)
        return out

    def write(self, data: bytes) -> None:
        """More of the stream."""
        if self.machine.state is not MigState.RESUMING or self._loading is None:
            raise Refusal(errno.EINVAL, "no state is being loaded", where="migration")
        try:
            self._loading.feed(data)
        except StateError as error:
            self.fail()
            raise Refusal(errno.EINVAL, error.message, where="migration") from error

    def _parts(self) -> Iterator[memoryview | bytes]:
        device = self._device
        yield _header(device)
        for offset in range(0, len(device.window), _MOST):
            yield from _chunk(_WINDOW, offset, device.window[offset : offset + _MOST])
        for start, size in device.memory.extents():
            for offset in range(start, start + size, _MOST):
                end = min(offset + _MOST, start + size)
                yield from _chunk(_MEMORY, offset, device.memory.view[offset:end])
        for at in range(0, _STATE_BYTES, _MOST):
            end = min(at + _MOST, _STATE_BYTES)
            yield from _chunk(_STATE, at, device.state.u8[s.PCI_AT + at : s.PCI_AT + end])
        yield _CHUNK.pack(_END, 0, 0, 0)

    # --- dirty pages across workers ---------------------------------------------------------------

    def remember_logging(self, data: bytes) -> None:
        """Keep a START request, so that logging survives the worker."""
        state = self._device.state
        at = s.N_LOGGING_AT
        state.u8[at : at + len(data)] = data
        state.u32[s.N_LOGGING] = len(data)

    def forget_logging(self) -> None:
        """Logging is off."""
        self._device.state.u32[s.N_LOGGING] = 0

    def _relog(self) -> None:
        """After a restart nobody knows what was dirty: everything that is mapped is."""
        state = self._device.state
        size = state.u32[s.N_LOGGING]
        if size:
            data = bytes(state.u8[s.N_LOGGING_AT : s.N_LOGGING_AT + size])
            self.features.inner.handle(FeatureFlag.SET, Feature.DMA_LOGGING_START, data)
            for address, count in self._device.maps:
                self.dirty.mark(address, count)


class _Persistent:
    """Features whose logging requests are kept in the state."""

    def __init__(self, migration: Migration, inner: Features) -> None:
        self._migration = migration
        self.inner = inner

    def handle(self, flags: int, feature: int, data: bytes) -> bytes:
        """As ``Features.handle``."""
        with self._migration.lock:
            return self._handle(flags, feature, data)

    def _handle(self, flags: int, feature: int, data: bytes) -> bytes:
        starting = feature == Feature.DMA_LOGGING_START and flags & FeatureFlag.SET
        if starting and len(data) > s.N_LOGGING_BYTES:
            raise Refusal(errno.E2BIG, "too many logging ranges", where="migration")
        answer = self.inner.handle(flags, feature, data)
        if not flags & FeatureFlag.PROBE and flags & FeatureFlag.SET:
            if starting:
                self._migration.remember_logging(data)
            elif feature == Feature.DMA_LOGGING_STOP:
                self._migration.forget_logging()
        return answer


class _Reader:
    """A stream of parts, read from a position on."""

    def __init__(self, parts: Iterator[memoryview | bytes], start: int) -> None:
        self.at = start
        self._parts = parts
        self._left: memoryview | bytes = b""
        skip = start
        for part in parts:
            if skip < len(part):
                self._left = part[skip:]
                break
            skip -= len(part)

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes; fewer at the end."""
        out = bytearray()
        while len(out) < count:
            if not len(self._left):
                self._left = next(self._parts, b"")
                if not len(self._left):
                    break
            take = min(count - len(out), len(self._left))
            out += self._left[:take]
            self._left = self._left[take:]
        self.at += len(out)
        return bytes(out)


class _Loader:
    """Takes a stream apart as it comes; window and memory go into place, the state waits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending = bytearray()
        self._section = bytearray(_STATE_BYTES)
        self._seen_header = False
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Raises StateError."""
        self._pending += data
        if not self._seen_header:
            if len(self._pending) < _HEADER.size:
                return
            if bytes(self._pending[: _HEADER.size]) != _header(self._device):
                raise _damaged("it is of another version, or of a function of another size")
            del self._pending[: _HEADER.size]
            self._seen_header = True
            # What the stream does not mention is zero.
            self._device.objects.destroy_all()
            self._device.clear_window()
        while len(self._pending) >= _CHUNK.size:
            area, zero, offset, count = _CHUNK.unpack_from(self._pending)
            if self._ended or zero or count > _MOST or area not in (1, 2, 3, 4):
                raise _damaged("a chunk header is impossible")
            if len(self._pending) < _CHUNK.size + count:
                return
            self._place(area, offset, bytes(self._pending[_CHUNK.size : _CHUNK.size + count]))
            del self._pending[: _CHUNK.size + count]

    def _place(self, area: int, offset: int, data: bytes) -> None:
        if area == _END:
            self._ended = True
            return
        target = {
            _STATE: memoryview(self._section),
            _WINDOW: self._device.window,
            _MEMORY: self._device.memory.view,
        }[area]
        if offset + len(data) > len(target):
            raise _damaged("a chunk leaves its area")
        target[offset : offset + len(data)] = data

    def finish(self) -> None:
        """Check the state and let it take effect. Raises Refusal."""
        device = self._device
        if not self._seen_header and not self._pending:
            return  # entered and left without data: the device stays as it was made
        if not self._ended or self._pending:
            raise Refusal(errno.EINVAL, "the saved state is cut short", where="migration")
        try:
            check_state(self._section, device.spec)
        except StateError as error:
            raise Refusal(errno.EINVAL, error.message, where="migration") from error
        u32 = device.state.u32
        u32[s.N_LOADING] = 1
        device.migration.install(self._section)
        device.interrupts.set_cause(Interrupt.MOVED)
        u32[s.N_LOADING] = 0


def _header(device: Device) -> bytes:
    spec = device.spec
    return _HEADER.pack(
        _MAGIC, spec.window_bytes, spec.memory_bytes, spec.queues, spec.ring_entries, _STATE_BYTES
    )


def _chunk(area: int, offset: int, data: memoryview) -> Iterator[bytes | memoryview]:
    if data.tobytes() != _ZEROS[: len(data)]:
        yield _CHUNK.pack(area, 0, offset, len(data))
        yield data


def _damaged(why: str) -> StateError:
    return StateError(
        f"the saved state is damaged: {why}", where="migration", hint="save it again at its source"
    )
