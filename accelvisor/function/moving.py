"""What the daemon asks of a function that is saved, moved or loaded (docs/contracts.md, 8).

The order is the daemon's; each verb here is one step of it that can be asked again. A **fence**
keeps the function from computing whatever its client does (reset it, connect anew): it is set
before the state is taken and lifted by whoever owns the function then.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import accelvisor
from accelvisor.abi import ABI_MAJOR, ABI_MINOR
from accelvisor.abi.registers import Interrupt
from accelvisor.errors import DeadlineError, StateError, UsageError
from accelvisor.function import digest, ram
from accelvisor.function import state as s
from accelvisor.function.channel import MEMORY, pack
from accelvisor.function.dma import copy
from accelvisor.function.track import data_ranges
from accelvisor.function.validate import check_rings, check_state
from accelvisor.kernels import blas
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PAGE_BYTES, MigState

if TYPE_CHECKING:
    from accelvisor.function.device import Device

SECTION_BYTES = s.DIGEST_END - s.PCI_AT
#: Words of the state section that are the process's own, not the function's.
_OWN = (s.R_MIGRATION, s.R_FREEZE, s.R_RESETTING, s.R_EPOCH, s.R_ROW)


def normal(section: bytes | bytearray | memoryview) -> bytes:
    """A state section without what is this process's own: what two hosts compare."""
    copied = bytearray(section)
    for word in _OWN:
        at = word * 4 - s.PCI_AT
        copied[at : at + 4] = bytes(4)
    return bytes(copied)


def firmware() -> dict[str, str]:
    """What decides about the bits of a result. Functions move only between equals."""
    return {
        "abi": f"{ABI_MAJOR}.{ABI_MINOR}",
        "state": str(s.VERSION),
        "version": accelvisor.__version__,
        **blas.fingerprint(),
    }


class Moving:
    """The verbs. Called by the control socket's thread alone.

    Args:
        tell: sends a message with descriptors to the holder.
    """

    def __init__(
        self, device: Device, tell: Callable[[bytes, tuple[int, ...]], None]
    ) -> None:
        self._device = device
        self._tell = tell

    def describe(self) -> dict[str, Any]:
        """What the function is and what it stands in, for the function frame."""
        device = self._device
        return {
            **device.queries.info(),
            "firmware": firmware(),
            "migration_state": device.migration.machine.state.name,
            "fenced": bool(device.state.u32[s.R_FREEZE] & s.FREEZE_FENCED),
            "tracking": device.track.on,
            "contexts": device.queries.objects(),
            "windows": ram.windows(device),
            "peers": [],
            "config": device.config.read(0, s.PCI_BYTES).hex(),
            "ram_bytes": sum(file.size for file in device.descriptors.files.values()),
            "msi": bool(device.state.u32[s.N_IRQ_SLOT]),
        }

    def walk(self, target: str) -> dict[str, Any]:
        """Lead the device to a state. Raises Refusal, UsageError."""
        try:
            wanted = MigState[target]
        except KeyError:
            raise UsageError(f"{target!r} is no device state", where="control") from None
        migration = self._device.migration
        with migration.lock:
            migration.machine.request(wanted)
            if wanted is MigState.STOP_COPY:
                self._device.frontend.settle()
        return {"migration_state": migration.machine.state.name}

    def fence(self, on: bool) -> dict[str, Any]:
        """Set or lift the fence. A function that is let go on may have come from elsewhere, or its
        interrupt may have been on its way when the VM stopped: what is pending is raised again.
        """
        device = self._device
        if on:
            try:
                device.engine.freeze(s.FREEZE_FENCED, LIMITS.control_reply_s - 0.5)
            except DeadlineError as error:
                raise Refusal(errno.EBUSY, error.message, where="fence") from error
        elif device.state.u32[s.R_FREEZE] & s.FREEZE_FENCED:
            device.interrupts.again()
            device.engine.thaw(s.FREEZE_FENCED)
        return {"fenced": on}

    def moved(self) -> dict[str, Any]:
        """Tell the guest that its function is somewhere else now."""
        self._device.interrupts.set_cause(Interrupt.MOVED)
        return {}

    def track(self, on: bool) -> dict[str, Any]:
        """Begin or end tracking what the device writes."""
        device = self._device
        with device.dma_lock:  # no write to the VM's RAM is under way while this changes
            if on:
                device.track.start()
            else:
                device.track.stop()
        device.sweep()
        return {"tracking": device.track.on}

    def extents(self) -> tuple[dict[str, Any], list[int]]:
        """The written pages of the VM's RAM: a descriptor that the caller closes."""
        self._require(MigState.STOP_COPY)
        fd = ram.save(self._device)
        return {"bytes": os.fstat(fd).st_size}, [fd]

    def load(self, fds: Sequence[int]) -> dict[str, Any]:
        """Take over a state section, a window, device memory and written pages of RAM, check them,
        and read the device back. The descriptors stay the caller's.

        Raises:
            Refusal: the device is not RESUMING, or something is wrong with the state: what was put
                in place by then must not be used, the device is in ERROR.
        """
        if len(fds) != 4:
            raise UsageError("load needs the descriptors of four sections", where="control")
        device = self._device
        migration = device.migration
        with migration.lock:
            self._require(MigState.RESUMING)
            section, window, memory = self._checked(fds)
            try:
                device.state.u32[s.N_LOADING] = 1
                self._replace_memory(memory)
                device.clear_window()
                for low, high in data_ranges(fds[1], 0, len(window)):
                    copy(device.window[low:high], window[low:high])
                migration.install(section)
                written = ram.load(device, fds[3])
                device.state.u32[s.N_LOADING] = 0
            except BaseException:
                migration.fail()
                raise
            migration.machine.request(MigState.STOP)
        return {**self.digests(), "ram_bytes": written}

    def digests(self) -> dict[str, Any]:
        """Read the device back: one digest a section, and what must not have changed."""
        device = self._device
        window = digest.all_sums(
            device.window, data_ranges(device.window_fd, 0, len(device.window))
        )
        memory = digest.all_sums(
            device.memory.view, data_ranges(device.memory_fd, 0, device.memory.nbytes)
        )
        section = device.state.u8[s.PCI_AT : s.DIGEST_END]
        return {
            "state": digest.section_digest(normal(section)),
            "window": digest.memory_digest(window),
            "memory": digest.memory_digest(memory),
            "faults": device.state.u32[s.R_FAULTS],
            "migration_state": device.migration.machine.state.name,
        }

    def _require(self, state: MigState) -> None:
        now = self._device.migration.machine.state
        if now is not state:
            raise Refusal(
                errno.EINVAL, f"the device is {now.name}, not {state.name}", where="migration"
            )

    def _checked(self, fds: Sequence[int]) -> tuple[bytearray, memoryview, int]:
        """Section, window and the memory's descriptor, looked at before anything is touched."""
        spec = self._device.spec
        wanted = (SECTION_BYTES, spec.window_bytes, max(PAGE_BYTES, spec.memory_bytes))
        for fd, nbytes in zip(fds, wanted, strict=False):
            if os.fstat(fd).st_size != nbytes:
                raise Refusal(errno.EINVAL, "a section has another size", where="load")
        section = bytearray(os.pread(fds[0], SECTION_BYTES, 0))
        window = memoryview(mmap.mmap(fds[1], spec.window_bytes, prot=mmap.PROT_READ))
        try:
            check_state(section, spec)
            check_rings(section, window, spec)
        except StateError as error:
            raise Refusal(errno.EINVAL, error.message, where="load") from error
        return section, window, fds[2]

    def _replace_memory(self, fd: int) -> None:
        """The holder first: a worker that dies in between leaves a state that counts as damaged."""
        device = self._device
        self._tell(pack(MEMORY), (fd,))
        device.replace_memory(os.dup(fd))
