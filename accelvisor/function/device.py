"""The device model: the function behind its vfio-user verbs.

Wires the parts of this room together over three memfds and answers
:class:`accelvisor.vfio_user.model.DeviceModel`. Verbs run on the connection's thread and never wait
for computation, except a reset, which waits for the tile in progress.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from accelvisor.abi.registers import BAR0_BYTES, BAR_REGISTERS, BAR_WINDOW, PAGE
from accelvisor.errors import DeadlineError
from accelvisor.function import codes
from accelvisor.function import shape as shapes
from accelvisor.function import state as s
from accelvisor.function.commands import Commands
from accelvisor.function.descriptors import Descriptors
from accelvisor.function.dma import AddressMap, Dma
from accelvisor.function.engine import Engine
from accelvisor.function.frontend import Frontend
from accelvisor.function.interrupts import Interrupts, take_eventfd
from accelvisor.function.launch import Launcher
from accelvisor.function.links import Links
from accelvisor.function.migrate import Migration
from accelvisor.function.objects import Contexts, Memory, Objects
from accelvisor.function.operands import Operands
from accelvisor.function.pci import CONFIG_BYTES, ConfigSpace
from accelvisor.function.pool import Pool
from accelvisor.function.port import Port
from accelvisor.function.query import Queries
from accelvisor.function.registers import Registers
from accelvisor.function.remote import RemoteDma
from accelvisor.function.running import Running
from accelvisor.function.shape import Shape
from accelvisor.function.spec import Spec
from accelvisor.function.state import State
from accelvisor.function.trace import Trace
from accelvisor.function.track import Track
from accelvisor.isolation.segments import SegmentTable
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import DeviceInfo, IrqInfo, Refusal, RegionInfo
from accelvisor.vfio_user.protocol import (
    PCI_IRQS,
    PCI_REGIONS,
    DeviceFlag,
    IrqInfoFlag,
    IrqSet,
    PciIrq,
    PciRegion,
    RegionFlag,
    UnmapFlag,
)

log = logging.getLogger(__name__)

_CONFIG = int(PciRegion.CONFIG)
_RW = RegionFlag.READ | RegionFlag.WRITE


class Device:
    """One function. ``window_fd`` is handed to clients; the fds stay the caller's.

    Args:
        descriptors: what the client gave; the model reads their slots from ``incoming``, which the
            connection fills for each message (descriptor number in the message -> slot).
    """

    def __init__(
        self,
        spec: Spec,
        state: State,
        window_fd: int,
        memory_fd: int,
        track_fd: int,
        descriptors: Descriptors,
    ) -> None:
        self.shape = shapes.current(state.u8, spec)
        self.spec = spec = _sized(spec, self.shape)
        self.state = state
        self._show_epoch(self.shape.epoch)
        state.u32[s.R_FREEZE] &= ~s.FREEZE_SHAPE  # whoever asked for it asks again
        self.descriptors = descriptors
        self.incoming: dict[int, int] = {}
        #: Called when the function was quarantined, or computes again.
        self.on_trouble: Callable[[], None] = lambda: None
        self.window_fd = window_fd
        self._window_map = mmap.mmap(window_fd, spec.window_bytes)
        self.window = memoryview(self._window_map)
        self.memory_fd = memory_fd
        if state.u32[s.N_LOADING]:
            # Half a loaded state is none: its records must not be believed. A reset leads on.
            state.zero(s.QUEUES_AT, s.DIGEST_END - s.QUEUES_AT)
        starts = state.u64[s.W_STARTS]
        self.config = ConfigSpace(state, spec.window_bytes)
        self.interrupts = Interrupts(state)
        self.maps = AddressMap(state, descriptors.files)
        self.engine = Engine(state, self._reset_on_engine, spec.chips, spec.cores)
        self.remote = RemoteDma(self.engine.nudge, starts * 4099)
        self.track = Track(state, track_fd, spec.memory_bytes)
        self.memory = Memory(self._map_memory(memory_fd), _table(self.shape), self.track)
        self.objects = Objects(state, self.memory)
        self.contexts = Contexts(state)
        self.migration = Migration(self)
        self.dma_lock = threading.Lock()
        self.dma = Dma(
            self.maps,
            descriptors.files,
            self.remote,
            lambda: self.config.bus_master,
            self.migration.wrote,
            self.dma_lock,
            self.track.file,
        )
        self.pool = Pool(max(1, spec.cores))
        self.port = Port(state, self.engine.nudge)
        self.trace = Trace()
        self.links = Links(state, spec.fabric)
        programs = codes.programs(self.engine.nudge)
        graphs = codes.graphs(self.engine.nudge)
        self.launcher = Launcher(state, self.memory, self.objects, self.links)
        self.queries = Queries(
            state, spec, self.memory, self.objects, self.contexts, self.trace, self.links
        )
        attention = self.engine.attention
        operands = Operands(
            self.window, spec.layout.staging, self.dma, self.port, attention
        )
        running = Running(
            state, self.memory, self.objects, programs, graphs, self.launcher, self.engine.engines,
            self.pool, self.trace, attention, operands.fetch,
        )  # fmt: skip
        self.commands = Commands(
            state, operands, running, self.memory, self.objects, self.contexts, programs, graphs,
            self.queries, self.links, self.dma, self.port, attention,
        )  # fmt: skip
        self.frontend = Frontend(
            state, self.window, spec.layout, self.commands, self.contexts, spec.chips,
            self.interrupts.set_cause,
        )  # fmt: skip
        self.frontend.revoked = self.shape.revoked
        self.frontend.on_row = self._faulted_in_a_row
        self.registers = Registers(state, spec, self.interrupts, self)
        slot = state.u32[s.N_IRQ_SLOT]
        if slot and slot - 1 in descriptors.fds:
            self.interrupts.attach(descriptors.fds[slot - 1])

    def start(self) -> None:
        """Begin (or go on) serving the queues."""
        self.engine.start(self.frontend)

    def stop(self) -> None:
        """End the engine and its cores."""
        self.engine.stop()
        self.engine.engines.close()
        self.pool.close()

    # --- what register writes set in motion (registers.Actions) -----------------------------------

    def doorbell(self, queue: int) -> None:
        """Wake the engine."""
        self.engine.doorbell(queue)

    def queue_control(self, queue: int, value: int) -> None:
        """ENABLE or DISABLE, carried out by the engine."""
        self.engine.queue_control(queue, value)

    def function_reset(self) -> None:
        """Everything behind BAR0 begins anew; configuration space stays."""
        try:
            self.engine.request_reset(LIMITS.vfio_reply_s)
        except DeadlineError as error:
            raise Refusal(errno.ETIMEDOUT, error.message, where="reset") from error

    def _reset_on_engine(self) -> None:
        """Each step may be repeated by another worker; the last makes it done."""
        state, frontend = self.state, self.frontend
        for lane in frontend.lanes:
            frontend.drop(lane)
            state.u32[lane.record] = 0
            state.zero(lane.record * 4, s.QUEUE_BYTES)
            state.zero(lane.cursor * 4, s.CURSOR_BYTES)
        staging = self.spec.layout.staging
        self.window[:staging] = bytes(staging)
        self.objects.destroy_all()
        for context in range(s.CONTEXTS):
            self.contexts.close(context)
        state.zero(s.BINDINGS_AT, s.DIGEST_END - s.BINDINGS_AT)
        for lane in frontend.lanes:
            frontend.unordered.reload(lane)
        self.interrupts.clear()
        state.u32[s.R_SCRATCH] = 0
        state.u32[s.R_FAULTS] = 0
        state.u32[s.R_ROW] = 0
        state.u64[s.R_CLOCK64] = 0
        state.count("resets")
        state.u32[s.R_RESETS] = state.u32[s.R_RESETS] + 1 & 0xFFFF_FFFF
        state.u32[s.R_RESETTING] = 0

    def _faulted_in_a_row(self) -> None:
        """On the engine's thread: begin anew; where that does not help, stand still."""
        u64, most = self.state.u64, LIMITS.fault_resets_per_minute
        count, now = u64[s.W_FAULT_RESETS], time.monotonic_ns()
        slot = s.W_FAULT_TIMES + count % most
        if count >= most and now - u64[slot] < 60_000_000_000:
            log.warning("quarantined: faults in a row after %d resets within a minute", most)
            self.engine.hold(s.FREEZE_QUARANTINE)
            self.on_trouble()
            return
        u64[slot] = now
        u64[s.W_FAULT_RESETS] = count + 1
        self.engine.reset_soon()

    def absolve(self) -> None:
        """Somebody has looked: what faulted before no longer counts."""
        for slot in range(LIMITS.fault_resets_per_minute):
            self.state.u64[s.W_FAULT_TIMES + slot] = 0
        self.state.u32[s.R_ROW] = 0
        self.engine.thaw(s.FREEZE_QUARANTINE)
        self.on_trouble()

    def reload(self) -> None:
        """The state was replaced while the engine is frozen: derive everything from it anew."""
        self.memory.forget()
        self.objects.reload()
        for lane in self.frontend.lanes:
            self.frontend.reload(lane)

    def replace_memory(self, fd: int) -> None:
        """Another file is device memory from here on; its content must be described by the state
        that is loaded next. Takes ownership of ``fd``.
        """
        self.memory.replace(self._map_memory(fd), self.memory.table)
        # Under the old number: the old memory is let go, and whoever owns the number still does.
        os.dup2(fd, self.memory_fd, inheritable=False)
        os.close(fd)

    def take_shape(self, shape: Shape) -> None:
        """The record in the state says so: have this size from here on. The engine is parked."""
        self._become(shape)
        self.track.stop()  # a copy that has begun is of another size
        self.track.resize(shape.memory_bytes)
        self.memory.replace(self._map_memory(self.memory_fd), _table(shape))
        self.registers.reshape(self.spec)
        self.pool.resize(max(1, shape.cores))
        self.engine.engines.resize(max(1, shape.cores))
        self.frontend.revoked = shape.revoked
        self.reload()

    def take_epoch(self, epoch: int) -> None:
        """The same shape under a newer epoch: what was resolved before is resolved again."""
        shape = replace(self.shape, epoch=epoch)
        shapes.install(self.state.u8, shape)
        self._become(shape)
        self.memory.table = _table(shape)

    def _become(self, shape: Shape) -> None:
        self.shape = shape
        self.spec = _sized(self.spec, shape)
        self.queries.reshape(self.spec)
        self._show_epoch(shape.epoch)

    def _show_epoch(self, epoch: int) -> None:
        self.state.u32[s.R_EPOCH] = max(self.state.u32[s.R_EPOCH], epoch)

    def _map_memory(self, fd: int) -> mmap.mmap:
        return mmap.mmap(fd, max(PAGE, self.spec.memory_bytes))

    # --- a client comes and goes ------------------------------------------------------------------

    def connected(self) -> None:
        """A new client: nothing of an earlier one may be left."""
        try:
            self.function_reset()
        except Refusal:
            # Much memory takes long to scrub. The engine does nothing else before that is done,
            # and STATUS says so; the client need not wait for its greeting, and we must not die.
            log.info("the reset for a new client goes on")
        self.migration.reset()
        self.track.stop()
        self.config.reset()
        self.clear_window()
        self.state.u32[s.R_MASK] = 0
        self.state.count("connections")

    def clear_window(self) -> None:
        """Zero the whole window, for all who map it."""
        self._window_map.madvise(mmap.MADV_REMOVE, 0, self.spec.window_bytes)

    def disconnected(self) -> None:
        """The client is gone: stop working for it, and give its memory back."""
        self.remote.attach(None)
        try:
            self.engine.freeze(s.FREEZE_DETACHED, LIMITS.vfio_reply_s)
        except DeadlineError:
            # A tile that does not end: the engine parks when it does. No map is left to it.
            self.state.u32[s.R_FREEZE] |= s.FREEZE_DETACHED
        self.dma_unmap(0, 0, int(UnmapFlag.ALL))
        self._detach_irq()
        for slot in list(self.descriptors.fds):
            self.descriptors.drop(slot)

    def attached(self) -> None:
        """A client is there (again): work for it."""
        self.engine.thaw(s.FREEZE_DETACHED)

    # --- DeviceModel ------------------------------------------------------------------------------

    def device_info(self) -> DeviceInfo:
        return DeviceInfo(DeviceFlag.RESET | DeviceFlag.PCI, PCI_REGIONS, PCI_IRQS)

    def region_info(self, index: int) -> RegionInfo:
        if index == BAR_REGISTERS:
            return RegionInfo(index, _RW, BAR0_BYTES)
        if index == BAR_WINDOW:
            return RegionInfo(
                index, _RW | RegionFlag.MMAP, self.spec.window_bytes, self.window_fd
            )
        if index == _CONFIG:
            return RegionInfo(index, _RW, CONFIG_BYTES)
        return RegionInfo(index, 0, 0)

    def irq_info(self, index: int) -> IrqInfo:
        if index == PciIrq.MSI:
            return IrqInfo(index, IrqInfoFlag.EVENTFD | IrqInfoFlag.NORESIZE, 1)
        return IrqInfo(index, 0, 0)

    def region_read(self, index: int, offset: int, count: int) -> bytes:
        if index == BAR_REGISTERS:
            return self.registers.read(offset, count)
        if index == _CONFIG:
            return self.config.read(offset, count)
        if index == BAR_WINDOW:
            return bytes(self.window[offset : offset + count])
        raise Refusal(errno.EINVAL, f"region {index} cannot be read", where="region")

    def region_write(self, index: int, offset: int, data: bytes) -> None:
        if index == BAR_REGISTERS:
            self.registers.write(offset, data)
        elif index == _CONFIG:
            if self.config.write(offset, data):
                self.function_reset()
                self.config.reset(bars=False)
        elif index == BAR_WINDOW:
            self.window[offset : offset + len(data)] = data
        else:
            raise Refusal(errno.EINVAL, f"region {index} cannot be written", where="region")

    def dma_map(self, address: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        slot = -1
        if fd is not None:
            slot = self.incoming.pop(fd)
            os.close(fd)
            if slot not in self.descriptors.files:
                raise Refusal(errno.EINVAL, "a map's descriptor is no regular file", where="dma")
        with self.dma_lock:
            self.maps.map(address, size, flags, offset, slot)

    def dma_unmap(self, address: int, size: int, flags: int) -> None:
        with self.dma_lock:
            if flags & UnmapFlag.ALL:
                self.maps.clear()
            elif size:
                self.maps.unmap(address, size)
        self.sweep()

    def set_irqs(
        self, index: int, flags: int, start: int, count: int, data: bytes, fds: Sequence[int]
    ) -> None:
        slots = [self.incoming.pop(fd) for fd in fds]
        events = all(take_eventfd(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
        if index != PciIrq.MSI:
            raise Refusal(errno.EINVAL, f"interrupt index {index} is not there", where="irq")
        if not flags & IrqSet.ACTION_TRIGGER:
            raise Refusal(errno.ENOTTY, "a message-signalled vector has no mask here", where="irq")
        if not events:
            raise Refusal(errno.EINVAL, "a vector's descriptor is no eventfd", where="irq")
        if slots:
            self.state.u32[s.N_IRQ_SLOT] = slots[0] + 1
            self.interrupts.attach(self.descriptors.fds[slots[0]])
        elif flags & IrqSet.DATA_EVENTFD or not count:
            self._detach_irq()
        elif flags & IrqSet.DATA_NONE or (data and data[0]):
            self.interrupts.trigger()
        self.sweep()

    def _detach_irq(self) -> None:
        self.interrupts.attach(None)
        self.state.u32[s.N_IRQ_SLOT] = 0

    def sweep(self, arriving: Sequence[int] = ()) -> None:
        """Let go of descriptors that neither a map nor the interrupt uses, nor a message that is
        still to come whole. While the VM moves its files are kept: what was written is in there.
        """
        irq = self.state.u32[s.N_IRQ_SLOT] - 1
        busy = {*self.incoming.values(), *arriving}
        if self.track.on:
            busy.update(self.descriptors.files)
        for slot in list(self.descriptors.fds):
            if slot != irq and slot not in busy and not self.maps.uses(slot):
                self.descriptors.drop(slot)

    def reset(self) -> None:
        self.function_reset()
        self.migration.reset()
        self.config.reset()

    def device_feature(self, flags: int, feature: int, data: bytes) -> bytes:
        return self.migration.features.handle(flags, feature, data)

    def migration_read(self, count: int) -> bytes:
        return self.migration.read(count)

    def migration_write(self, data: bytes) -> None:
        self.migration.write(data)

    def dirty_pages(self, address: int, size: int, page_size: int) -> bytes:
        return self.migration.dirty.report(address, size, page_size)


def _sized(spec: Spec, shape: Shape) -> Spec:
    return replace(
        spec,
        cores=shape.cores,
        memory_bytes=shape.memory_bytes,
        segments=shape.segments,
        epoch=shape.epoch,
    )


def _table(shape: Shape) -> SegmentTable:
    return SegmentTable(shape.segments, shape.epoch)
