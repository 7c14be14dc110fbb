"""Moves the messages of :mod:`joining` over TLS: each has its length, two bytes, before it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import struct
import time
from collections.abc import Awaitable, Callable

import msgspec

from accelvisor.errors import AccelvisorError, PermissionDenied, ProtocolError, UnavailableError
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration.joining import Card, Code, Invitation, Inviter, Joiner
from accelvisor.migration.link import JOIN, dial, unreachable
from accelvisor.migration.listener import Join
from accelvisor.migration.tls import Credentials, refusal

_LENGTH = struct.Struct(">H")
#: Learns whom to trust; done before the other side is told, so that neither knows a host that
#: does not know it.
Learn = Callable[[Card], Awaitable[None]]
#: Looks whether it would; raises why not.
Look = Callable[[Card], None]


def answering(
    invitation: Invitation,
    credentials: Credentials,
    learn: Learn,
    *,
    name: str = "",
    address: str = "",
    entropy: Callable[[int], bytes] = os.urandom,
    now_s: Callable[[], float] = time.time,
) -> Join:
    """For ``Listener.join`` while ``invitation`` is open: A's side of each connection.

    A card whose address has no host gets the one that the connection came from.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inviter = Inviter(
            invitation, credentials.identity, entropy=entropy, now_s=now_s(),
            name=name, address=address,
        )  # fmt: skip
        await _write(writer, inviter.challenge(await _read(reader)))
        welcome, card = inviter.welcome(await _read(reader))
        if card.address.startswith(":"):
            here = writer.get_extra_info("peername")[0]
            card = msgspec.structs.replace(card, address=f"{_bracketed(here)}{card.address}")
        await learn(card)
        await _write(writer, welcome)

    return answer


async def join(
    code: Code,
    credentials: Credentials,
    learn: Learn,
    *,
    look: Look = lambda card: None,
    name: str = "",
    address: str = "",
    entropy: Callable[[int], bytes] = os.urandom,
    now_s: Callable[[], float] = time.time,
    limits: Limits = LIMITS,
) -> Card:
    """B's side: the host that made ``code``, after :func:`learn` was told of it.

    Args:
        look: asked before the other host hears that we have the code, and trusts us.

    Raises:
        what ``look`` and ``learn`` raise.
        PermissionDenied: ``join-fingerprint``, ``join-refused``.
        UnavailableError: ``peer-unreachable``.
        ProtocolError: ``join-message``, ``peer-tls``.
    """
    there = (code.address, code.port)
    sock = await dial(there, JOIN, limits.peer_handshake_s)
    try:
        async with asyncio.timeout(2 * limits.peer_handshake_s):
            reader, writer = await asyncio.open_connection(
                sock=sock,
                ssl=credentials.context(server=False, anybody=True),
                server_hostname="",
                limit=limits.peer_hello_bytes,
            )
            try:
                about = name, address
                card = await _talk(code, credentials, reader, writer, entropy, now_s(), about, look)
            finally:
                writer.close()
                with contextlib.suppress(OSError, ssl.SSLError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise unreachable(there, error) from error
    except OSError as error:
        sock.close()
        raise refusal(error, f"{code.address} port {code.port}") from error
    await learn(card)
    return card


async def _talk(
    code: Code,
    credentials: Credentials,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    entropy: Callable[[int], bytes],
    now_s: float,
    about: tuple[str, str],
    look: Look,
) -> Card:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    joiner = Joiner(
        code,
        credentials.host,
        credentials.identity,
        server_key=credentials.peer_key(tls.getpeercert(binary_form=True)),
        entropy=entropy,
        now_s=now_s,
        name=about[0],
        address=about[1],
    )
    try:
        await _write(writer, joiner.hello())
        proof = joiner.proof(await _read(reader))
        look(joiner.other)
        await _write(writer, proof)
        return joiner.finish(await _read(reader))
    except UnavailableError as error:
        # It hangs up on whoever it refuses.
        raise PermissionDenied(
            "the other host refused to let this one join",
            code="join-refused",
            where="join",
            hint="accelctl events there says why; if this host was removed there or its key"
            " revoked, give it new keys first: accelctl trust rotate; if it is trusted there with"
            " other keys, make the code with accelctl trust invite --again",
        ) from error


def _bracketed(host: str) -> str:
    """An IPv6 address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > LIMITS.peer_hello_bytes:
            raise ProtocolError(f"{length} bytes are too many", code="join-message", where="join")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise _gone(error) from error


async def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    try:
        writer.write(_LENGTH.pack(len(message)) + message)
        await writer.drain()
    except OSError as error:
        raise _gone(error) from error


def _gone(error: Exception) -> AccelvisorError:
    return UnavailableError(f"the other host hung up: {error}", code="peer-lost", where="join")
