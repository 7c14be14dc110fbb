"""A function through the guest's own vfio-pci, behind the VM's IOMMU: with interrupts, without root
once the device is bound and its group's file belongs to the user.

Numbers and structures are those of the kernel's include/uapi/linux/vfio.h. One process holds a
group at a time, so unlike with sysfs one process has the whole function.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
import time
from pathlib import Path

from accelvisor.abi.registers import BAR0_BYTES, BAR_REGISTERS, BAR_WINDOW, PAGE
from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    ConflictError,
    NotFoundError,
    PermissionDenied,
    ProtocolError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.guest.mapped import MappedRegisters
from accelvisor.guest.staging import Spans
from accelvisor.guest.sysfs import COMMAND, DEVICES, MEMORY_AND_MASTER, await_config

DRIVERS = Path("/sys/bus/pci")
VFIO = Path("/dev/vfio")

_GET_API_VERSION = 0x3B64
_CHECK_EXTENSION = 0x3B65
_SET_IOMMU = 0x3B66
_GROUP_GET_STATUS = 0x3B67
_GROUP_SET_CONTAINER = 0x3B68
_GROUP_GET_DEVICE_FD = 0x3B6A
_DEVICE_GET_REGION_INFO = 0x3B6C
_DEVICE_SET_IRQS = 0x3B6E
_IOMMU_GET_INFO = 0x3B70
_IOMMU_MAP_DMA = 0x3B71
_IOMMU_UNMAP_DMA = 0x3B72

_TYPE1V2 = 3
_GROUP_VIABLE = 1
_REGION_CONFIG = 7
_REGION_MMAP = 4
_MSI = 1
_IRQ_EVENTFD_TRIGGER = 0x04 | 0x20
_IRQ_NONE_TRIGGER = 0x01 | 0x20
_DMA_READ_WRITE = 1 | 2
_INFO_CAPS = 2
_CAP_IOVA_RANGE = 1
_MADV_WIPEONFORK = 18

#: Device addresses are handed out from here on: above 32 bits there is no MSI doorbell in the way.
_IOVA_START = 1 << 32
_IOVA_BYTES = 1 << 36


class VfioBuffer:
    """Memory mapped into the function's IOMMU domain, contiguous for the device."""

    def __init__(self, container: int, iova: Spans, nbytes: int) -> None:
        self._container = container
        self._iova = iova
        size = (max(nbytes, 1) + PAGE - 1) // PAGE * PAGE
        address = iova.take(size)
        if address is None:
            raise _no_memory(size, "no device addresses are left")
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # After a fork the parent must keep the pinned pages, so the child gets empty ones.
            self._map.madvise(_MADV_WIPEONFORK)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            fcntl.ioctl(
                container,
                _IOMMU_MAP_DMA,
                struct.pack("<IIQQQ", 32, _DMA_READ_WRITE, start, address, size),
            )
        except OSError as error:
            iova.give(address, size)
            raise _no_memory(size, error.strerror or str(error)) from error
        self.address = address
        self.view = memoryview(self._map)
        self._size = size
        self._mapped = True

    def release(self) -> None:
        """Take it out of the device's reach. Safe to call twice."""
        if not self._mapped:
            return
        self._mapped = False
        try:
            fcntl.ioctl(
                self._container,
                _IOMMU_UNMAP_DMA,
                bytearray(struct.pack("<IIQQ", 24, 0, self.address, self._size)),
            )
        except OSError as error:
            if error.errno != errno.EBADF:  # the container is closed, and its maps with it
                raise
        self._iova.give(self.address, self._size)
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # somebody's array still looks at it


class VfioTransport(MappedRegisters):
    """One function, owned through its IOMMU group.

    Args:
        bdf: PCI address.
        root: where the devices' directories are.
        vfio: where the group files are.

    Raises:
        NotFoundError, PermissionDenied, ConflictError, UnavailableError, ProtocolError,
        SystemFailure.
    """

    interrupts = True

    def __init__(self, bdf: str, *, root: Path = DEVICES, vfio: Path = VFIO) -> None:
        self.bdf = bdf
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._event = -1
        try:
            await_config(root / bdf)
            group = group_of(root / bdf)
            bind(root / bdf)
            self._container = self._open(vfio / "vfio")
            self._device = self._attach(vfio / str(group))
            self._iova = Spans(*_iova_window(self._container))
            self._set_master()
            registers = self._region(BAR_REGISTERS)
            if len(registers) < BAR0_BYTES:
                raise ProtocolError(
                    f"BAR0 has {len(registers)} bytes, a function's has {BAR0_BYTES}",
                    code="not-a-function",
                    where=f"vfio:{bdf}",
                )
            self.window = self._region(BAR_WINDOW)
            self._registers = registers.cast("I")
            self._views.insert(0, self._registers)
            self._arm()
        except OSError as error:
            self.close()
            raise _explain(error, bdf) from error
        except AccelvisorError:
            self.close()
            raise

    def allocate_dma(self, nbytes: int) -> VfioBuffer:
        """Memory in the function's IOMMU domain."""
        return VfioBuffer(self._container, self._iova, nbytes)

    def wait_interrupt(self, timeout_s: float) -> bool:
        """Sleep until the function's MSI, or for ``timeout_s`` seconds."""
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        if not poller.poll(max(timeout_s, 0) * 1000):
            return False
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:  # another thread of this process took it
            return False
        return True

    def close(self) -> None:
        """Disarm, unmap, let go of the group. Safe to call twice."""
        if self._event >= 0 and len(self._fds) >= 4:
            try:
                disarm = struct.pack("<IIIII", 20, _IRQ_NONE_TRIGGER, _MSI, 0, 0)
                fcntl.ioctl(self._device, _DEVICE_SET_IRQS, disarm)
            except OSError:
                pass  # the device may be gone; closing it disarms as well
        self.forked()

    def forked(self) -> None:
        """Unmap and close; in a forked child without a word to the device, which is the parent's.

        Descriptors and maps that stayed open there would keep the group busy, and the IOMMU's maps
        alive, after the parent's end.
        """
        self._event = -1
        for view in self._views:
            view.release()
        self._views.clear()
        while self._maps:
            try:
                self._maps.pop().close()
            except BufferError:
                pass  # a view of the window is still in use; the mapping goes with it
        while self._fds:  # the device before its group before the container
            os.close(self._fds.pop())

    # --- inside ----------------------------------------------------------------------------------

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._fds.append(fd)
        return fd

    def _attach(self, path: Path) -> int:
        """Join the group to the container; returns the device's descriptor."""
        if fcntl.ioctl(self._container, _GET_API_VERSION) != 0:
            raise UnavailableError("an unknown version of VFIO", code="vfio", where="vfio")
        group = self._open(path)
        status = bytearray(struct.pack("<II", 8, 0))
        fcntl.ioctl(group, _GROUP_GET_STATUS, status)
        if not struct.unpack("<II", status)[1] & _GROUP_VIABLE:
            raise ConflictError(
                f"IOMMU group {path.name} has devices that other drivers hold",
                code="vfio-group",
                where=f"vfio:{self.bdf}",
                hint="put the function behind a root port of its own, or unbind the others",
            )
        fcntl.ioctl(group, _GROUP_SET_CONTAINER, struct.pack("<i", self._container))
        if fcntl.ioctl(self._container, _CHECK_EXTENSION, _TYPE1V2) != 1:
            raise UnavailableError(
                "this kernel's VFIO has no type 1 v2 IOMMU", code="vfio", where="vfio"
            )
        fcntl.ioctl(self._container, _SET_IOMMU, _TYPE1V2)
        # A mutable argument makes Python hand back the call's value, which is the descriptor.
        name = bytearray(self.bdf.encode() + b"\0")
        fd = int(fcntl.ioctl(group, _GROUP_GET_DEVICE_FD, name))
        self._fds.append(fd)
        os.set_inheritable(fd, False)
        return fd

    def _region_info(self, index: int) -> tuple[int, int, int]:
        info = bytearray(struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0))
        fcntl.ioctl(self._device, _DEVICE_GET_REGION_INFO, info)
        _, flags, _, _, size, offset = struct.unpack("<IIIIQQ", info)
        return flags, size, offset

    def _region(self, index: int) -> memoryview:
        flags, size, offset = self._region_info(index)
        if not flags & _REGION_MMAP or not size:
            raise ProtocolError(
                f"BAR{index} cannot be mapped", code="not-a-function", where=f"vfio:{self.bdf}"
            )
        area = mmap.mmap(self._device, size, offset=offset)
        self._maps.append(area)
        view = memoryview(area)
        self._views.append(view)
        return view

    def _set_master(self) -> None:
        _, _, config = self._region_info(_REGION_CONFIG)
        (command,) = struct.unpack("<H", os.pread(self._device, 2, config + COMMAND))
        os.pwrite(self._device, struct.pack("<H", command | MEMORY_AND_MASTER), config + COMMAND)

    def _arm(self) -> None:
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fds.append(event)
        request = struct.pack("<IIIIIi", 24, _IRQ_EVENTFD_TRIGGER, _MSI, 0, 1, event)
        fcntl.ioctl(self._device, _DEVICE_SET_IRQS, request)
        self._event = event


def group_of(device: Path) -> int:
    """The number of the device's IOMMU group.

    Raises:
        NotFoundError: there is no such device.
        UnavailableError: the VM has no IOMMU.
    """
    if not device.is_dir():
        raise NotFoundError(
            f"there is no PCI device {device.name}",
            code="device-not-found",
            where="vfio",
            hint="accelguest info lists the functions of this VM",
        )
    link = device / "iommu_group"
    if not link.exists():
        raise UnavailableError(
            "the device is in no IOMMU group",
            code="no-iommu",
            where=f"vfio:{device.name}",
            hint="give the VM an IOMMU (intel-iommu with caching-mode=on), or use sysfs",
        )
    return int(link.resolve().name)


def bind(device: Path, *, drivers: Path = DRIVERS, deadline_s: float = 5.0) -> None:
    """Make vfio-pci the device's driver, for this device alone (driver_override).

    Raises:
        ConflictError: another driver holds the device.
        UnavailableError: the vfio-pci driver is not there.
    """
    driver = device / "driver"
    if driver.exists():
        name = driver.resolve().name
        if name == "vfio-pci":
            return
        raise ConflictError(
            f"the kernel driver {name} holds the device",
            code="device-driver-bound",
            where=f"vfio:{device.name}",
            hint=f"unbind it in /sys/bus/pci/drivers/{name}",
        )
    if not (drivers / "drivers" / "vfio-pci").is_dir():
        _load_module()
    (device / "driver_override").write_text("vfio-pci")
    (drivers / "drivers_probe").write_text(device.name)
    end = time.monotonic() + deadline_s
    while not driver.exists():
        if time.monotonic() > end:
            raise UnavailableError(
                "vfio-pci did not take the device",
                code="vfio-bind",
                where=f"vfio:{device.name}",
                hint="is the vfio-pci module installed? modprobe vfio-pci",
            )
        time.sleep(0.01)


def _load_module() -> None:
    import subprocess  # only here, and slow to import in an emulated VM

    try:
        done = subprocess.run(
            ["modprobe", "vfio-pci"], capture_output=True, text=True, timeout=60, check=False
        )
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise UnavailableError(
            f"the vfio-pci module could not be loaded: {problem}",
            code="vfio-module",
            where="vfio",
            hint="use a kernel that has vfio-pci, or the sysfs driver",
        )


def _iova_window(container: int) -> tuple[int, int]:
    """(first, past last) device address for our maps, inside what the IOMMU can translate."""
    answer = bytearray(struct.pack("<IIQII", 24, 0, 0, 0, 0))
    fcntl.ioctl(container, _IOMMU_GET_INFO, answer)
    (size,) = struct.unpack_from("<I", answer)
    if size > len(answer):
        answer = bytearray(struct.pack("<I", size).ljust(size, b"\0"))
        fcntl.ioctl(container, _IOMMU_GET_INFO, answer)
    return choose_iova(iova_ranges(bytes(answer)))


def iova_ranges(info: bytes) -> list[tuple[int, int]]:
    """(first, last) of each usable range in a VFIO_IOMMU_GET_INFO answer; empty when not told."""
    _, flags, _, offset = struct.unpack_from("<IIQI", info)
    ranges: list[tuple[int, int]] = []
    if not flags & _INFO_CAPS:
        return ranges
    while offset and offset + 16 <= len(info):
        kind, _, following, count = struct.unpack_from("<HHII", info, offset)
        if kind == _CAP_IOVA_RANGE:
            at = offset + 16
            for i in range(min(count, (len(info) - at) // 16)):
                ranges.append(struct.unpack_from("<QQ", info, at + 16 * i))
        if following <= offset:
            break
        offset = following
    return ranges


def choose_iova(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """The part of the address space that our maps use: above 4 GiB where there is room."""
    best = (0, 0)
    for first, last in ranges:
        for start in (max(first, _IOVA_START), max(first, 1 << 20)):
            end = min(last + 1, start + _IOVA_BYTES)
            if end - start > best[1] - best[0]:
                best = (start, end)
    return best if best[1] else (_IOVA_START, _IOVA_START + _IOVA_BYTES)


def _no_memory(nbytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"{nbytes} bytes of device memory could not be mapped: {why}",
        code="dma-memory",
        where="dma",
        hint="raise the locked-memory limit (ulimit -l), or copy in smaller parts",
    )


def _explain(error: OSError, bdf: str) -> AccelvisorError:
    where = f"vfio:{bdf}"
    if error.errno == errno.EBUSY:
        return ConflictError(
            "another process of this VM holds the function",
            code="device-busy",
            where=where,
            hint="end that process; with vfio one process holds the whole function",
        )
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"{error.filename or bdf}: {error.strerror}",
            code="device-permission",
            where=where,
            hint="run as root, or own the group's file in /dev/vfio",
        )
    if isinstance(error, FileNotFoundError):
        return UnavailableError(
            f"{error.filename or bdf} does not exist",
            code="vfio-missing",
            where=where,
            hint="modprobe vfio-pci, and boot with the IOMMU on (intel_iommu=on)",
        )
    return SystemFailure(
        f"{error.filename or bdf}: {error.strerror or error}",
        code="device-open",
        where=where,
        hint="dmesg may say more",
    )
