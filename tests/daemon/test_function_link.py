from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from accelvisor.daemon.function_link import FunctionFailure, call, wait_ready
from accelvisor.errors import AccelvisorError, DeadlineError, ProtocolError, UnavailableError
from accelvisor.limits import LIMITS

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def talk(path: Path, handler: Handler, client: Callable[[], Awaitable[Any]]) -> Any:
    """Serve ``handler`` at ``path`` while ``client`` runs."""

    async def scenario() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(await reader.readuntil(b"\0"), writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_unix_server(serve, str(path))
        try:
            return await client()
        finally:
            server.close()
            await server.wait_closed()

    return asyncio.run(scenario())


def replying(raw: bytes) -> Handler:
    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return handler


def test_a_request_as_agreed(short_path: Path) -> None:
    seen: list[Any] = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(json.loads(request[:-1]))
        writer.write(b'{"parameters": {"ready": true}}\0')

    path = short_path / "s"
    assert talk(path, handler, lambda: call(path, "status", {"a": 1})) == {"ready": True}
    assert seen == [{"method": "status", "parameters": {"a": 1}}]


@pytest.mark.parametrize(
    ("raw", "kind", "code"),
    [
        (b"", UnavailableError, "function-unreachable"),
        (b'{"parameters": {}}', UnavailableError, "function-unreachable"),  # no NUL
        (b"nonsense\0", ProtocolError, "function-reply"),
        (b"[" * 100_000 + b"\0", ProtocolError, "function-reply"),
        (b"[]\0", ProtocolError, "function-reply"),
        (b'{"parameters": 3}\0', ProtocolError, "function-reply"),
        (b'{"error": "text"}\0', ProtocolError, "function-reply"),
        (b"x" * (LIMITS.admin_message_bytes + 2), ProtocolError, "function-reply"),
        (b'{"error": {"code": "no-memory", "message": "m"}}\0', FunctionFailure, "no-memory"),
        (b'{"error": {"code": 3}}\0', FunctionFailure, "function-failed"),
    ],
)
def test_wrong_replies(
    short_path: Path, raw: bytes, kind: type[AccelvisorError], code: str
) -> None:
    path = short_path / "s"
    with pytest.raises(kind) as caught:
        talk(path, replying(raw), lambda: call(path, "status"))
    assert caught.value.code == code


def test_a_silent_process_has_a_deadline(short_path: Path) -> None:
    async def silent(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)

    path = short_path / "s"
    with pytest.raises(DeadlineError) as caught:
        talk(path, silent, lambda: call(path, "status", deadline_s=0.05))
    assert caught.value.code == "function-deadline"


def test_nobody_listens(short_path: Path) -> None:
    with pytest.raises(UnavailableError):
        asyncio.run(call(short_path / "s", "status"))


def test_waiting_until_it_is_ready(short_path: Path) -> None:
    answers = [False, False, True]

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        ready = answers.pop(0)
        writer.write(json.dumps({"parameters": {"ready": ready}}).encode() + b"\0")

    path = short_path / "s"
    assert talk(path, handler, lambda: wait_ready(path, deadline_s=5)) == {"ready": True}
    assert answers == []


def test_never_ready_tells_the_last_cause(short_path: Path) -> None:
    path = short_path / "s"
    with pytest.raises(DeadlineError, match=r"within 0\.05 s: .*says that it is not ready"):
        talk(
            path,
            replying(b'{"parameters": {"ready": 1}}\0'),
            lambda: wait_ready(path, deadline_s=0.05),
        )
    with pytest.raises(DeadlineError, match="No such file"):
        asyncio.run(wait_ready(short_path / "none", deadline_s=0.05))
