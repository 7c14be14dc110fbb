"""Talking to a function process: its ``holder.sock`` and ``control.sock`` (docs/contracts.md, 2).

One JSON object, then NUL, each way; one request per connection (but for a :class:`Link`), so that a
stuck function holds up nothing but the call that waits for it. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from accelvisor.errors import (
    AccelvisorError,
    DeadlineError,
    ProtocolError,
    SystemFailure,
    UnavailableError,
)
from accelvisor.limits import LIMITS


class FunctionFailure(SystemFailure):
    """An error that the function process itself reported; it keeps that error's own code."""


async def call(
    path: Path,
    method: str,
    parameters: Mapping[str, object] | None = None,
    *,
    deadline_s: float = LIMITS.control_reply_s,
) -> dict[str, Any]:
    """One request, one reply.

    Raises:
        UnavailableError: ``function-unreachable``: nobody listens, or it hung up.
        DeadlineError: ``function-deadline``.
        ProtocolError: ``function-reply``: the reply is no JSON object of the agreed form.
        FunctionFailure: the process answered with an error.
    """
    async with _guarded(method, _where(path), deadline_s):
        reader, writer = await _connect(path)
        try:
            return await _exchange(reader, writer, method, parameters, _where(path))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class Link:
    """A connection to a function process that lasts, with one call at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._where = where

    @property
    def open(self) -> bool:
        """Whether the other end has not hung up."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def call(
        self,
        method: str,
        parameters: Mapping[str, object] | None = None,
        *,
        deadline_s: float = LIMITS.control_reply_s,
    ) -> dict[str, Any]:
        """As the function :func:`call`."""
        async with _guarded(method, self._where, deadline_s):
            return await _exchange(self._reader, self._writer, method, parameters, self._where)

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


async def link(path: Path, *, deadline_s: float = LIMITS.control_reply_s) -> Link:
    """Connect. Raises UnavailableError, DeadlineError."""
    async with _guarded("a connection", _where(path), deadline_s):
        return Link(*await _connect(path), _where(path))


def _where(path: Path) -> str:
    return f"function:{path.parent.name}/{path.name}"


@asynccontextmanager
async def _guarded(what: str, where: str, deadline_s: float) -> AsyncIterator[None]:
    """The errors of :func:`call` for what may go wrong on a connection."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineError(
            f"no reply to {what} within {deadline_s:g} s", code="function-deadline", where=where
        ) from None
    except (OSError, asyncio.IncompleteReadError) as error:
        text = getattr(error, "strerror", None) or "it hung up"
        raise UnavailableError(
            f"the function process does not answer {what}: {text}",
            code="function-unreachable",
            where=where,
        ) from error
    except asyncio.LimitOverrunError as error:
        raise ProtocolError("the reply is too long", code="function-reply", where=where) from error


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # The path lies in a directory that the function may write: no link is followed, and what was
    # looked at is what is connected to (a magic link of /proc leads to the very file).
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "not a socket")
        return await asyncio.open_unix_connection(
            f"/proc/self/fd/{fd}", limit=LIMITS.admin_message_bytes
        )
    finally:
        os.close(fd)


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    method: str,
    parameters: Mapping[str, object] | None,
    where: str,
) -> dict[str, Any]:
    request = {"method": method, "parameters": dict(parameters or {})}
    writer.write(json.dumps(request).encode() + b"\0")
    await writer.drain()
    return parse_reply((await reader.readuntil(b"\0"))[:-1], where)


def parse_reply(raw: bytes, where: str) -> dict[str, Any]:
    """The parameters of a reply. Raises ProtocolError, FunctionFailure."""
    try:
        reply = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the reply is not JSON", code="function-reply", where=where) from error
    if isinstance(reply, dict):
        error_object = reply.get("error")
        if isinstance(error_object, dict):
            raise _reported(error_object, where)
        parameters = reply.get("parameters", {})
        if error_object is None and isinstance(parameters, dict):
            return parameters
    raise ProtocolError(
        "the reply has neither parameters nor an error", code="function-reply", where=where
    )


def _reported(fields: Mapping[str, object], where: str) -> AccelvisorError:
    def text(name: str, default: str) -> str:
        value = fields.get(name)
        return value if isinstance(value, str) and value else default

    return FunctionFailure(
        text("message", "the function process failed"),
        code=text("code", "function-failed"),
        where=text("where", where),
        hint=text("hint", ""),
    )


async def wait_ready(path: Path, *, deadline_s: float, interval_s: float = 0.004) -> dict[str, Any]:
    """Ask ``status`` until it says ``"ready": true``; one that does not listen yet is waited for.

    Returns:
        the status.

    Raises:
        DeadlineError: ``function-not-ready``, with the last cause.
        FunctionFailure, ProtocolError: at once; waiting mends neither.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    cause = "it never answered"
    while True:
        left = end - loop.time()
        if left <= 0:
            raise DeadlineError(
                f"the function process was not ready within {deadline_s:g} s: {cause}",
                code="function-not-ready",
                where=f"function:{path.parent.name}",
                hint="its log says why (journalctl -u accelvisor-function@UUID, or the file log)",
            )
        try:
            status = await call(path, "status", deadline_s=min(left, LIMITS.control_reply_s))
            if status.get("ready") is True:
                return status
            cause = "it answers, and says that it is not ready"
        except UnavailableError as error:
            cause = error.message
        except DeadlineError as error:
            # Our own end cut the last call short: what was seen before says more.
            cause = cause if loop.time() >= end else error.message
        await asyncio.sleep(interval_s)
