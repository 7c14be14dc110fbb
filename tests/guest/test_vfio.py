"""The vfio driver against a kernel made of files and one ioctl function."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.registers import BAR0_BYTES, PAGE
from accelvisor.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    PermissionDenied,
    ProtocolError,
    UnavailableError,
)
from accelvisor.guest import vfio
from accelvisor.guest.vfio import VfioTransport, bind, choose_iova, group_of, iova_ranges
from tests.descriptors import descriptors

from .pci_tree import add_device

BDF = "0000:00:05.0"
CONFIG_AT, BAR0_AT, BAR2_AT = 7 << 20, 0, 1 << 20
WINDOW = 1 << 16


class Kernel:
    """What the ioctls of a container, a group and a device do. Numbers as in linux/vfio.h."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps: dict[int, tuple[int, int, int]] = {}
        self.viable = True
        self.busy = False
        self.map_error = 0
        self.bar_flags = 7
        self.calls: list[int] = []
        self.irqs: list[tuple[int, ...]] = []
        self.device = folder / "device"
        with self.device.open("wb") as file:
            file.truncate(8 << 20)
        vfio_folder = folder / "dev"
        vfio_folder.mkdir()
        (vfio_folder / "vfio").touch()
        (vfio_folder / "4").touch()
        add_device(folder / "devices", group=4, driver="vfio-pci")

    def transport(self) -> VfioTransport:
        return VfioTransport(BDF, root=self.folder / "devices", vfio=self.folder / "dev")

    def ioctl(self, fd: int, request: int, argument: Any = 0) -> int:
        self.calls.append(request)
        handler: Callable[[Any], int] = getattr(self, f"_{request:x}")
        return handler(argument)

    def _3b64(self, argument: Any) -> int:  # GET_API_VERSION
        return 0

    def _3b67(self, argument: bytearray) -> int:  # GROUP_GET_STATUS
        if self.busy:
            raise OSError(errno.EBUSY, "busy")
        struct.pack_into("<II", argument, 0, 8, int(self.viable))
        return 0

    def _3b68(self, argument: Any) -> int:  # GROUP_SET_CONTAINER
        return 0

    def _3b65(self, argument: int) -> int:  # CHECK_EXTENSION
        return int(argument == 3)

    def _3b66(self, argument: int) -> int:  # SET_IOMMU
        return 0

    def _3b6a(self, argument: bytearray) -> int:  # GROUP_GET_DEVICE_FD
        assert bytes(argument) == BDF.encode() + b"\0"
        return os.open(self.device, os.O_RDWR)

    def _3b6c(self, argument: bytearray) -> int:  # DEVICE_GET_REGION_INFO
        index = struct.unpack_from("<I", argument, 8)[0]
        size, at = {0: (BAR0_BYTES, BAR0_AT), 2: (WINDOW, BAR2_AT), 7: (4096, CONFIG_AT)}[index]
        struct.pack_into("<IIIIQQ", argument, 0, 32, self.bar_flags, index, 0, size, at)
        return 0

    def _3b6e(self, argument: bytes) -> int:  # DEVICE_SET_IRQS
        size = struct.unpack_from("<I", argument)[0]
        assert size == len(argument)
        self.irqs.append(struct.unpack(f"<{size // 4}I", argument))
        return 0

    def _3b70(self, argument: bytearray) -> int:  # IOMMU_GET_INFO
        info = get_info([(0, 0xFEDFFFFF), (0xFEF00000, (1 << 39) - 1)])
        if len(argument) >= len(info):
            argument[: len(info)] = info
        else:
            struct.pack_into("<I", argument, 0, len(info))
        return 0

    def _3b71(self, argument: bytes) -> int:  # IOMMU_MAP_DMA
        if self.map_error:
            raise OSError(self.map_error, os.strerror(self.map_error))
        size, flags, start, address, nbytes = struct.unpack("<IIQQQ", argument)
        assert (size, flags) == (32, 3)
        self.maps[address] = (start, nbytes, flags)
        return 0

    def _3b72(self, argument: bytearray) -> int:  # IOMMU_UNMAP_DMA
        size, _, address, nbytes = struct.unpack("<IIQQ", argument)
        assert size == 24
        assert self.maps.pop(address)[1] == nbytes
        return 0


def get_info(ranges: list[tuple[int, int]]) -> bytes:
    """A VFIO_IOMMU_GET_INFO answer: an unrelated capability, then the ranges."""
    other = struct.pack("<HHII", 2, 1, 24 + 16, 0).ljust(16, b"\0")
    caps = struct.pack("<HHII", 1, 1, 0, len(ranges)).ljust(16, b"\0")
    caps += b"".join(struct.pack("<QQ", *r) for r in ranges)
    total = 24 + len(other) + len(caps)
    return struct.pack("<IIQII", total, 3, PAGE, 24, 0) + other + caps


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(vfio.fcntl, "ioctl", kernel.ioctl)
    return kernel


def test_registers_window_and_bus_master(kernel: Kernel) -> None:
    transport = kernel.transport()
    transport.write32(0x78, 0x01020304)
    assert transport.read32(0x78) == 0x01020304
    assert len(transport.window) == WINDOW
    transport.window[3] = 9
    transport.close()
    raw = kernel.device.read_bytes()
    assert raw[0x78:0x7C] == bytes([4, 3, 2, 1])
    assert raw[BAR2_AT + 3] == 9
    assert struct.unpack_from("<H", raw, CONFIG_AT + 4)[0] == 6


def test_the_interrupt_is_an_eventfd(kernel: Kernel) -> None:
    transport = kernel.transport()
    *request, event = kernel.irqs[0]
    assert request == [24, 0x24, 1, 0, 1]  # argsz, eventfd and trigger, MSI, start, count
    assert transport.wait_interrupt(0.0) is False
    os.eventfd_write(event, 3)
    assert transport.wait_interrupt(5.0) is True
    assert transport.wait_interrupt(0.0) is False
    transport.close()
    assert kernel.irqs[1] == (20, 0x21, 1, 0, 0)


def test_dma_memory_is_mapped_above_four_gib(kernel: Kernel) -> None:
    transport = kernel.transport()
    first, second = transport.allocate_dma(5000), transport.allocate_dma(1)
    assert first.address == 1 << 32
    assert kernel.maps[first.address][1] == len(first.view) == 2 * PAGE
    assert second.address >= first.address + 2 * PAGE
    first.view[:5] = b"hello"
    first.release()
    first.release()
    assert list(kernel.maps) == [second.address]
    assert transport.allocate_dma(PAGE).address == 1 << 32  # addresses are used again
    transport.close()


def test_memory_that_cannot_be_mapped_is_a_typed_error(kernel: Kernel) -> None:
    transport = kernel.transport()
    kernel.map_error = errno.ENOMEM
    for _ in range(3):
        with pytest.raises(CapacityError) as caught:
            transport.allocate_dma(PAGE)
    assert caught.value.code == "dma-memory"
    kernel.map_error = 0
    assert transport.allocate_dma(PAGE).address == 1 << 32  # nothing leaked
    transport.close()


def test_closing_leaves_no_descriptor(kernel: Kernel) -> None:
    before = descriptors()
    transport = kernel.transport()
    transport.close()
    transport.close()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("field", "value", "error", "code"),
    [
        ("busy", True, ConflictError, "device-busy"),
        ("viable", False, ConflictError, "vfio-group"),
        ("bar_flags", 3, ProtocolError, "not-a-function"),
    ],
)
def test_refusals_are_typed_and_leave_no_descriptor(
    kernel: Kernel, field: str, value: Any, error: type[Exception], code: str
) -> None:
    before = descriptors()
    setattr(kernel, field, value)
    with pytest.raises(error) as caught:
        kernel.transport()
    assert caught.value.code == code  # type: ignore[attr-defined]
    assert descriptors() == before


def test_without_vfio_in_the_kernel(kernel: Kernel) -> None:
    (kernel.folder / "dev" / "vfio").unlink()
    with pytest.raises(UnavailableError) as caught:
        kernel.transport()
    assert caught.value.code == "vfio-missing"


def test_without_permission(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/dev/vfio/4")

    monkeypatch.setattr(vfio.os, "open", refuse)
    with pytest.raises(PermissionDenied):
        kernel.transport()


def test_a_vm_without_iommu_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        group_of(add_device(tmp_path / "devices"))
    assert caught.value.code == "no-iommu"
    with pytest.raises(NotFoundError):
        group_of(tmp_path / "devices" / "0000:00:09.0")


def test_only_this_device_is_given_to_vfio_pci(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    drivers = tmp_path / "pci"
    (drivers / "drivers" / "vfio-pci").mkdir(parents=True)

    class Probe(type(drivers)):  # type: ignore[misc]
        def write_text(self, data: str, *args: Any, **keywords: Any) -> int:
            if self.name == "drivers_probe":  # the kernel probes
                assert data == BDF
                assert (directory / "driver_override").read_text() == "vfio-pci"
                (directory / "driver").symlink_to(drivers / "drivers" / "vfio-pci")
            return super().write_text(data, *args, **keywords)

    bind(directory, drivers=Probe(drivers))
    assert (directory / "driver").resolve().name == "vfio-pci"
    bind(directory, drivers=Probe(drivers))  # again changes nothing


def test_a_kernel_that_does_not_bind_is_an_error(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices")
    drivers = tmp_path / "pci"
    (drivers / "drivers" / "vfio-pci").mkdir(parents=True)
    with pytest.raises(UnavailableError) as caught:
        bind(directory, drivers=drivers, deadline_s=0.05)
    assert caught.value.code == "vfio-bind"


def test_another_drivers_device_is_left_alone(tmp_path: Path) -> None:
    directory = add_device(tmp_path / "devices", driver="other")
    with pytest.raises(ConflictError, match="other"):
        bind(directory, drivers=tmp_path)


def test_usable_ranges_are_read_from_the_kernels_answer() -> None:
    ranges = [(0, 0xFEDFFFFF), (0xFEF00000, (1 << 39) - 1)]
    assert iova_ranges(get_info(ranges)) == ranges
    assert iova_ranges(struct.pack("<IIQII", 24, 1, PAGE, 0, 0)) == []


@given(st.binary(min_size=24, max_size=200))
def test_any_answer_is_read_without_harm(data: bytes) -> None:
    iova_ranges(data)


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        ([], (1 << 32, (1 << 32) + (1 << 36))),
        ([(0, 0xFEDFFFFF), (0xFEF00000, (1 << 39) - 1)], (1 << 32, (1 << 32) + (1 << 36))),
        ([(0, (1 << 31) - 1)], (1 << 20, 1 << 31)),
    ],
)
def test_device_addresses_stay_inside_what_the_iommu_translates(
    ranges: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    assert choose_iova(ranges) == wanted


def test_a_forked_child_keeps_no_descriptor_and_no_map_of_the_device(kernel: Kernel) -> None:
    before = descriptors()
    transport = kernel.transport()
    fn_part = transport.window[:16]
    calls = len(kernel.calls)
    fn_part.release()
    transport.forked()
    assert descriptors() == before
    assert str(kernel.device) not in Path("/proc/self/maps").read_text()
    assert len(kernel.calls) == calls  # the device is the parent's: not a word to it
