"""Orders to a function process that take or bring descriptors (docs/contracts.md, 8).

asyncio's streams do not carry descriptors, so each order is one blocking exchange, with a deadline,
in a thread of its own. What a function answers is not believed further than its form.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelvisor.daemon.function_link import parse_reply
from accelvisor.daemon.paths import Paths
from accelvisor.errors import DeadlineError, ProtocolError, UnavailableError
from accelvisor.limits import LIMITS

_MOST_FDS = 8


class Given(dict[str, Any]):
    """A reply's parameters; ``fds`` came with them and are the caller's to close."""

    fds: list[int]

    def __init__(self, parameters: Mapping[str, Any], fds: list[int]) -> None:
        super().__init__(parameters)
        self.fds = fds

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


async def order(
    path: Path,
    method: str,
    parameters: Mapping[str, object] | None = None,
    fds: Sequence[int] = (),
    *,
    expected: int = 0,
    deadline_s: float = LIMITS.control_reply_s,
) -> Given:
    """One request with ``fds``; the reply must bring ``expected`` descriptors.

    Raises:
        as :func:`accelvisor.daemon.function_link.call`.
    """
    return await asyncio.to_thread(ask, path, method, parameters, fds, expected, deadline_s)


async def control(
    paths: Paths,
    uuid: str,
    method: str,
    parameters: Mapping[str, object] | None = None,
    fds: Sequence[int] = (),
    *,
    expected: int = 0,
    deadline_s: float = LIMITS.control_reply_s,
) -> Given:
    """As :func:`order`, to the worker of the function ``uuid``."""
    path = paths.function(uuid).control_socket
    return await order(path, method, parameters, fds, expected=expected, deadline_s=deadline_s)


def ask(
    path: Path,
    method: str,
    parameters: Mapping[str, object] | None,
    fds: Sequence[int],
    expected: int,
    deadline_s: float,
) -> Given:
    """As :func:`order`, blocking."""
    where = f"function:{path.parent.name}/{path.name}"
    given: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(deadline_s)
            _connect(sock, path)
            request = json.dumps({"method": method, "parameters": dict(parameters or {})})
            socket.send_fds(sock, [request.encode() + b"\0"], list(fds))
            raw = _receive(sock, given, where)
        reply = parse_reply(raw, where)
        if len(given) != expected:
            raise ProtocolError(
                f"the reply to {method} brings {len(given)} descriptors, not {expected}",
                code="function-reply",
                where=where,
            )
    except TimeoutError:
        _close(given)
        raise DeadlineError(
            f"no reply to {method} within {deadline_s:g} s", code="function-deadline", where=where
        ) from None
    except OSError as error:
        _close(given)
        raise UnavailableError(
            f"the function process does not answer {method}: {error.strerror or error}",
            code="function-unreachable",
            where=where,
        ) from error
    except BaseException:
        _close(given)
        raise
    return Given(reply, given)


def _connect(sock: socket.socket, path: Path) -> None:
    # As function_link: the path lies in a directory that the function may write.
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ConnectionRefusedError(0, "not a socket")
        sock.connect(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _receive(sock: socket.socket, given: list[int], where: str) -> bytes:
    raw = bytearray()
    while not raw.endswith(b"\0"):
        data, fds, _, _ = socket.recv_fds(sock, 65536, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        given += fds
        raw += data
        if not data:
            raise ConnectionResetError(0, "it hung up")
        if len(raw) > LIMITS.admin_message_bytes or len(given) > _MOST_FDS:
            raise ProtocolError("the reply is too long", code="function-reply", where=where)
    return bytes(raw[:-1])


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
