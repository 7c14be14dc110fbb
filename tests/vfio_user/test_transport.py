"""The guest's transport over the client: a VM without QEMU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelvisor.errors import CapacityError, DataError, UsageError
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.protocol import PciRegion
from accelvisor.vfio_user.transport import RAM_ADDRESS, ClientTransport
from tests.descriptors import open_fds

from .conftest import Running
from .sample import ADDRESS, EXCHANGE, MSI_CAP, PATTERN, RAISE, WINDOW_BYTES, WRITE, SampleDevice


@pytest.fixture
def transport(running: Running) -> Iterator[ClientTransport]:
    made = ClientTransport(Client(running.path), ram_bytes=1 << 20)
    yield made
    made.close()
    made.close()
    running.wait_free()


def test_it_is_a_transport_of_the_guest(transport: ClientTransport) -> None:
    from accelvisor.guest.transport import Transport

    used: Transport = transport
    assert used.window.nbytes == WINDOW_BYTES
    assert used.window.format == "B"
    assert not used.window.readonly


def test_device_is_enabled_as_a_guest_would(
    transport: ClientTransport, device: SampleDevice
) -> None:
    assert device.config[4] & 6 == 6, "memory space and bus master"
    assert device.config[MSI_CAP + 2] & 1, "MSI"
    assert device.eventfds


def test_registers(transport: ClientTransport, device: SampleDevice) -> None:
    transport.write32(0x40, 7)
    assert transport.read32(0x40) == 7
    device.bar0[0x40:0x48] = (1 << 40 | 5).to_bytes(8, "little")
    assert transport.read64(0x40) == 1 << 40 | 5


def test_absent_device_reads_all_ones_and_writes_are_lost(
    transport: ClientTransport, running: Running
) -> None:
    assert transport.read32(1 << 40) == 0xFFFFFFFF
    running.stop()
    assert transport.read32(0x40) == 0xFFFFFFFF
    assert transport.read64(0x40) == 0xFFFFFFFF_FFFFFFFF
    transport.write32(0x40, 1)


def test_interrupt(transport: ClientTransport) -> None:
    assert not transport.wait_interrupt(0)
    assert not transport.wait_interrupt(0.01)
    transport.write32(RAISE, 1)
    assert transport.wait_interrupt(5)
    assert not transport.wait_interrupt(0)


def test_dma(transport: ClientTransport) -> None:
    buffer = transport.allocate_dma(100)
    assert bytes(buffer.view) == bytes(4096)
    transport.write32(ADDRESS, buffer.address & 0xFFFFFFFF)
    transport.write32(ADDRESS + 4, buffer.address >> 32)
    transport.write32(WRITE, 1)
    assert bytes(buffer.view[: len(PATTERN)]) == PATTERN
    buffer.release()


def test_dma_by_message_while_waiting_for_the_interrupt(transport: ClientTransport) -> None:
    buffer = transport.allocate_dma(4096)
    buffer.view[:4] = b"old "
    transport.write32(ADDRESS, buffer.address & 0xFFFFFFFF)
    transport.write32(ADDRESS + 4, buffer.address >> 32)
    transport.write32(EXCHANGE, 1)
    assert transport.wait_interrupt(5)
    assert bytes(buffer.view[: len(PATTERN)]) == PATTERN
    assert bytes(buffer.view[len(PATTERN) : len(PATTERN) + 4]) == b"old "


def test_memory_is_zeroed_when_it_is_used_again(transport: ClientTransport) -> None:
    first = transport.allocate_dma(4096)
    first.view[:] = b"\xff" * 4096
    address = first.address
    first.release()
    first.release()
    second = transport.allocate_dma(4096)
    assert second.address == address
    assert bytes(second.view) == bytes(4096)


def test_memory_runs_out_with_a_typed_error(transport: ClientTransport) -> None:
    with pytest.raises(CapacityError) as error:
        transport.allocate_dma((1 << 20) + 1)
    assert error.value.code == "guest-ram"
    held = [transport.allocate_dma(4096) for _ in range(256)]
    with pytest.raises(CapacityError):
        transport.allocate_dma(1)
    for buffer in held[::2] + held[1::2]:
        buffer.release()
    transport.allocate_dma(1 << 20).release()


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 80_000), st.booleans()), max_size=40))
def test_buffers_never_overlap(steps: list[tuple[int, bool]], tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.mktemp("t")) / "s"  # type: ignore[attr-defined]
    device = SampleDevice()
    running = Running(device, path)
    transport = ClientTransport(Client(path), ram_bytes=1 << 20)
    live: dict[int, tuple[int, object]] = {}
    for size, release in steps:
        try:
            buffer = transport.allocate_dma(size)
        except CapacityError:
            release = True
        else:
            start, length = buffer.address, buffer.view.nbytes
            assert length >= size
            assert start >= RAM_ADDRESS
            assert start + length <= RAM_ADDRESS + (1 << 20)
            assert all(start + length <= a or a + n <= start for a, (n, _) in live.items())
            live[start] = (length, buffer)
        if release and live:
            live.popitem()[1][1].release()  # type: ignore[attr-defined]
    for _, buffer in live.values():  # type: ignore[assignment]
        buffer.release()
    transport.close()
    running.stop()
    device.close()


def test_after_a_reset_the_guest_enables_the_device_again(
    transport: ClientTransport, device: SampleDevice
) -> None:
    transport.client.reset()
    assert not device.config[4] & 6
    transport.reenable()
    assert device.config[4] & 6 == 6
    transport.write32(RAISE, 1)
    assert transport.wait_interrupt(5)


def test_close_leaves_nothing(running: Running) -> None:
    with Client(running.path) as client:
        client.reset()
    running.wait_free()
    before = open_fds()
    transport = ClientTransport(Client(running.path))
    held = transport.allocate_dma(4096)
    transport.close()
    running.wait_free()
    held.view[:2] = b"ok"  # a view that is still held stays valid
    held.release()
    assert open_fds() == before


def test_device_without_identity_is_refused(running: Running, device: SampleDevice) -> None:
    device.config[0:4] = b"\xff" * 4
    with pytest.raises(DataError) as error:
        ClientTransport(Client(running.path))
    assert error.value.code == "pci-identity"


def test_ram_must_be_whole_pages(client: Client) -> None:
    for size in (0, -4096, 4097):
        with pytest.raises(UsageError):
            ClientTransport(client, ram_bytes=size)


def test_interrupt_that_comes_from_another_thread(
    transport: ClientTransport, device: SampleDevice
) -> None:
    timer = threading.Timer(0.05, device.interrupt)
    timer.start()
    # False were it the deadline, not the interrupt, that ends the wait.
    assert transport.wait_interrupt(60)
    timer.join()


def test_configuration_space_is_a_region(transport: ClientTransport) -> None:
    assert transport.client.region_read(PciRegion.CONFIG, 0, 2) == b"\xce\xac"
