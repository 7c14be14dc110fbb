"""The client: every call against a real server, and against servers that misbehave."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelvisor.errors import DeadlineError, ProtocolError, UnavailableError
from accelvisor.vfio_user import messages
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.messages import VERSION, PayloadError, RegionWrite
from accelvisor.vfio_user.model import IoFd, Refusal, RegionInfo
from accelvisor.vfio_user.negotiate import (
    Capabilities,
    own_capabilities,
    pack_version,
    parse_version,
)
from accelvisor.vfio_user.passing import receive, send
from accelvisor.vfio_user.protocol import (
    Command,
    DmaFlag,
    Feature,
    FeatureFlag,
    IrqSet,
    MigState,
    PciIrq,
    PciRegion,
    RegionFlag,
)
from accelvisor.vfio_user.server import Connection
from accelvisor.vfio_user.wire import FrameReader, Message, encode_command, encode_reply
from tests.descriptors import open_fds

from .conftest import Running
from .sample import ADDRESS, BAR0_BYTES, EXCHANGE, PATTERN, WINDOW_BYTES, WRITE, SampleDevice


def test_information(client: Client, device: SampleDevice) -> None:
    info = client.device_info()
    assert (info.flags, info.regions, info.irqs) == (3, 9, 5)
    assert client.irq_info(PciIrq.MSI).count == 1
    region = client.region_info(PciRegion.BAR0)
    assert (region.size, region.fd) == (BAR0_BYTES, None)
    with pytest.raises(Refusal):
        client.region_info(9)
    assert client.region_io_fds(0) == ()


def test_window_is_shared_memory(client: Client, device: SampleDevice) -> None:
    window = client.map_region(PciRegion.BAR2)
    assert len(window) == WINDOW_BYTES
    window[100:104] = b"seen"
    assert device.window[100:104] == b"seen"
    window.close()
    with pytest.raises(Refusal) as refusal:
        client.map_region(PciRegion.BAR0)
    assert refusal.value.errno == errno.ENODEV


def test_sparse_region_is_described_and_not_mapped_whole(tmp_path: Path) -> None:
    class Sparse(SampleDevice):
        def region_info(self, index: int) -> RegionInfo:
            info = super().region_info(index)
            if index != PciRegion.BAR2:
                return info
            areas = ((0x1000, 0x1000), (0x4000, 0x2000))
            return RegionInfo(index, info.flags, info.size, info.fd, areas)

    before = open_fds()
    device = Sparse()
    running = Running(device, tmp_path / "s")
    with Client(running.path) as client:
        info = client.region_info(PciRegion.BAR2)
        assert info.sparse == ((0x1000, 0x1000), (0x4000, 0x2000))
        assert info.fd is not None
        os.close(info.fd)
        with pytest.raises(Refusal, match="parts"):
            client.map_region(PciRegion.BAR2)
    running.stop()
    device.close()
    assert open_fds() == before


def test_io_fds_arrive_once_for_each_descriptor(tmp_path: Path) -> None:
    class WithIoFds(SampleDevice):
        def region_io_fds(self, index: int) -> list[IoFd]:
            return [IoFd(0x100, 4, self.window_fd), IoFd(0x104, 4, self.window_fd, 1, 7)]

    device = WithIoFds()
    running = Running(device, tmp_path / "s")
    with Client(running.path) as client:
        one, two = client.region_io_fds(0)
        assert one.fd == two.fd
        assert (two.offset, two.flags, two.data) == (0x104, 1, 7)
        os.close(one.fd)
    running.stop()
    device.close()


def test_registers(client: Client, device: SampleDevice) -> None:
    client.write32(0, 0x40, 0xDEADBEEF)
    assert client.read32(0, 0x40) == 0xDEADBEEF
    client.region_write(0, 0x44, b"\1\0\0\0")
    assert client.read64(0, 0x40) == 0x1_DEADBEEF
    client.region_write(0, 0x48, b"post", posted=True)
    assert client.region_read(0, 0x48, 4) == b"post"


def test_transfer_larger_than_agreed_is_cut_up(running: Running) -> None:
    own = own_capabilities()
    own.max_data_xfer_size = 1000
    with Client(running.path, capabilities=own) as client:
        data = os.urandom(WINDOW_BYTES)
        client.region_write(PciRegion.BAR2, 0, data)
        assert client.region_read(PciRegion.BAR2, 0, WINDOW_BYTES) == data


def test_write_multi(client: Client, device: SampleDevice) -> None:
    client.region_write_multi([RegionWrite(0x40, 0, b"ab"), RegionWrite(0x50, 0, b"12345678")])
    client.region_write_multi([RegionWrite(0x60, 0, b"x")], posted=True)
    assert client.region_read(0, 0x60, 1) == b"x"
    assert device.bar0[0x50:0x58] == b"12345678"


def test_write_multi_that_was_not_negotiated_is_not_sent(running: Running) -> None:
    with Client(running.path, capabilities=Capabilities()) as client, pytest.raises(Refusal):
        client.region_write_multi([RegionWrite(0x40, 0, b"ab")])


def test_refusal_leaves_the_connection_usable(client: Client) -> None:
    for _ in range(3):
        with pytest.raises(Refusal) as refusal:
            client.read32(0, BAR0_BYTES)
        assert refusal.value.errno == errno.EINVAL
    client.reset()


def test_dma_through_the_map(client: Client, device: SampleDevice) -> None:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, 0x4000)
    client.dma_map(0x10000, 0x2000, fd=fd, offset=0x2000)
    client.region_write(0, ADDRESS, (0x10010).to_bytes(8, "little"))
    client.write32(0, WRITE, 1)
    assert os.pread(fd, len(PATTERN), 0x2010) == PATTERN
    with pytest.raises(Refusal) as refusal:
        client.dma_map(0x11000, 0x1000, fd=fd)
    assert refusal.value.errno == errno.EEXIST
    client.dma_unmap(0x10000, 0x2000)
    client.dma_unmap(0x10000, 0x2000)
    client.dma_map(0x11000, 0x1000, fd=fd)
    client.dma_unmap_all()
    assert len(device.maps) == 0
    os.close(fd)


def test_map_that_the_device_refuses_is_forgotten(client: Client, device: SampleDevice) -> None:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, 0x1000)

    def refuse(*_: object) -> None:
        raise Refusal(errno.ENOMEM, "no")

    before = open_fds()
    device.dma_map, kept = refuse, device.dma_map  # type: ignore[method-assign,assignment]
    with pytest.raises(Refusal):
        client.dma_map(0, 0x1000, memory=memoryview(bytearray(0x1000)))
    device.dma_map = kept  # type: ignore[method-assign]
    client.dma_map(0, 0x1000, fd=fd)
    client.dma_unmap_all()
    assert open_fds() == before
    os.close(fd)


def test_dma_by_message_is_answered_from_the_client_s_memory(client: Client) -> None:
    memory = bytearray(b"what was here before....".ljust(0x1000, b"."))
    client.dma_map(0x5000, 0x1000, memory=memoryview(memory))
    event = client.irq_eventfd(PciIrq.MSI)
    client.region_write(0, ADDRESS, (0x5000).to_bytes(8, "little"))
    client.write32(0, EXCHANGE, 1)
    end = time.monotonic() + 10
    while client.pump(0.05) or not memory.startswith(PATTERN):
        assert time.monotonic() < end
    assert memory[: len(PATTERN)] == PATTERN
    assert memory[len(PATTERN) : 2 * len(PATTERN)] == b"what was here before...."
    client.reset()
    assert os.eventfd_read(event) == 1
    os.close(event)


def test_dma_by_message_respects_the_map(running: Running, device: SampleDevice) -> None:
    results: list[object] = []

    def attempt(address: int, size: int) -> None:
        def task(connection: Connection) -> None:
            try:
                results.append(connection.dma_read(address, size))
            except Refusal as refusal:
                results.append(refusal.errno)
            try:
                connection.dma_write(address, bytes(size))
            except Refusal as refusal:
                results.append(refusal.errno)

        running.server.defer(task)

    with Client(running.path) as client:
        memory = bytearray(b"\xaa" * 0x1000)
        client.dma_map(0x5000, 0x1000, memory=memoryview(memory), flags=DmaFlag.READ)
        client.dma_map(0x6000, 0x1000)
        for address, size in ((0x5000, 16), (0x5FF8, 16), (0x4000, 16), (0x6000, 16)):
            attempt(address, size)
            client.reset()
        client.reset()
    assert memory == b"\xaa" * 0x1000
    running.wait_free()
    assert results == [
        b"\xaa" * 16, errno.EACCES, errno.EFAULT, errno.EACCES,
        errno.EFAULT, errno.EFAULT, errno.EFAULT, errno.EFAULT,
    ]  # fmt: skip


def test_dma_by_a_twin_socket(device: SampleDevice, tmp_path: Path) -> None:
    running = Running(device, tmp_path / "s", twin_socket=True)
    own = own_capabilities()
    asks = VERSION.pack(0, 0) + b'{"capabilities":{"twin_socket":{"supported":true}}}\0'
    own.twin_socket = parse_version(asks)[2].twin_socket
    memory = bytearray(0x1000)
    with Client(running.path, capabilities=own) as client:
        assert client.agreement.twin_socket
        client.dma_map(0x5000, 0x1000, memory=memoryview(memory))
        client.region_write(0, ADDRESS, (0x5000).to_bytes(8, "little"))
        client.write32(0, EXCHANGE, 1)
        for _ in range(3):
            assert client.pump(5)
        assert memory.startswith(PATTERN)
        client.reset()
    with Client(running.path) as client:
        assert not client.agreement.twin_socket
    running.stop()


def test_interrupts(client: Client, device: SampleDevice) -> None:
    event = client.irq_eventfd(PciIrq.MSI)
    client.set_irqs(PciIrq.MSI, IrqSet.DATA_NONE | IrqSet.ACTION_TRIGGER, 0, 1)
    assert os.eventfd_read(event) == 1
    client.irq_disable(PciIrq.MSI)
    device.interrupt()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)
    os.close(event)
    with pytest.raises(Refusal):
        client.irq_eventfd(PciIrq.INTX)


def test_features_and_migration(client: Client, device: SampleDevice) -> None:
    assert client.migration_flags() == 7
    assert client.migration_state() is MigState.RUNNING
    assert client.feature_probe(Feature.MIGRATION, FeatureFlag.GET)
    assert not client.feature_probe(77)
    client.region_write(0, 0x200, b"the state that moves")
    client.set_migration_state(MigState.STOP_COPY)
    saved = client.save_state()
    assert len(saved) == BAR0_BYTES
    client.set_migration_state(MigState.RUNNING)
    client.region_write(0, 0x200, bytes(20))
    client.set_migration_state(MigState.RESUMING)
    client.migration_write(saved)
    client.set_migration_state(MigState.RUNNING)
    assert client.region_read(0, 0x200, 20) == b"the state that moves"


def test_state_that_is_cut_off_is_refused_and_reset_leads_on(client: Client) -> None:
    client.set_migration_state(MigState.RESUMING)
    client.migration_write(b"too little")
    with pytest.raises(Refusal):
        client.set_migration_state(MigState.RUNNING)
    assert client.migration_state() is MigState.RESUMING
    client.reset()
    assert client.migration_state() is MigState.RUNNING


@pytest.mark.parametrize("state", [s for s in MigState if s is not MigState.ERROR])
def test_reset_from_every_state_is_seen_by_both_ends(client: Client, state: MigState) -> None:
    client.set_migration_state(state)
    assert client.migration_state() is state
    client.reset()
    assert client.migration_state() is MigState.RUNNING


def test_dirty_pages(client: Client, device: SampleDevice) -> None:
    memory = os.memfd_create("ram")
    os.ftruncate(memory, 0x100000)
    client.dma_map(0, 0x100000, fd=memory)
    assert client.start_dirty_log(4096, [(0, 0x100000)]) == 4096
    device.dma_write(0x3000, b"x")
    assert client.dirty_pages(0, 0x100000, 4096) == b"\x08" + bytes(31)
    assert client.dirty_pages(0, 0x100000, 4096) == bytes(32)
    device.dma_write(0xFFFFF, b"x")
    assert client.dma_unmap(0, 0x100000, dirty_page_bytes=4096) == bytes(31) + b"\x80"
    client.stop_dirty_log()
    os.close(memory)


# --- the other end misbehaves -------------------------------------------------------------------


def test_nobody_there(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(UnavailableError) as error:
        Client(tmp_path / "nobody")
    assert error.value.hint
    assert open_fds() == before


Script = Callable[[socket.socket, FrameReader], None]


@contextmanager
def fake(script: Script, timeout_s: float = 5.0) -> Iterator[Client]:
    """A client of a server that negotiates well and then follows ``script``."""
    before = open_fds()
    ours, theirs = socket.socketpair()
    reader = FrameReader()

    def serve() -> None:
        hello = receive(theirs, reader)
        assert hello is not None
        answer = pack_version(0, 0, own_capabilities())
        theirs.sendall(encode_reply(hello.id, Command.VERSION, answer))
        script(theirs, reader)

    thread = threading.Thread(target=serve)
    thread.start()
    client = Client(ours, timeout_s=timeout_s)
    yield client
    client.close()
    thread.join(10)
    theirs.close()
    assert not thread.is_alive()
    assert open_fds() == before


def hear(sock: socket.socket, reader: FrameReader) -> Message:
    message = receive(sock, reader)
    assert message is not None
    return message


def answering(make: Callable[[Message], bytes], fds: int = 0) -> Script:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        message = hear(sock, reader)
        send(sock, make(message), [sock.fileno()] * fds)

    return script


def test_server_that_hangs_is_given_up(tmp_path: Path) -> None:
    with fake(lambda s, r: None, timeout_s=0.1) as client:
        with pytest.raises(DeadlineError) as error:
            client.read32(0, 0)
        assert error.value.code == "vfio-user-deadline"
        with pytest.raises(UnavailableError):
            client.read32(0, 0)


def test_server_that_dies_is_named() -> None:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        hear(sock, reader)
        sock.shutdown(socket.SHUT_RDWR)

    with fake(script) as client, pytest.raises(UnavailableError) as error:
        client.read32(0, 0)
    assert error.value.code == "vfio-user-gone"


def test_server_that_dies_in_the_middle_of_a_reply() -> None:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        sock.sendall(encode_reply(hear(sock, reader).id, Command.REGION_READ, bytes(20))[:20])
        sock.shutdown(socket.SHUT_RDWR)

    with fake(script) as client, pytest.raises(ProtocolError):
        client.read32(0, 0)


def access(offset: int = 0, region: int = 0, count: int = 4, data: bytes = b"data") -> bytes:
    return messages.pack_access(offset, region, count, data)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: encode_reply(m.id ^ 1, m.command, access()),
        lambda m: encode_reply(m.id, Command.REGION_WRITE, access()),
        lambda m: encode_reply(m.id, m.command, access(offset=4)),
        lambda m: encode_reply(m.id, m.command, access(region=1)),
        lambda m: encode_reply(m.id, m.command, access(count=3)),
        lambda m: encode_reply(m.id, m.command, access(data=b"dat")),
        lambda m: encode_reply(m.id, m.command, access(data=b"data and more")),
        lambda m: encode_reply(m.id, m.command, b""),
        lambda m: b"\xff" * 64,
    ],
)
def test_wrong_answer_to_a_read_is_never_taken_for_data(make: Callable[[Message], bytes]) -> None:
    with fake(answering(make)) as client:
        with pytest.raises(ProtocolError):
            client.read32(0, 0)
        with pytest.raises(UnavailableError):
            client.read32(0, 0)


def test_error_without_a_number_is_still_an_error() -> None:
    def make(message: Message) -> bytes:
        return message.raw[:4] + b"\x10\0\0\0\x21\0\0\0\0\0\0\0"

    with fake(answering(make)) as client, pytest.raises(Refusal) as refusal:
        client.reset()
    assert refusal.value.errno == errno.EIO


@pytest.mark.parametrize("fds", [1, 16])
def test_descriptors_that_nobody_asked_for_are_closed(fds: int) -> None:
    with fake(answering(lambda m: encode_reply(m.id, m.command), fds)) as client:
        client.reset()


def region_reply(argsz: int, index: int = 2, flags: int = 7, offset: int = 0) -> bytes:
    return messages.REGION_INFO.pack(argsz, flags, index, 32, 4096, offset)


@pytest.mark.parametrize(
    ("body", "fds"),
    [(region_reply(32, index=1), 1), (region_reply(32), 2), (region_reply(32, offset=4096), 1),
     (region_reply(32)[:31], 1)],
)  # fmt: skip
def test_wrong_region_info_closes_its_descriptors(body: bytes, fds: int) -> None:
    script = answering(lambda m: encode_reply(m.id, m.command, body), fds)
    with fake(script) as client, pytest.raises(PayloadError):
        client.region_info(2)


def test_region_info_that_wants_more_room_each_time_is_given_up() -> None:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        for i in range(2):
            message = hear(sock, reader)
            body = region_reply(100 * (i + 1), flags=RegionFlag.READ | RegionFlag.CAPS)
            sock.sendall(encode_reply(message.id, message.command, body))

    with fake(script) as client, pytest.raises(PayloadError, match="more room"):
        client.region_info(2)


def test_unknown_request_of_the_server_is_refused_and_the_call_goes_on() -> None:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        message = hear(sock, reader)
        sock.sendall(encode_command(5, Command.DEVICE_RESET))
        sock.sendall(encode_command(6, Command.DMA_READ, bytes(7)))
        sock.sendall(encode_command(7, Command.DMA_READ, messages.DMA_ACCESS.pack(0, 2**40)))
        sock.sendall(encode_command(8, Command.DMA_WRITE, messages.DMA_ACCESS.pack(0, 9)))
        sock.sendall(encode_command(9, Command.DMA_WRITE, bytes(16), no_reply=True))
        numbers = [hear(sock, reader).errno for _ in range(4)]
        assert numbers == [errno.EOPNOTSUPP, errno.EINVAL, errno.EINVAL, errno.EINVAL]
        sock.sendall(encode_reply(message.id, message.command))

    with fake(script) as client:
        client.reset()


def test_server_that_only_asks_and_never_answers_is_given_up() -> None:
    def script(sock: socket.socket, reader: FrameReader) -> None:
        hear(sock, reader)
        try:
            while True:
                sock.sendall(encode_command(5, Command.DMA_READ, messages.DMA_ACCESS.pack(0, 1)))
                if receive(sock, reader) is None:
                    return
        except (OSError, ProtocolError):
            return

    # Were its deadline put off by each request, this would not end.
    with fake(script, timeout_s=0.3) as client, pytest.raises(DeadlineError):
        client.reset()


def test_pump_without_a_request_returns_in_time() -> None:
    with fake(lambda s, r: None) as client:
        assert client.pump(0) is False
        assert client.pump(0.01) is False


def test_pump_notices_that_the_server_went() -> None:
    script: Script = lambda s, r: s.shutdown(socket.SHUT_RDWR)  # noqa: E731
    with fake(script) as client, pytest.raises(UnavailableError):
        client.pump(5)


def test_pump_refuses_a_reply_that_nobody_waits_for() -> None:
    script: Script = lambda s, r: s.sendall(encode_reply(1, Command.DEVICE_RESET))  # noqa: E731
    with fake(script) as client, pytest.raises(ProtocolError):
        client.pump(5)


def test_request_read_together_with_a_reply_is_not_forgotten() -> None:
    memory = bytearray(b"here")

    def script(sock: socket.socket, reader: FrameReader) -> None:
        mapped = hear(sock, reader)
        sock.sendall(encode_reply(mapped.id, mapped.command))
        reset = hear(sock, reader)
        ask = encode_command(5, Command.DMA_READ, messages.DMA_ACCESS.pack(0, 4))
        sock.sendall(encode_reply(reset.id, reset.command) + ask)
        assert bytes(hear(sock, reader).body[16:]) == b"here"

    with fake(script) as client:
        client.dma_map(0, 4, memory=memoryview(memory))
        client.reset()
        assert client.buffered
        assert client.pump()
        assert not client.buffered
