"""holder.sock: a JSON object and a NUL, answered by one (docs/contracts.md section 2).

Standard library only: the holder's.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelvisor.errors import AccelvisorError, UsageError

_CLIENTS = 16
REQUEST_BYTES = 64 * 1024

#: From a request's parameters to those of the reply.
Method = Callable[[Mapping[str, Any]], dict[str, Any]]


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
    """

    def __init__(
        self,
        listener: socket.socket,
        methods: Mapping[str, Method],
        watch: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
    ) -> None:
        self._listener = listener
        self._methods = methods
        self._watch = watch
        self._forget = forget
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        watch(listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= _CLIENTS:
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
                client.sendall(json.dumps(self.answer(request)).encode() + b"\0")
        except OSError:
            data = b""
        if not data or len(buffer) > REQUEST_BYTES:
            self._forget(fd)
            del self._clients[fd]
            client.close()

    def answer(self, raw: bytes) -> dict[str, Any]:
        """The reply to one request's JSON."""
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
            return {"parameters": call(parameters)}
        except AccelvisorError as error:
            return {"error": error.to_dict()}
