"""Control links and the listener, over loopback with real TLS."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    NotFoundError,
    PermissionDenied,
    UnavailableError,
)
from accelvisor.limits import LIMITS, Limits
from accelvisor.migration.channel import Channel
from accelvisor.migration.framing import HEADER, MAGIC, Frame, Hello, Type
from accelvisor.migration.link import (
    BULK,
    CONTROL,
    Address,
    Handler,
    PeerLink,
    PersistentLink,
    connect,
)
from accelvisor.migration.listener import Admission, Deposit, Listener, open_channel
from accelvisor.migration.tickets import Tickets
from accelvisor.migration.tls import Credentials, Pins
from tests.migration.hosts import STRANGER, A, B

DEADLINE_S = 20.0


@dataclass
class Served:
    """Host B with an open port."""

    listener: Listener
    credentials: Credentials
    address: Address
    tickets: Tickets[Deposit]
    notices: list[bytes] = field(default_factory=list)


async def answer(link: PeerLink, payload: bytes) -> bytes:
    match payload:
        case b"missing":
            raise NotFoundError("it is not here", code="function-not-found")
        case b"bug":
            raise RuntimeError("secret detail")
        case b"never":
            await asyncio.Event().wait()
    return str(link.host).encode() + b" " + payload


@asynccontextmanager
async def serving(
    request: Callable[[PeerLink, bytes], Awaitable[bytes]] = answer,
    limits: Limits = LIMITS,
    port: int = 0,
) -> AsyncIterator[Served]:
    sock = socket.create_server(("127.0.0.1", port))
    credentials = B.trusting(A.pin)
    tickets: Tickets[Deposit] = Tickets(os.urandom)
    notices: list[bytes] = []
    handler = Handler(request, lambda _, payload: notices.append(payload), ("zstd", "later"))
    listener = Listener(sock, credentials, handler, tickets=tickets, limits=limits)
    address: Address = sock.getsockname()
    await listener.start()
    try:
        yield Served(listener, credentials, address, tickets, notices)
    finally:
        await listener.stop()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def code_of(awaitable: Awaitable[object]) -> str:
    with pytest.raises(AccelvisorError) as caught:
        await awaitable
    return caught.value.code


def test_questions_and_answers_both_ways() -> None:
    async def test() -> None:
        back: list[bytes] = []

        async def ask_back(link: PeerLink, payload: bytes) -> bytes:
            back.append(await link.request(b"you?", deadline_s=DEADLINE_S))
            return payload.upper()

        async with serving(ask_back) as b:
            handler = Handler(answer, features=("zstd",))
            link = await connect(b.address, B.uuid, A.trusting(B.pin), handler)
            assert await link.request(b"hello", deadline_s=DEADLINE_S) == b"HELLO"
            assert back == [str(B.uuid).encode() + b" you?"]
            assert link.agreed.version == 1
            assert link.agreed.features == {"zstd"}
            link.notify(b"by the way")
            await until(lambda: b.notices == [b"by the way"])
            await link.close()
            await until(lambda: not b.listener.links)

    run(test())


def test_messages_larger_than_a_window_come_in_pieces() -> None:
    async def test() -> None:
        async with serving() as b:
            link = await connect(b.address, B.uuid, A.trusting(B.pin))
            big = bytes(LIMITS.peer_frame_bytes - 100)
            answers = await asyncio.gather(
                *(link.request(big, deadline_s=DEADLINE_S) for _ in range(6))
            )
            assert [len(each) for each in answers] == [len(big) + 37] * 6
            await link.close()

    run(test())


def test_errors_of_the_handler_arrive_and_bugs_tell_nothing() -> None:
    async def test() -> None:
        async with serving() as b:
            link = await connect(b.address, B.uuid, A.trusting(B.pin))
            with pytest.raises(NotFoundError) as caught:
                await link.request(b"missing", deadline_s=DEADLINE_S)
            assert caught.value.code == "function-not-found"
            with pytest.raises(AccelvisorError) as bug:
                await link.request(b"bug", deadline_s=DEADLINE_S)
            assert bug.value.code == "internal"
            assert "secret" not in str(bug.value)
            assert await code_of(link.request(b"never", deadline_s=0.01)) == "peer-deadline"
            assert await link.request(b"still", deadline_s=DEADLINE_S)
            await link.close()
            assert await code_of(link.request(b"gone", deadline_s=DEADLINE_S)) == "peer-lost"

    run(test())


def test_a_side_without_a_handler_takes_no_requests() -> None:
    async def test() -> None:
        codes: list[str] = []

        async def ask_back(link: PeerLink, payload: bytes) -> bytes:
            codes.append(await code_of(link.request(b"?", deadline_s=DEADLINE_S)))
            return b""

        async with serving(ask_back) as b:
            link = await connect(b.address, B.uuid, A.trusting(B.pin))
            await link.request(b"", deadline_s=DEADLINE_S)
            assert codes == ["peer-request"]
            await link.close()

    run(test())


def test_hosts_that_may_not_are_refused() -> None:
    async def test() -> None:
        async with serving() as b:
            trusting = A.trusting(B.pin)
            assert await code_of(connect(b.address, STRANGER.uuid, trusting)) == "peer-wrong-host"
            assert await code_of(connect(b.address, B.uuid, A.trusting())) == "peer-unknown"
            assert await code_of(connect(b.address, B.uuid, A.trusting(B.revoked))) == (
                "peer-revoked"
            )
            stranger = connect(b.address, B.uuid, STRANGER.trusting(B.pin))
            assert await code_of(stranger) in ("peer-refused", "peer-lost")
            b.credentials.trust(Pins([A.revoked]))
            assert await code_of(connect(b.address, B.uuid, trusting)) == "peer-revoked"
            await until(lambda: not b.listener.connections)

    run(test())


def test_revoked_while_connected_is_told_and_cut() -> None:
    async def test() -> None:
        async with serving() as b:
            link = await connect(b.address, B.uuid, A.trusting(B.pin))
            waiting = asyncio.ensure_future(link.request(b"never", deadline_s=DEADLINE_S))
            await link.request(b"1", deadline_s=DEADLINE_S)
            b.credentials.trust(Pins([A.revoked]))
            assert await code_of(waiting) == "peer-revoked"
            assert (await link.closed).code == "peer-revoked"

    run(test())


def test_nobody_there() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            address = sock.getsockname()
        assert await code_of(connect(address, B.uuid, A.trusting(B.pin))) == "peer-unreachable"

    run(test())


async def tls_stream(
    address: Address, credentials: Credentials
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A trusted host that does not keep to the rules."""
    sock = socket.create_connection(address)
    sock.sendall(CONTROL)
    return await asyncio.open_connection(
        sock=sock, ssl=credentials.context(server=False), server_hostname=""
    )


async def last_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    raw, kind, payload = await reader.read(), 0, b""
    while raw:
        _, kind, _, length, _ = HEADER.unpack_from(raw)
        payload, raw = raw[HEADER.size : HEADER.size + length], raw[HEADER.size + length :]
    return kind, payload


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (HEADER.pack(MAGIC, Type.NOTICE, 0, LIMITS.peer_frame_bytes + 1, 0), b"peer-frame-long"),
        (b"\xff" * 100, b"peer-frame"),
        (Frame(Type.RESPONSE, b"", 5).pack(), b"peer-exchange"),
    ],
)
def test_a_trusted_host_that_breaks_a_rule_is_told_and_hung_up_on(raw: bytes, code: bytes) -> None:
    async def test() -> None:
        async with serving() as b:
            reader, writer = await tls_stream(b.address, A.trusting(B.pin))
            hello = Hello(lowest=1, highest=1, host=A.uuid)
            writer.write(Frame(Type.HELLO, hello.pack()).pack() + raw)
            kind, payload = await last_frame(reader)
            assert kind == Type.CLOSE
            assert code in payload
            writer.close()

    run(test())


def test_a_greeting_in_another_hosts_name_is_refused() -> None:
    async def test() -> None:
        async with serving() as b:
            reader, writer = await tls_stream(b.address, A.trusting(B.pin))
            hello = Hello(lowest=1, highest=1, host=STRANGER.uuid)
            writer.write(Frame(Type.HELLO, hello.pack()).pack())
            assert b"peer-wrong-host" in (await last_frame(reader))[1]
            writer.close()

    run(test())


HURRIED = replace(LIMITS, peer_handshake_s=0.1)


def test_whoever_does_not_hurry_is_hung_up_on() -> None:
    """Nothing, half a preamble, a preamble without TLS, TLS without a greeting."""

    async def test() -> None:
        async with serving(limits=HURRIED) as b:
            for said in (b"", CONTROL[:5], CONTROL, BULK[:7]):
                reader, writer = await asyncio.open_connection(*b.address)
                writer.write(said)
                assert await reader.read() == b""
                writer.close()
            reader, writer = await tls_stream(b.address, A.trusting(B.pin))
            kind, payload = await last_frame(reader)
            assert kind == Type.CLOSE
            assert b"peer-deadline" in payload
            writer.close()
            await until(lambda: not b.listener.connections)

    run(test())


@pytest.mark.parametrize("said", [b"GET / HT", b"AVPEER\x00J", b"AVPEER\x00?"])
def test_whoever_wants_what_is_not_offered_is_hung_up_on(said: bytes) -> None:
    async def test() -> None:
        async with serving() as b:
            reader, writer = await asyncio.open_connection(*b.address)
            writer.write(said)
            assert await reader.read() == b""
            writer.close()

    run(test())


def test_one_address_may_not_take_all_connections() -> None:
    async def test() -> None:
        few = replace(LIMITS, peer_strangers=2)
        async with serving(limits=few) as b:
            held = [await asyncio.open_connection(*b.address) for _ in range(2)]
            await until(lambda: b.listener.connections == 2)
            reader, writer = await asyncio.open_connection(*b.address)
            assert await reader.read() == b""
            writer.close()
            for _, other in held:
                other.close()
            await until(lambda: not b.listener.connections)
            link = await connect(b.address, B.uuid, A.trusting(B.pin))
            await link.close()

    run(test())


def test_admission_by_rate_and_number() -> None:
    admission = Admission(replace(LIMITS, peer_connections=30, peer_connects_per_s=5.0))

    def refused(address: str, now: float) -> bool:
        try:
            admission.enter(address, now)
        except CapacityError as error:
            return error.code == "peer-busy"
        admission.known(address)
        return False

    assert [refused("a", 0.0) for _ in range(11)] == [False] * 10 + [True]
    assert not refused("b", 0.0)
    assert not refused("a", 0.3)
    while not refused("c", 10.0 + admission.connections):
        pass
    assert admission.connections == 30
    admission.leave()
    assert not refused("d", 100.0)


# --- bulk connections ----------------------------------------------------------------------------


def test_a_ticket_leads_a_connection_to_its_transfer_once() -> None:
    async def test() -> None:
        async with serving() as b:
            came: list[Channel] = []
            ticket = b.tickets.issue(A.uuid, came.append, asyncio.get_running_loop().time())
            trusting = A.trusting(B.pin)
            near = await open_channel(b.address, ticket, B.uuid, trusting)
            await until(lambda: came)
            [far] = came
            near.write(b"data")
            near.flush()
            assert await asyncio.to_thread(far.read, 4) == b"data"
            assert far.host == A.uuid
            b.tickets.issue(A.uuid, came.append, asyncio.get_running_loop().time())
            for wrong in (ticket, bytes(32)):
                opening = open_channel(b.address, wrong, B.uuid, trusting)
                assert await code_of(opening) == "peer-ticket"
            assert len(came) == 1
            near.close()
            far.close()
            await until(lambda: not b.listener.connections)

    run(test())


def test_a_ticket_does_not_help_a_stranger() -> None:
    async def test() -> None:
        async with serving() as b:
            ticket = b.tickets.issue(A.uuid, lambda _: None, asyncio.get_running_loop().time())
            opening = open_channel(b.address, ticket, B.uuid, STRANGER.trusting(B.pin))
            assert await code_of(opening) in ("peer-refused", "peer-ticket")
            opening = open_channel(b.address, ticket, STRANGER.uuid, A.trusting(B.pin))
            assert await code_of(opening) == "peer-wrong-host"

    run(test())


@asynccontextmanager
async def silent(address: Address, count: int) -> AsyncIterator[list[socket.socket]]:
    """Strangers who say what they came for, and nothing else."""
    loop = asyncio.get_running_loop()
    strangers = []
    try:
        for _ in range(count):
            strangers.append(socket.create_connection(address))
            strangers[-1].setblocking(False)
            await loop.sock_sendall(strangers[-1], BULK)
        yield strangers
    finally:
        for stranger in strangers:
            stranger.close()


async def hung_up(stranger: socket.socket) -> None:
    async with asyncio.timeout(LIMITS.peer_handshake_s / 2):  # it was not waited for
        assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""


def test_silent_strangers_keep_nobody_elses_work_waiting() -> None:
    """Each kept one of six threads for 5 s that write the journal and verify what came."""

    async def test() -> None:
        async with serving() as b:
            b.tickets.issue(A.uuid, lambda _: None, asyncio.get_running_loop().time())
            async with silent(b.address, LIMITS.peer_strangers):
                await until(lambda: len(b.listener._shaking) == LIMITS.peer_strangers)
                async with asyncio.timeout(LIMITS.peer_handshake_s / 2):
                    await asyncio.to_thread(int)
                    await b.listener.stop()

    run(test())


def test_nobody_gets_a_bulk_handshake_while_no_ticket_is_out() -> None:
    async def test() -> None:
        async with serving() as b:
            b.tickets.issue(A.uuid, lambda _: None, -LIMITS.ticket_s)  # too old
            async with silent(b.address, 1) as strangers:
                await hung_up(*strangers)

    run(test())


def test_silent_strangers_make_room_for_a_ticket() -> None:
    async def test() -> None:
        limits = replace(LIMITS, bulk_strangers=2)
        async with serving(limits=limits) as b:
            came: list[Channel] = []
            now = asyncio.get_running_loop().time
            ticket = b.tickets.issue(A.uuid, came.append, now())
            async with silent(b.address, 2) as strangers:
                await until(lambda: len(b.listener._shaking) == 2)
                async with silent(b.address, 1) as more:
                    await hung_up(*more)  # those before it may be about to show theirs
                b.listener._clock = lambda: now() + 2
                near = await open_channel(b.address, ticket, B.uuid, A.trusting(B.pin))
                await until(lambda: came)
                await hung_up(strangers[0])
                near.close()
                came[0].close()

    run(test())


# --- a link that lasts ---------------------------------------------------------------------------


def test_a_link_that_lasts_asks_again_over_the_next_connection() -> None:
    async def test() -> None:
        asked: list[bytes] = []

        async def once_broken(link: PeerLink, payload: bytes) -> bytes:
            asked.append(payload)
            if len(asked) == 1:
                link.cut(UnavailableError("pulled", code="peer-lost"))
                await asyncio.Event().wait()
            return b"done"

        async with serving(once_broken) as b:
            trusting = A.trusting(B.pin)
            lasting = PersistentLink(
                lambda: connect(b.address, B.uuid, trusting), first_s=0.001
            )
            assert await lasting.request(b"step", deadline_s=DEADLINE_S) == b"done"
            assert asked == [b"step", b"step"]
            await lasting.close()

    run(test())


def test_a_link_that_lasts_waits_for_a_daemon_that_starts_again() -> None:
    async def test() -> None:
        async with serving() as b:
            address = b.address
        trusting = A.trusting(B.pin)
        tries = 0

        async def opening() -> PeerLink:
            nonlocal tries
            tries += 1
            return await connect(address, B.uuid, trusting)

        lasting = PersistentLink(opening, first_s=0.001)
        waiting = asyncio.ensure_future(lasting.request(b"x", deadline_s=DEADLINE_S))
        await until(lambda: tries >= 2)
        async with serving(port=address[1]):
            assert (await waiting).endswith(b" x")
            await lasting.close()

    run(test())


def test_a_link_that_lasts_gives_up_at_its_deadline_and_for_what_cannot_be_mended() -> None:
    async def test() -> None:
        async def nobody() -> PeerLink:
            raise UnavailableError("nobody", code="peer-unreachable")

        async def forbidden() -> PeerLink:
            raise PermissionDenied("no", code="peer-revoked")

        for opening, code in ((nobody, "peer-unreachable"), (forbidden, "peer-revoked")):
            lasting = PersistentLink(opening, first_s=0.001)
            assert await code_of(lasting.request(b"x", deadline_s=0.05)) == code

    run(test())
