"""The monitor client against a scripted server, which QEMU's own Python library vouches for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from qemu.qmp import QMPClient

from accelvisor.errors import AccelvisorError, DeadlineError, ProtocolError, UnavailableError
from accelvisor.hypervisor.monitor import Monitor, MonitorError
from tests.hypervisor.test_qmp import GREETING, STOP, line

Answer = Callable[[dict[str, object]], bytes]


def answer(request: dict[str, object]) -> bytes:
    """What QEMU answers to a few commands."""
    known: dict[object, object] = {
        "qmp_capabilities": {},
        "query-status": {"status": "running", "running": True},
    }
    name = request["execute"]
    echo = {"id": request["id"]} if "id" in request else {}
    if name == "quit":
        return b""
    if name in known:
        # qemu.qmp negotiates without an id, and is not prepared for an event so early.
        return (STOP if echo else b"") + line({"return": known[name], **echo})
    error = {"class": "CommandNotFound", "desc": f"The command {name} has not been found"}
    return line({"error": error, **echo})


def _requests(client: socket.socket) -> Iterator[dict[str, object]]:
    """JSON objects one after the other; QEMU does not ask for line ends between them."""
    text = ""
    while data := client.recv(65536):
        text += data.decode()
        while text.strip():
            try:
                request, end = json.JSONDecoder().raw_decode(text.lstrip())
            except ValueError:
                break
            text = text.lstrip()[end:]
            yield request


class Server:
    """Serves one client after the other: greets, then answers command by command."""

    def __init__(self, path: Path, greeting: bytes = GREETING, reply: Answer = answer) -> None:
        self.path = str(path)
        self._greeting, self._reply = greeting, reply
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen()
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._client = client
            # A client under test may hang up at any moment.
            with client, suppress(OSError):
                client.sendall(self._greeting)
                for request in _requests(client):
                    reply = self._reply(request)
                    if not reply:
                        break
                    client.sendall(reply)

    def close(self) -> None:
        for end in (self._socket, self._client):
            if end is not None:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                end.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**arguments: object) -> Server:
        servers.append(Server(tmp_path / "m", **arguments))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_commands_are_answered(serve: Callable[..., Server]) -> None:
    with Monitor(serve().path) as monitor:
        assert monitor.version == (11, 1, 3)
        assert monitor.execute("query-status") == {"status": "running", "running": True}


def test_qemus_own_client_takes_the_scripted_server_for_qemu(
    serve: Callable[..., Server],
) -> None:
    async def talk(path: str) -> object:
        client = QMPClient("test")
        await client.connect(path)
        try:
            return await client.execute("query-status")
        finally:
            await client.disconnect()

    assert asyncio.run(talk(serve().path)) == {"status": "running", "running": True}


def test_events_wait_until_they_are_collected(serve: Callable[..., Server]) -> None:
    with Monitor(serve().path) as monitor:
        monitor.execute("query-status")
        for _ in range(2):  # one came with each reply
            assert monitor.wait_event(lambda e: e.name == "STOP", deadline_s=5).name == "STOP"
        with pytest.raises(DeadlineError):
            monitor.wait_event(lambda e: True, deadline_s=0.05)


def test_an_unwanted_event_stays_for_another_waiter(serve: Callable[..., Server]) -> None:
    with Monitor(serve().path) as monitor:
        with pytest.raises(DeadlineError):
            monitor.wait_event(lambda e: e.name == "RESUME", deadline_s=0.05)
        assert monitor.wait_event(lambda e: e.name == "STOP", deadline_s=5)


def test_a_refusal_carries_qemus_class_and_the_monitor_goes_on(
    serve: Callable[..., Server],
) -> None:
    with Monitor(serve().path) as monitor:
        with pytest.raises(MonitorError, match="has not been found") as caught:
            monitor.execute("no-such")
        assert (caught.value.error_class, caught.value.code) == (
            "CommandNotFound",
            "monitor-failed",
        )
        assert monitor.execute("query-status")


def test_a_qemu_that_ends_is_told_apart_from_a_slow_one(serve: Callable[..., Server]) -> None:
    with Monitor(serve().path) as monitor, pytest.raises(UnavailableError) as caught:
        monitor.execute("quit")
    assert caught.value.code == "monitor-closed"


def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        Monitor(str(tmp_path / "none"))
    assert caught.value.code == "monitor-unavailable"


def test_a_busy_monitor_meets_the_deadline(serve: Callable[..., Server]) -> None:
    with pytest.raises(DeadlineError) as caught:
        Monitor(serve(greeting=b"").path, deadline_s=0.05)
    assert caught.value.code == "monitor-deadline"


def test_a_late_reply_is_not_taken_for_the_next_one(serve: Callable[..., Server]) -> None:
    held: list[bytes] = []

    def slow(request: dict[str, object]) -> bytes:
        if request["execute"] == "slow":
            held.append(line({"return": "late", "id": request["id"]}))
            return STOP
        return (held.pop() if held else b"") + answer(request)

    with Monitor(serve(reply=slow).path) as monitor:
        with pytest.raises(DeadlineError):
            monitor.execute("slow", deadline_s=0.05)
        assert monitor.execute("query-status") == {"status": "running", "running": True}


@pytest.mark.parametrize("greeting", [GREETING + GREETING, b"SSH-2.0\r\n"])
def test_what_is_no_monitor_is_a_protocol_error(
    serve: Callable[..., Server], greeting: bytes
) -> None:
    with pytest.raises(ProtocolError):
        Monitor(serve(greeting=greeting).path)


def test_a_flood_of_events_keeps_the_newest(serve: Callable[..., Server]) -> None:
    flood = b"".join(line({"event": f"E{n}"}) for n in range(3000))
    with Monitor(serve(greeting=flood + GREETING).path) as monitor:
        assert monitor.wait_event(lambda e: e.name == "E2999", deadline_s=5)
        assert isinstance(_failure(lambda: monitor.execute("x")), AccelvisorError)


def _failure(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except AccelvisorError as error:
        return error
    return None
