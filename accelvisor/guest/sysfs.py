"""A function through /sys/bus/pci: no kernel module, no interrupt, root only.

The kernel offers a device's BARs as files that can be mapped. What it does not offer is DMA memory,
so that is our own, pinned and looked up (:mod:`accelvisor.guest.pinned`), and guarded by a process
that outlives us (:mod:`accelvisor.guest.undertaker`). Waiting for an interrupt is a short sleep
here; the queue looks at its ring afterwards in any case.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accelvisor.abi.registers import (
    BAR0_BYTES,
    BAR_REGISTERS,
    BAR_WINDOW,
    MAGIC,
    QUEUE_STRIDE,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
)
from accelvisor.errors import (
    ConflictError,
    NotFoundError,
    PermissionDenied,
    ProtocolError,
    SystemFailure,
    UsageError,
)
from accelvisor.guest.errors import DeviceInTransition
from accelvisor.guest.mapped import MappedRegisters
from accelvisor.guest.transport import DmaBuffer

if TYPE_CHECKING:
    from accelvisor.guest.pinned import Pins
    from accelvisor.guest.undertaker import Undertaker

DEVICES = Path("/sys/bus/pci/devices")
COMMAND = 0x04  # PCI configuration space, 16 bits
MEMORY_AND_MASTER = 0x0002 | 0x0004
_NAP_S = 0.001
_DISMISS_S = 2.0


class SysfsTransport(MappedRegisters):
    """One function, mapped from sysfs. Several processes may hold the same function.

    Args:
        bdf: PCI address, e.g. ``0000:00:04.0``.
        root: where the devices' directories are.
        allocate: makes DMA memory of a size in bytes; pinned memory when None.

    Raises:
        NotFoundError, PermissionDenied, ConflictError, ProtocolError, SystemFailure.
    """

    #: There is no interrupt to wait for: waiters had better sleep by their own measure.
    interrupts = False

    def __init__(
        self,
        bdf: str,
        *,
        root: Path = DEVICES,
        allocate: Callable[[int], DmaBuffer] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bdf = bdf
        self._allocate = allocate
        self._sleep = sleep
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._claim: tuple[int, int] | None = None
        self._pins: Pins | None = None
        self._undertaker: Undertaker | None = None
        self._lock = threading.Lock()
        self._bar = root / bdf / f"resource{BAR_REGISTERS}"
        directory = root / bdf
        try:
            await_config(directory, sleep=sleep)
            _enable(directory)
            registers = self._map(directory / f"resource{BAR_REGISTERS}")
            window = self._map(directory / f"resource{BAR_WINDOW}")
        except OSError as error:
            self.close()
            raise _explain(error, bdf) from error
        size = len(registers)
        if size < BAR0_BYTES:
            self.close()
            raise ProtocolError(
                f"BAR0 has {size} bytes, a function's has {BAR0_BYTES}",
                code="not-a-function",
                where=f"sysfs:{bdf}",
            )
        self._registers = registers.cast("I")
        self._views.insert(0, self._registers)
        self.window = window

    def claimed(self, queue: int, lock: int) -> None:
        """Say which queue will use DMA memory, and the descriptor that holds its lock."""
        self._claim = queue, lock

    def allocate_dma(self, nbytes: int) -> DmaBuffer:
        """Pinned memory by guest-physical address; may be scattered.

        Raises:
            CapacityError, PermissionDenied: as the contract says.
            SystemFailure: pages cannot be kept in place here.
            UsageError: before :meth:`claimed`.
        """
        if self._allocate is not None:
            return self._allocate(nbytes)
        # Here, because it brings ctypes, which a look at the device does not need.
        from accelvisor.guest.pinned import PinnedMemory

        with self._lock:
            pins = self._guard()
        return PinnedMemory(nbytes, pins)

    def _guard(self) -> Pins:
        """See to it that somebody outlives us who stops the device before our pages are freed."""
        from accelvisor.guest.pinned import Pins
        from accelvisor.guest.undertaker import Undertaker

        if self._claim is None:
            raise UsageError("no queue was claimed", code="dma-unclaimed", where="sysfs")
        queue, lock = self._claim
        if self._pins is None:
            self._pins = Pins()
        if self._undertaker is not None and not self._undertaker.alive:
            self._undertaker.dismiss(0)  # somebody killed it
            self._undertaker = None
        if self._undertaker is None:
            block = Reg.QUEUE + QUEUE_STRIDE * queue
            try:
                self._undertaker = Undertaker(
                    self._pins.fd,
                    lock,
                    self._bar,
                    magic=MAGIC,
                    control=block + QueueReg.CONTROL,
                    disable=QueueControl.DISABLE,
                    status=block + QueueReg.STATUS,
                    disabled=QueueStatus.DISABLED,
                )
            except OSError as error:
                raise SystemFailure(
                    f"the process that guards DMA memory did not start: {error.strerror}",
                    code="dma-unguarded",
                    where="sysfs",
                    hint="copies go through the window meanwhile; is there memory for a process?",
                ) from error
        return self._pins

    def wait_interrupt(self, timeout_s: float) -> bool:
        """Sleep at most a millisecond; always False."""
        self._sleep(min(timeout_s, _NAP_S))
        return False

    def close(self) -> None:
        """Unmap. The device stays enabled: another process may be using it.

        With DMA memory handed out, the queue is disabled first. If the device is not there to obey,
        the undertaker keeps pages and lock until it is.
        """
        undertaker, self._undertaker = self._undertaker, None
        pins, self._pins = self._pins, None
        if undertaker is not None:
            guarded = undertaker.alive
            undertaker.dismiss(_DISMISS_S)
            if not guarded:
                pins = None  # nobody else holds the pages: they stay pinned until we end
        if pins is not None:
            pins.close()
        self._unmap()

    def forked(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._lock = threading.Lock()
        if self._undertaker is not None:
            self._undertaker.forked()
            self._undertaker = None
        if self._pins is not None:
            self._pins.forked()
            self._pins = None
        self._unmap()

    def _unmap(self) -> None:
        for view in self._views:
            view.release()
        self._views.clear()
        while self._maps:
            try:
                self._maps.pop().close()
            except BufferError:
                pass  # a view of the window is still in use; the mapping goes with it

    def _map(self, path: Path) -> memoryview:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_SYNC)
        try:
            area = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self._maps.append(area)
        view = memoryview(area)
        self._views.append(view)
        return view


def await_config(
    directory: Path,
    *,
    deadline_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the device's configuration space reads as a device's.

    While its function is replaced or moved it may read as all-ones or zeros, and the kernel would
    refuse to enable it with no better word than EINVAL.

    Raises:
        DeviceInTransition: not within ``deadline_s`` seconds.
        NotFoundError: there is no such device.
    """
    if not directory.is_dir():
        raise NotFoundError(
            f"there is no PCI device {directory.name}",
            code="device-not-found",
            where="pci",
            hint="accelguest info lists the functions of this VM",
        )
    end = clock() + deadline_s
    while True:
        with (directory / "config").open("rb") as file:
            identity = file.read(4)
        if identity not in (b"\xff\xff\xff\xff", bytes(4)):
            return
        if clock() >= end:
            raise DeviceInTransition(
                f"{directory.name} has read as absent for {deadline_s:g} s",
                where="pci:config",
                hint="did its function give up? the host's accelctl function show tells",
            )
        sleep(0.05)


def _enable(directory: Path) -> None:
    """Let the device answer memory accesses and do DMA."""
    driver = directory / "driver"
    if driver.exists():
        raise ConflictError(
            f"the kernel driver {driver.resolve().name} holds the device",
            code="device-driver-bound",
            where=f"sysfs:{directory.name}",
            hint="use the vfio driver, or unbind it in /sys/bus/pci/drivers",
        )
    enable = directory / "enable"
    if enable.read_text().strip() == "0":
        enable.write_text("1")
    fd = os.open(directory / "config", os.O_RDWR | os.O_CLOEXEC)
    try:
        (command,) = struct.unpack("<H", os.pread(fd, 2, COMMAND))
        if command & MEMORY_AND_MASTER != MEMORY_AND_MASTER:
            os.pwrite(fd, struct.pack("<H", command | MEMORY_AND_MASTER), COMMAND)
    finally:
        os.close(fd)


def _explain(error: OSError, bdf: str) -> PermissionDenied | SystemFailure:
    where = f"sysfs:{bdf}"
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"the device's files may not be opened: {error.strerror}",
            code="device-permission",
            where=where,
            hint="run as root; under Secure Boot's lockdown use the vfio driver",
        )
    return SystemFailure(
        f"{error.filename or bdf}: {error.strerror or error}",
        code="device-open",
        where=where,
        hint="dmesg may say more",
    )
