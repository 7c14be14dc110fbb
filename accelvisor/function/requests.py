"""holder.sock: a JSON object and a NUL, answered by one (docs/contracts.md section 2).

Standard library only: the holder's.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from accelvisor.errors import AccelvisorError, SystemFailure, UsageError

_CLIENTS = 16
REQUEST_BYTES = 64 * 1024


class Answer(NamedTuple):
    """A reply's parameters, and descriptors that go with it and are closed then."""

    parameters: dict[str, Any]
    fds: list[int]


#: From a request's parameters to those of the reply; None: it comes later (:meth:`Requests.wake`).
Method = Callable[[Mapping[str, Any]], "dict[str, Any] | Answer | None"]


def allowed(client: socket.socket, keeper: int) -> bool:
    """Whether a client may give orders: root, and the user ``keeper``. Functions share a user that
    is neither, and must not reach each other's memory.
    """
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (0, keeper)


def reply(client: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send a reply with its descriptors, which are closed. Raises OSError."""
    try:
        if fds:
            data = data[socket.send_fds(client, [data], fds) :]
        client.sendall(data)
    finally:
        for fd in fds:
            os.close(fd)


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def taken(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete requests out of ``buffer``, without their NUL."""
    while (end := buffer.find(0)) >= 0:
        request = bytes(buffer[:end])
        del buffer[: end + 1]
        yield request


class Requests:
    """Serves a listening socket inside somebody else's poll loop.

    Args:
        listener: not blocking.
        methods: what can be asked; each may raise an AccelvisorError.
        watch: calls back when a descriptor is readable.
        forget: stops that.
        keeper: the user that may ask, beside root.
    """

    def __init__(
        self,
        listener: socket.socket,
        methods: Mapping[str, Method],
        watch: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
        keeper: int,
    ) -> None:
        self._listener = listener
        self._methods = methods
        self._watch = watch
        self._forget = forget
        self._keeper = keeper
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._waiting: set[int] = set()
        watch(listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= _CLIENTS or not allowed(client, self._keeper):
            client.close()
            return
        client.setblocking(False)
        fd = client.fileno()
        self._clients[fd] = (client, bytearray())
        self._watch(fd, lambda: self._receive(fd))

    def _receive(self, fd: int) -> None:
        client, buffer = self._clients[fd]
        try:
            data = client.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer += data
        try:
            for request in taken(buffer) if data else ():
                # Answers are small: a client whose socket is full does not read, and is dropped.
                answer, fds = self.answer(request)
                if answer is None:
                    self._waiting.add(fd)
                else:
                    reply(client, json.dumps(answer).encode() + b"\0", fds)
        except OSError:
            data = b""
        if not data or len(buffer) > REQUEST_BYTES:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._forget(fd)
        self._waiting.discard(fd)
        self._clients.pop(fd)[0].close()

    def wake(self, parameters: Mapping[str, Any]) -> None:
        """Answer everybody who waits."""
        waiting, self._waiting = self._waiting, set()
        for fd in waiting:
            try:
                text = json.dumps({"parameters": dict(parameters)})
                reply(self._clients[fd][0], text.encode() + b"\0", [])
            except OSError:
                self._drop(fd)

    def answer(self, raw: bytes) -> tuple[dict[str, Any] | None, list[int]]:
        """The reply to one request's JSON, None for one that comes later; and its descriptors."""
        try:
            try:
                request = json.loads(raw)
                call = self._methods[request["method"]]
                parameters = dict(request.get("parameters") or {})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UsageError(
                    f"not a request: {error}",
                    where="holder",
                    hint="methods: " + ", ".join(self._methods),
                ) from error
            found = call(parameters)
            if found is None:
                return None, []
            answer = found if isinstance(found, Answer) else Answer(found, [])
            return {"parameters": answer.parameters}, answer.fds
        except OSError as error:
            # Not the client's socket, so it has to hear of it.
            return {"error": SystemFailure(str(error), where="holder").to_dict()}, []
        except AccelvisorError as error:
            return {"error": error.to_dict()}, []
