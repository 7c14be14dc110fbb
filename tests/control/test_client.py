"""The client against servers that misbehave: each is an error with a code, never a hang."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelvisor import errors
from accelvisor.control.client import AdminClient, RemoteError, to_error
from accelvisor.control.codec import Reply


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """One connection, given to ``answer`` in a thread."""
    with tempfile.TemporaryDirectory(prefix="acv-") as directory:
        path = str(Path(directory) / "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield path
            finally:
                thread.join(10)


def replying(*raw: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in raw:
            connection.sendall(piece)

    return answer


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "daemon-unreachable"),
        (b'{"parameters": {}}', "daemon-unreachable"),
        (b"nonsense\0", "message-syntax"),
        (b'{"parameters": 3}\0', "reply-malformed"),
        (b'{"parameters": {}, "continues": true}\0', "reply-malformed"),
        (b'{"method": "io.accelvisor.Admin.Event"}\0', "reply-malformed"),
        (b'{"error": "io.accelvisor.Admin.Future", "parameters": {"code": "new"}}\0', "new"),
        (b'{"error": "a.b.C", "parameters": {"x": "y"}}\0', "remote-error"),
        (b'{"error": "org.varlink.service.PermissionDenied"}\0', "permission-denied"),
    ],
)
def test_wrong_replies(raw: bytes, code: str) -> None:
    with (
        server(replying(raw)) as path,
        AdminClient(path) as client,
        pytest.raises(errors.AccelvisorError) as caught,
    ):
        client.call("GetHost")
    assert caught.value.code == code


def test_a_reply_before_the_call_is_not_taken_for_its_reply() -> None:
    """A11: event before greeting, event taken for a reply."""
    with (
        server(replying(b'{"parameters": {"a": 1}}\0{"parameters": {"b": 2}}\0')) as path,
        AdminClient(path) as client,
    ):
        assert client.call("GetHost") == {"a": 1}
        with pytest.raises(errors.ProtocolError) as caught:
            client.call("GetHost")
    assert caught.value.code == "reply-malformed"


def test_a_server_that_hung_up_with_a_reason_is_heard() -> None:
    """A full server says so and closes before it has read the call."""
    busy = (
        b'{"error": "io.accelvisor.Admin.Unavailable", "parameters": {"code":'
        b' "too-many-clients", "message": "m", "where": "", "hint": ""}}\0'
    )

    def answer(connection: socket.socket) -> None:
        connection.sendall(busy)

    closed = threading.Event()

    def hang_up(connection: socket.socket) -> None:
        answer(connection)
        connection.close()
        closed.set()

    with server(hang_up) as path, AdminClient(path) as client:
        assert closed.wait(10)
        with pytest.raises(errors.UnavailableError) as caught:
            client.call("GetHost")
    assert caught.value.code == "too-many-clients"


def test_nobody_there() -> None:
    with pytest.raises(errors.UnavailableError) as caught:
        AdminClient("/nowhere/admin")
    assert caught.value.code == "daemon-unreachable"
    assert caught.value.hint


def test_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(errors.PermissionDenied) as caught:
        AdminClient("/run/accelvisor/admin")
    assert caught.value.code == "socket-permission"


def test_a_server_that_does_not_accept_has_a_deadline() -> None:
    """A19: connect and first-byte deadlines."""
    with tempfile.TemporaryDirectory(prefix="acv-") as directory:
        path = str(Path(directory) / "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(0)
            # The backlog takes one; who comes after it must not wait for ever.
            with AdminClient(path), pytest.raises(errors.UnavailableError):
                AdminClient(path, connect_s=0.05)


def test_none_is_not_sent() -> None:
    seen: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        seen.append(connection.recv(65536))
        connection.sendall(b'{"parameters": {}}\0')

    with server(answer) as path, AdminClient(path) as client:
        client.call("CreateFunction", {"profile": "small", "name": None})
    assert seen == [
        b'{"method":"io.accelvisor.Admin.CreateFunction","parameters":{"profile":"small"}}\0'
    ]


def test_an_unknown_error_keeps_its_fields() -> None:
    reply = Reply(
        {"code": "c", "message": "m", "where": "w", "hint": "h"}, "io.accelvisor.Admin.New"
    )
    error = to_error(reply)
    assert type(error) is RemoteError
    assert error.to_dict() == {"code": "c", "message": "m", "where": "w", "hint": "h"}
