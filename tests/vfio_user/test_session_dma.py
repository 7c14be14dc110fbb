"""The session: DMA maps, interrupts, and descriptors beside every command."""

from __future__ import annotations

import errno
import os

import pytest

from accelvisor.vfio_user import messages
from accelvisor.vfio_user.messages import DmaUnmap
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.negotiate import Agreement
from accelvisor.vfio_user.protocol import (
    Command,
    IrqSet,
    PciIrq,
    UnmapFlag,
)
from accelvisor.vfio_user.session import ServerSession
from tests.descriptors import open_fds

from .asking import EVENTFD, TRIGGER, ask, irqs, mapping, memfd, read, refused
from .sample import PATTERN, SampleDevice

# --- DMA ----------------------------------------------------------------------------------------


def test_map_write_unmap(session: ServerSession, device: SampleDevice) -> None:
    fd = memfd()
    ask(session, Command.DMA_MAP, mapping(0x1000, 0x2000, 3, 0x3000), [os.dup(fd)])
    device.dma_write(0x1FF0, PATTERN)
    assert os.pread(fd, len(PATTERN), 0x3FF0) == PATTERN
    reply = ask(session, Command.DMA_UNMAP, messages.DMA_UNMAP.pack(24, 0, 0x1000, 0x2000))
    assert messages.DMA_UNMAP.unpack(reply.body) == (24, 0, 0x1000, 0x2000)
    with pytest.raises(Refusal):
        device.dma_write(0x1FF0, PATTERN)
    os.close(fd)


def test_map_without_descriptor_is_accepted(session: ServerSession, device: SampleDevice) -> None:
    # QEMU maps BAR2 and a firmware alias so.
    ask(session, Command.DMA_MAP, mapping(0xFC000000, 0x40000, 1))
    assert len(device.maps) == 1


@pytest.mark.parametrize(
    ("body", "fds"),
    [
        (mapping(size=0), 1), (mapping(2**64 - 0x1000, 0x2000), 1), (mapping(0x1001), 1),
        (mapping(size=0x1001), 1), (mapping(flags=0x10), 1), (mapping(offset=1), 1),
        (mapping(offset=2**63), 1), (mapping(), 2), (mapping()[:31], 1), (b"", 1),
    ],
)  # fmt: skip
def test_impossible_map_is_refused_and_its_descriptor_closed(
    session: ServerSession, device: SampleDevice, body: bytes, fds: int
) -> None:
    before = open_fds()
    given_fds = [memfd() for _ in range(fds)]
    assert refused(session, Command.DMA_MAP, body, given_fds) == errno.EINVAL
    assert len(device.maps) == 0
    assert open_fds() == before


def test_map_over_another_is_eexist_and_leaks_nothing(session: ServerSession) -> None:
    ask(session, Command.DMA_MAP, mapping(), [memfd()])
    before = open_fds()
    assert refused(session, Command.DMA_MAP, mapping(), [memfd()]) == errno.EEXIST
    assert open_fds() == before


def test_unmap_floods_of_a_viommu_succeed(session: ServerSession, device: SampleDevice) -> None:
    for shift in range(12, 48):
        ask(session, Command.DMA_UNMAP, messages.DMA_UNMAP.pack(24, 0, 1 << shift, 1 << shift))
    assert device.unmaps == 36


def test_unmap_all(session: ServerSession, device: SampleDevice) -> None:
    ask(session, Command.DMA_MAP, mapping(), [memfd()])
    ask(session, Command.DMA_MAP, mapping(0x9000), [memfd()])
    ask(session, Command.DMA_UNMAP, messages.DMA_UNMAP.pack(24, UnmapFlag.ALL, 0, 0))
    assert len(device.maps) == 0


@pytest.mark.parametrize(
    ("flags", "address", "size"),
    [(4, 0, 0), (3, 0, 0), (UnmapFlag.ALL, 0, 4096), (0, 2**64 - 1, 2)],
)
def test_impossible_unmap_is_refused(
    session: ServerSession, flags: int, address: int, size: int
) -> None:
    body = messages.DMA_UNMAP.pack(24, flags, address, size) + bytes(16)
    assert refused(session, Command.DMA_UNMAP, body) == errno.EINVAL


def test_unmap_with_dirty_bitmap(session: ServerSession, device: SampleDevice) -> None:
    ask(session, Command.DMA_MAP, mapping(0, 0x10000), [memfd()])
    device.dirty.start(4096)
    device.dma_write(0x3000, b"x")
    request = DmaUnmap(48, UnmapFlag.GET_DIRTY_BITMAP, 0, 0x10000, 4096, 8)
    reply = ask(session, Command.DMA_UNMAP, messages.pack_dma_unmap(request))
    assert messages.DMA_UNMAP.unpack_from(reply.body) == (48, 1, 0, 0x10000)
    assert messages.BITMAP.unpack_from(reply.body, 24) == (4096, 8)
    assert bytes(reply.body[40:]) == b"\x08" + bytes(7)
    assert len(device.maps) == 0


def test_unmap_whose_bitmap_has_no_room_unmaps_and_clears_nothing(
    session: ServerSession, device: SampleDevice
) -> None:
    ask(session, Command.DMA_MAP, mapping(0, 0x10000), [memfd()])
    device.dirty.start(4096)
    device.dma_write(0x3000, b"x")
    small = DmaUnmap(40, UnmapFlag.GET_DIRTY_BITMAP, 0, 0x10000, 4096, 0)
    huge = DmaUnmap(48, UnmapFlag.GET_DIRTY_BITMAP, 0, 1 << 60, 4096, 2**40)
    for request in (small, huge, small._replace(page_size=4095, bitmap_bytes=8)):
        body = messages.pack_dma_unmap(request)
        assert refused(session, Command.DMA_UNMAP, body) == errno.EINVAL
    assert len(device.maps) == 1
    assert device.dirty_pages(0, 0x10000, 4096)[0] == 8


# --- interrupts ---------------------------------------------------------------------------------


def test_interrupt_by_eventfd(session: ServerSession, device: SampleDevice) -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK)
    # QEMU counts the descriptor in argsz although it travels beside the bytes.
    body = messages.IRQ_SET.pack(24, EVENTFD, PciIrq.MSI, 0, 1)
    ask(session, Command.DEVICE_SET_IRQS, body, [os.dup(event)])
    device.interrupt()
    assert os.eventfd_read(event) == 1
    ask(session, Command.DEVICE_SET_IRQS, irqs(TRIGGER, 0, 1))
    assert os.eventfd_read(event) == 1
    for data, expected in ((b"\0", False), (b"\1", True)):
        flags = IrqSet.DATA_BOOL | IrqSet.ACTION_TRIGGER
        ask(session, Command.DEVICE_SET_IRQS, irqs(flags, 0, 1, data))
        if expected:
            assert os.eventfd_read(event) == 1
        else:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(event)
    ask(session, Command.DEVICE_SET_IRQS, irqs(TRIGGER, 0, 0))
    assert not device.eventfds
    os.close(event)


def test_eventfd_set_without_descriptors_takes_it_away(
    session: ServerSession, device: SampleDevice
) -> None:
    ask(session, Command.DEVICE_SET_IRQS, irqs(EVENTFD, 0, 1), [os.eventfd(0)])
    assert device.eventfds
    ask(session, Command.DEVICE_SET_IRQS, irqs(EVENTFD, 0, 1))
    assert not device.eventfds


@pytest.mark.parametrize(
    ("body", "fds"),
    [
        (irqs(0, 0, 1), 0), (irqs(IrqSet.DATA_NONE, 0, 1), 0), (irqs(0x3F, 0, 1), 0),
        (irqs(IrqSet.DATA_NONE | IrqSet.DATA_BOOL | IrqSet.ACTION_TRIGGER, 0, 1, b"\1"), 0),
        (irqs(TRIGGER | 0x40, 0, 1), 0), (irqs(TRIGGER, 1, 1), 0), (irqs(TRIGGER, 0, 2), 0),
        (irqs(TRIGGER, 2**32 - 1, 2**32 - 1), 0), (irqs(TRIGGER, 1, 0), 0),
        (irqs(TRIGGER, 0, 1, index=9), 0), (irqs(TRIGGER, 0, 1, index=PciIrq.INTX), 0),
        (irqs(EVENTFD, 0, 1), 2), (irqs(EVENTFD, 0, 0), 0), (irqs(EVENTFD, 0, 0), 1),
        (irqs(TRIGGER, 0, 1), 1), (irqs(IrqSet.DATA_BOOL | IrqSet.ACTION_TRIGGER, 0, 1), 0),
        (irqs(TRIGGER, 0, 1)[:19], 0),
    ],
)  # fmt: skip
def test_impossible_interrupt_request_is_refused_without_a_leak(
    session: ServerSession, device: SampleDevice, body: bytes, fds: int
) -> None:
    before = open_fds()
    eventfds = [os.eventfd(0) for _ in range(fds)]
    assert refused(session, Command.DEVICE_SET_IRQS, body, eventfds) == errno.EINVAL
    assert not device.eventfds
    assert open_fds() == before


def test_descriptors_beside_other_commands_are_closed(session: ServerSession) -> None:
    before = open_fds()
    ask(session, Command.DEVICE_RESET, b"", [memfd(), memfd()])
    ask(session, Command.REGION_READ, read(0, 0, 4), [memfd()])
    refused(session, 999, b"", [memfd()])
    assert open_fds() == before


def test_more_descriptors_than_agreed_are_refused(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement(own_max_fds=1))
    before = open_fds()
    assert refused(session, Command.DEVICE_RESET, b"", [memfd(), memfd()]) == errno.EINVAL
    assert device.resets == 0
    assert open_fds() == before
