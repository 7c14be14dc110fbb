"""The server against hostile, clumsy and impatient clients."""

from __future__ import annotations

import array
import errno
import os
import random
import socket
import threading
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError, DeadlineError, UnavailableError
from accelvisor.vfio_user import messages
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.messages import DmaMap
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.negotiate import own_capabilities, pack_version
from accelvisor.vfio_user.passing import receive, send
from accelvisor.vfio_user.protocol import HEADER, Command
from accelvisor.vfio_user.server import Connection, Server
from accelvisor.vfio_user.wire import FrameReader, Message, encode_command, encode_reply
from tests.descriptors import open_fds

from .conftest import Running, until
from .sample import SampleDevice

VERSION = encode_command(0, Command.VERSION, pack_version(0, 0, own_capabilities()))
RESET = encode_command(1, Command.DEVICE_RESET)


class Raw:
    """A client that says what it wants."""

    def __init__(self, path: Path, *, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.reader = FrameReader()
        if greet:
            assert self.ask(VERSION).errno == 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self.reader.close()

    def hear(self) -> Message:
        message = receive(self.sock, self.reader)
        assert message is not None, "the server closed the connection"
        return message

    def ask(self, data: bytes) -> Message:
        self.sock.sendall(data)
        return self.hear()

    def is_closed(self) -> bool:
        try:
            return receive(self.sock, self.reader) is None
        except ConnectionResetError:
            return True


def test_byte_by_byte_delivery(running: Running, device: SampleDevice) -> None:
    with Raw(running.path, greet=False) as raw:
        for byte in VERSION + RESET:
            raw.sock.sendall(bytes([byte]))
        assert raw.hear().command == Command.VERSION
        assert raw.hear().id == 1
    assert device.resets == 1


def test_pipelined_requests_are_answered_in_order(running: Running, device: SampleDevice) -> None:
    writes = [
        encode_command(i, Command.REGION_WRITE, messages.pack_access(8 * i, 0, 4, b"data"))
        for i in range(20)
    ]
    with Raw(running.path, greet=False) as raw:
        raw.sock.sendall(VERSION + b"".join(writes) + RESET)
        assert [raw.hear().id for _ in range(22)] == [0, *range(20), 1]


def test_pipelined_descriptors_go_to_their_own_messages(
    running: Running, device: SampleDevice
) -> None:
    fds = [os.memfd_create(f"ram{i}") for i in range(3)]
    with Raw(running.path) as raw:
        for i, fd in enumerate(fds):
            os.ftruncate(fd, 0x1000)
            os.pwrite(fd, bytes([i + 1]), 0)
            body = messages.pack_dma_map(DmaMap(3, 0, 0x1000 * i, 0x1000))
            send(raw.sock, RESET)
            send(raw.sock, encode_command(i, Command.DMA_MAP, body), [fd])
        assert all(raw.hear().errno == 0 for _ in range(6))
        for i in range(3):
            (piece,) = device.maps.pieces(0x1000 * i, 1, 1)
            assert piece.range.item is not None
            assert piece.range.item[0] == i + 1
    for fd in fds:
        os.close(fd)
    running.wait_free()
    assert len(device.maps) == 0


def test_second_client_is_told_busy_and_the_first_is_not_disturbed(running: Running) -> None:
    with Client(running.path) as first:
        with pytest.raises(Refusal) as refusal:
            Client(running.path)
        assert refusal.value.errno == errno.EBUSY
        first.write32(0, 0x40, 7)
        assert first.read32(0, 0x40) == 7


def test_silent_client_does_not_keep_others_out(device: SampleDevice, tmp_path: Path) -> None:
    running = Running(device, tmp_path / "s", reply_s=0.2)
    with Raw(running.path, greet=False), Raw(running.path, greet=False):  # say nothing
        until(lambda: _connects(running.path), "a new client was served")
    running.stop()


def _connects(path: Path) -> bool:
    try:
        Client(path).close()
    except (Refusal, UnavailableError):
        return False
    return True


def test_next_client_is_served_at_once(running: Running) -> None:
    # QEMU of a restarted domain connects while its predecessor's connection is being cleaned up.
    for i in range(50):
        with Client(running.path) as client:
            client.write32(0, 0x40, i)


def test_state_outlives_a_client_and_maps_do_not(running: Running, device: SampleDevice) -> None:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, 0x1000)
    with Client(running.path) as client:
        client.write32(0, 0x40, 77)
        client.dma_map(0, 0x1000, fd=fd)
        client.irq_disable(1)
        os.close(client.irq_eventfd(1))
        assert device.eventfds
    os.close(fd)
    running.wait_free()
    assert len(device.maps) == 0
    assert not device.eventfds
    with Client(running.path) as client:
        assert client.read32(0, 0x40) == 77


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(1, 1, 3, 0, 0), HEADER.pack(1, 1, 2**32 - 1, 0, 0), b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(1, 1, 16, 0x7, 0), encode_reply(1, Command.DMA_READ, bytes(16)),
    ],
)  # fmt: skip
def test_broken_stream_costs_its_own_connection_only(running: Running, data: bytes) -> None:
    with Raw(running.path) as raw:
        raw.sock.sendall(data)
        assert raw.is_closed()
    with Raw(running.path) as raw:
        assert raw.ask(RESET).errno == 0


def test_version_refused_is_answered_and_closed(running: Running) -> None:
    with Raw(running.path, greet=False) as raw:
        body = pack_version(9, 0, own_capabilities())
        assert raw.ask(encode_command(3, Command.VERSION, body)).errno == errno.EINVAL
        assert raw.is_closed()


def test_request_before_version_is_answered_and_closed(
    running: Running, device: SampleDevice
) -> None:
    with Raw(running.path, greet=False) as raw:
        assert raw.ask(RESET).errno == errno.EINVAL
        assert raw.is_closed()
    assert device.resets == 0


def test_truncated_message_then_silence_then_end(running: Running) -> None:
    with Raw(running.path) as raw:
        raw.sock.sendall(RESET[:7])
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.is_closed()
    running.wait_free()


def test_client_that_goes_without_reading_its_replies(running: Running) -> None:
    read = encode_command(1, Command.REGION_READ, messages.ACCESS.pack(0, 0, 0x10000))
    with Raw(running.path) as raw:
        raw.sock.sendall(read * 50)
    running.wait_free()
    with Client(running.path) as client:
        client.reset()


def test_flood_of_descriptors_closes_them_and_the_connection(running: Running) -> None:
    before = open_fds()
    with Raw(running.path) as raw:
        rights = array.array("i", [raw.sock.fileno()] * 100)
        raw.sock.sendmsg([RESET], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert raw.is_closed()
    running.wait_free()
    assert open_fds() == before


def test_thousand_hostile_connections_leak_nothing(running: Running) -> None:
    # Mutations of good messages, with descriptors beside them, cut off at any byte.
    dice = random.Random(7)
    good = [
        VERSION, RESET,
        encode_command(2, Command.DMA_MAP, messages.pack_dma_map(DmaMap(3, 0, 0x1000, 0x1000))),
        encode_command(3, Command.DEVICE_SET_IRQS, messages.IRQ_SET.pack(20, 0x24, 1, 0, 1)),
        encode_command(4, Command.REGION_READ, messages.ACCESS.pack(0, 0, 4)),
        encode_command(5, Command.REGION_WRITE, messages.pack_access(0, 0, 4, b"1234")),
    ]  # fmt: skip
    with Client(running.path) as client:
        client.reset()
    running.wait_free()
    before = open_fds()
    event = os.eventfd(0)
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(running.path))
            try:
                if dice.random() < 0.7:
                    sock.sendall(VERSION)
                for _ in range(dice.randrange(4)):
                    data = bytearray(dice.choice(good))
                    for _ in range(dice.randrange(3)):
                        data[dice.randrange(len(data))] = dice.randrange(256)
                    sent = bytes(data[: dice.randrange(1, len(data) + 1)])
                    send(sock, sent, [event] * dice.randrange(4))
            except OSError:
                pass  # the server has had enough
    os.close(event)
    running.wait_free()
    until(lambda: open_fds() == before, f"descriptors back to {before}, now {open_fds()}")
    with Client(running.path) as client:
        client.write32(0, 0x40, 1)
        assert client.read32(0, 0x40) == 1


def test_hundred_alternations_of_two_clients(running: Running) -> None:
    # nutanix/libvfio-user #733: repeated hot add and remove crashed.
    fd = os.memfd_create("ram")
    os.ftruncate(fd, 0x1000)
    for i in range(100):
        with Client(running.path) as client:
            client.dma_map(0x1000 * (i % 3), 0x1000, fd=fd)
            os.close(client.irq_eventfd(1))
            client.reset()
    os.close(fd)


def test_stop_ends_a_busy_connection(device: SampleDevice, tmp_path: Path) -> None:
    server = Running(device, tmp_path / "s")
    client = Client(server.path)
    server.stop()
    assert not server.path.exists()
    client.close()


def test_stop_before_any_client(device: SampleDevice, tmp_path: Path) -> None:
    Running(device, tmp_path / "s").stop()


def test_sixteen_functions_with_sixteen_clients(tmp_path: Path) -> None:
    # spdk/spdk #1834: three or more VMs crashed the target.
    before = open_fds()
    devices = [SampleDevice() for _ in range(16)]
    servers = [Running(d, tmp_path / f"s{i}") for i, d in enumerate(devices)]
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            with Client(servers[number].path) as client:
                for i in range(50):
                    client.write32(0, 0x40, number * 1000 + i)
                    assert client.read32(0, 0x40) == number * 1000 + i
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.stop()
    for device in devices:
        device.close()
    assert not failures
    assert open_fds() == before


# --- DMA by message -----------------------------------------------------------------------------


def test_dma_inside_a_request_is_refused(running: Running, device: SampleDevice) -> None:
    errors: list[BaseException] = []

    def read(index: int, offset: int, count: int) -> bytes:
        try:
            assert running.server.connection is not None
            running.server.connection.dma_read(0, 4)
        except ConflictError as error:
            errors.append(error)
        return bytes(count)

    device.region_read = read  # type: ignore[method-assign]
    with Client(running.path) as client:
        assert client.read32(0, 0) == 0
    assert errors[0].code == "vfio-user-dma-in-request"  # type: ignore[attr-defined]


def connected(running: Running, results: list[object]) -> None:
    """Ask for DMA after the next request; what comes of it goes to ``results``."""

    def task(connection: Connection) -> None:
        try:
            data = connection.dma_read(0x10000, 200_000)
            connection.dma_write(0x10000 + 200_000, data)
            results.append(data)
        except Exception as error:
            results.append(error)
            raise

    running.server.defer(task)


def test_requests_pipelined_while_dma_is_asked_are_answered_after(
    running: Running, device: SampleDevice
) -> None:
    results: list[object] = []
    chunks: list[int] = []
    memory = bytearray(os.urandom(200_000) + bytes(200_000))
    with Raw(running.path) as raw:
        connected(running, results)
        raw.sock.sendall(RESET + RESET + RESET)
        replies = 0
        while replies < 3 or memory[:200_000] != memory[200_000:]:
            message = raw.hear()
            if message.is_reply:
                replies += 1
                continue
            address, count, data = messages.parse_dma_access(message.body, "DMA")
            chunks.append(count)
            at = address - 0x10000
            head = messages.DMA_ACCESS.pack(address, count)
            if message.command == Command.DMA_READ:
                head += memory[at : at + count]
            else:
                memory[at : at + count] = data
            raw.sock.sendall(encode_reply(message.id, message.command, bytes(head)))
    running.wait_free()
    assert results == [bytes(memory[:200_000])]
    assert max(chunks) <= 64 * 1024
    assert device.resets == 3


@pytest.mark.parametrize(
    "answer",
    [
        lambda m: encode_reply(m.id, m.command, bytes(m.body[:15])),
        lambda m: encode_reply(m.id, m.command, bytes(m.body[:16]) + b"short"),
        lambda m: encode_reply(m.id, m.command, bytes(8) + bytes(m.body[8:16]) + bytes(65536)),
        lambda m: encode_reply(m.id ^ 1, m.command, bytes(16)),
        lambda m: encode_reply(m.id, Command.DMA_WRITE, bytes(16)),
    ],
)
def test_wrong_answer_to_dma_costs_the_connection(running: Running, answer: object) -> None:
    results: list[object] = []
    with Raw(running.path) as raw:
        connected(running, results)
        raw.sock.sendall(RESET)
        assert raw.hear().is_reply
        raw.sock.sendall(answer(raw.hear()))  # type: ignore[operator]
        assert raw.is_closed()
    with Client(running.path) as client:
        client.reset()


def test_client_that_does_not_answer_dma_runs_out_of_time(
    device: SampleDevice, tmp_path: Path
) -> None:
    running = Running(device, tmp_path / "s", reply_s=0.2)
    results: list[object] = []
    with Raw(running.path) as raw:
        connected(running, results)
        raw.sock.sendall(RESET)
        assert raw.hear().is_reply
        assert raw.hear().command == Command.DMA_READ
        assert raw.is_closed()
    assert isinstance(results[0], DeadlineError)
    running.stop()


def test_client_that_floods_instead_of_answering_dma_is_dropped(running: Running) -> None:
    results: list[object] = []
    with Raw(running.path) as raw:
        connected(running, results)
        raw.sock.sendall(RESET)
        assert raw.hear().is_reply
        assert raw.hear().command == Command.DMA_READ
        try:
            for _ in range(5000):
                raw.sock.sendall(RESET)
        except OSError:
            pass
        assert raw.is_closed()
    running.wait_free()
    assert "4096 requests" in str(results[0])


def test_client_that_dies_owing_a_dma_answer(running: Running) -> None:
    results: list[object] = []
    with Raw(running.path) as raw:
        connected(running, results)
        raw.sock.sendall(RESET)
        assert raw.hear().is_reply
    running.wait_free()
    assert isinstance(results[0], OSError)


def test_defer_without_a_client_is_refused(device: SampleDevice, tmp_path: Path) -> None:
    server = Server(device, tmp_path / "s")
    with pytest.raises(ConflictError):
        server.defer(lambda c: None)
    server.stop()
    server.serve_forever()


def test_dma_before_negotiation_is_refused(device: SampleDevice) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, device)
    with pytest.raises(ConflictError):
        connection.dma_write(0, b"x")
    connection.close()
    theirs.close()


