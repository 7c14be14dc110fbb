"""The server over real sockets: many clients, slow ones, hostile ones, none in the way."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelvisor.control import admin, idl
from accelvisor.control.admin import Peer, Policy
from accelvisor.control.client import AdminClient
from accelvisor.control.dispatch import Dispatcher, varlink_interface
from accelvisor.control.server import AdminServer
from accelvisor.errors import (
    CapacityError,
    DataError,
    DeadlineError,
    NotFoundError,
    PermissionDenied,
    SystemFailure,
    UnavailableError,
    UsageError,
)
from accelvisor.limits import LIMITS, Limits


class Service:
    """Some methods of the real interface, doing what a test needs."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running = 0
        self.broken_off = 0
        self.streams = 0

    async def list_functions(self) -> dict[str, Any]:
        return {"functions": []}

    async def get_card(self, card: str) -> dict[str, Any]:
        raise NotFoundError(f"no {card}", code="card-not-found", where="x", hint="look")

    async def create_function(self, profile: str, name: str | None = None) -> dict[str, Any]:
        raise CapacityError("full", code="no-room")

    async def get_host(self) -> dict[str, Any]:
        raise ZeroDivisionError("a bug")

    async def domain_xml(self, domain: str, live: bool | None = None) -> dict[str, Any]:
        return {"xml": "x" * int(domain)}

    async def list_domains(self) -> dict[str, Any]:
        self.running += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        finally:
            self.running -= 1
        return {"domains": []}

    async def watch_events(self, after: int | None = None) -> AsyncIterator[dict[str, Any]]:
        self.streams += 1
        try:
            yield {"event": None}
            for number in range(after or 1 << 30):
                await asyncio.sleep(0)
                text = "x" * 1000
                event = {"id": number, "time": 0.0, "kind": "k", "subject": "", "message": text}
                yield {"event": event}
        finally:
            self.streams -= 1


class Place:
    """A server and ways to talk to it."""

    def __init__(self, path: Path, service: Service, server: AdminServer) -> None:
        self.path = str(path)
        self.service = service
        self.server = server
        self.writers: list[asyncio.StreamWriter] = []

    async def call(self, member: str, **parameters: Any) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            with AdminClient(self.path) as client:
                return client.call(member, parameters)

        return await asyncio.to_thread(work)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=4 << 20)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
            try:
                await writer.wait_closed()
            except ConnectionError:
                pass


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    limits: Limits = LIMITS,
    policy: Policy = Policy(uids={0, 1000}),  # noqa: B008 - frozen
    identify: Callable[[socket.socket], Peer] = lambda sock: Peer(0, {0}),
) -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="acv-") as directory:
        path = Path(directory) / "admin"
        service = Service()
        server = AdminServer(Dispatcher(service, policy, "1.2"), limits=limits, identify=identify)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(path))
        sock.listen(64)
        sock.setblocking(False)
        await server.start(sock)
        try:
            place = Place(path, service, server)
            yield place
        finally:
            await place.close()
            await server.stop()
            sock.close()
    assert not server.clients


def call(member: str, **extra: Any) -> bytes:
    message = {"method": f"io.accelvisor.Admin.{member}", "parameters": {}, **extra}
    return json.dumps(message).encode() + b"\0"


async def reply(reader: asyncio.StreamReader) -> dict[str, Any]:
    async with asyncio.timeout(10):
        return json.loads((await reader.readuntil(b"\0"))[:-1])


async def tried(place: Place, clients: int) -> list[str]:
    """What so many clients hear, one after the other, all of which stay."""
    outcomes = []
    for _ in range(clients):
        reader, writer = await place.raw()
        writer.write(call("ListFunctions"))
        outcomes.append((await reply(reader)).get("error", "served").rsplit(".", 1)[-1])
    return outcomes


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_a_call_and_its_reply() -> None:
    async def scenario() -> None:
        async with serving() as place:
            assert await place.call("ListFunctions") == {"functions": []}

    run(scenario)


def test_introspection() -> None:
    async def scenario() -> None:
        async with serving() as place:

            def work() -> None:
                with AdminClient(place.path) as client:
                    about = client.call("GetInfo", interface="org.varlink.service")
                    varlink_interface().check_reply("GetInfo", about)
                    assert about["version"] == "1.2"
                    for name in about["interfaces"]:
                        text = client.call(
                            "GetInterfaceDescription",
                            {"interface": name},
                            interface="org.varlink.service",
                        )["description"]
                        assert idl.parse(text).name == name
                    with pytest.raises(NotFoundError):
                        client.call(
                            "GetInterfaceDescription",
                            {"interface": "a.b"},
                            interface="org.varlink.service",
                        )

            await asyncio.to_thread(work)

    run(scenario)


@pytest.mark.parametrize(
    ("member", "parameters", "kind", "code"),
    [
        ("GetCard", {"card": "x"}, NotFoundError, "card-not-found"),
        ("CreateFunction", {"profile": "x"}, CapacityError, "no-room"),
        ("GetCard", {}, UsageError, "parameter-invalid"),
        ("GetCard", {"card": 3}, UsageError, "parameter-invalid"),
        ("GetCard", {"card": "x", "cart": "y"}, UsageError, "parameter-invalid"),
        ("NoSuchMethod", {}, NotFoundError, "method-unknown"),
        ("GetHost", {}, SystemFailure, "internal"),
    ],
)
def test_errors_arrive_as_what_they_are(
    member: str, parameters: dict[str, Any], kind: type[Exception], code: str
) -> None:
    """A17: errors cannot be told apart."""

    async def scenario() -> None:
        async with serving() as place:
            with pytest.raises(kind) as caught:
                await place.call(member, **parameters)
            assert caught.value.code == code  # type: ignore[attr-defined]
            assert "ZeroDivision" not in str(caught.value) or code == "internal"

    run(scenario)


def test_all_four_fields_arrive() -> None:
    async def scenario() -> None:
        async with serving() as place:
            with pytest.raises(NotFoundError) as caught:
                await place.call("GetCard", card="x")
            error = caught.value
            assert (error.message, error.where, error.hint) == ("no x", "x", "look")

    run(scenario)


def test_a_stranger_is_refused_but_may_introspect() -> None:
    async def scenario() -> None:
        async with serving(identify=lambda sock: Peer(77, {77})) as place:
            with pytest.raises(PermissionDenied) as caught:
                await place.call("ListFunctions")
            assert caught.value.code == "permission-denied"

            def introspect() -> dict[str, Any]:
                with AdminClient(place.path) as client:
                    return client.call("GetInfo", interface="org.varlink.service")

            assert (await asyncio.to_thread(introspect))["product"] == "accelvisord"

    run(scenario)


def test_a_strangers_parameters_are_not_looked_at() -> None:
    """The socket is open to all: who has no level hears so before anything that he sent counts."""

    async def scenario() -> None:
        async with serving(identify=lambda sock: Peer(77, {77})) as place:
            reader, writer = await place.raw()
            writer.write(call("GetCard", parameters={"no": "such"}))
            answer = await reply(reader)
            assert answer["error"] == "io.accelvisor.Admin.PermissionDenied"
            writer.write(call("ListFunctions", parameters={"x": "y" * 5000}))
            answer = await reply(reader)
            assert answer["parameters"]["code"] == "message-too-long"
            assert await reader.read() == b""

    run(scenario)


def test_strangers_share_few_connections() -> None:
    """However many uids they have, the others get in."""
    peers = [Peer(uid, {9}) for uid in (70, 71, 72)] + [Peer(5, {5}), Peer(0, {0})]

    async def scenario() -> None:
        limits = replace(LIMITS, admin_clients_without_level=2)
        policy = Policy(read={5}, uids={0})
        async with serving(limits, policy, lambda sock: peers.pop(0)) as place:
            outcomes = await tried(place, 5)
            refused = "PermissionDenied"
            assert outcomes == [refused, refused, "Unavailable", "served", "served"]

    run(scenario)


def test_a_second_client_does_not_wait_for_the_first() -> None:
    """A13: second client hangs."""

    async def scenario() -> None:
        async with serving() as place:
            slow = asyncio.ensure_future(place.call("ListDomains"))
            await until(lambda: place.service.running > 0)
            assert await place.call("ListFunctions") == {"functions": []}
            place.service.release.set()
            assert await slow == {"domains": []}

    run(scenario)


def test_one_client_too_many_hears_so_at_once() -> None:
    """A13: ... or an immediate "busy"."""

    async def scenario() -> None:
        async with serving(replace(LIMITS, admin_clients=2)) as place:
            held = [await place.raw() for _ in range(2)]
            for reader, writer in held:
                writer.write(call("ListFunctions"))
                await reply(reader)
            with pytest.raises(UnavailableError) as caught:
                await place.call("ListFunctions")
            assert caught.value.code == "too-many-clients"
            held[0][1].close()
            await until(lambda: len(place.server.clients) <= 1)
            assert await place.call("ListFunctions") == {"functions": []}
            held[1][1].close()

    run(scenario)


def test_one_user_cannot_take_all_connections() -> None:
    peers = [Peer(77, {5}), Peer(77, {5}), Peer(77, {5}), Peer(78, {5}), Peer(0, {0}), Peer(0, {0})]

    async def scenario() -> None:
        limits = replace(LIMITS, admin_clients_per_uid=2)
        policy = Policy(read={5}, uids={0})
        async with serving(limits, policy, lambda sock: peers.pop(0)) as place:
            outcomes = await tried(place, 6)
            served = "served"
            assert outcomes == [served, served, "Unavailable", served, served, served]

    run(scenario)


def test_pipelined_calls_are_answered_in_order() -> None:
    """A11: event taken for a reply. Varlink has no ids: the order is the id."""

    async def scenario() -> None:
        async with serving() as place:
            reader, writer = await place.raw()
            for size in (3, 1, 2):
                writer.write(call("DomainXml", parameters={"domain": str(size)}))
            writer.write(call("ListFunctions", oneway=True))
            writer.write(call("DomainXml", parameters={"domain": "4"}))
            sizes = [len((await reply(reader))["parameters"]["xml"]) for _ in range(4)]
            assert sizes == [3, 1, 2, 4]
            writer.close()

    run(scenario)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"nonsense\0", "message-syntax"),
        (b"[" * 2000 + b"\0", "message-too-deep"),
        (b'{"method": "' + b"x" * 2000 + b'"}\0', "call-malformed"),
        (b"x" * 3000, "message-too-long"),
        (b"{}\0" * 65, "too-many-calls"),
    ],
)
def test_broken_bytes_get_a_reason_and_the_end(data: bytes, code: str) -> None:
    async def scenario() -> None:
        async with serving(replace(LIMITS, admin_message_bytes=2500)) as place:
            reader, writer = await place.raw()
            writer.write(data)
            answer = await reply(reader)
            assert answer["parameters"]["code"] == code
            assert answer["error"] == "io.accelvisor.Admin.Data"
            assert await reader.read() == b""
            writer.close()
            assert await place.call("ListFunctions") == {"functions": []}  # the server lives

    run(scenario)


def test_a_reader_that_does_not_read_is_dropped() -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, admin_backlog_bytes=64 * 1024, admin_drain_s=0.1)
        async with serving(limits) as place:
            reader, writer = await place.raw()
            writer.transport.pause_reading()
            writer.write(call("WatchEvents", more=True))
            await until(lambda: bool(place.server.clients))
            await until(lambda: not place.server.clients)
            assert place.service.streams == 0
            assert reader
            writer.close()

    run(scenario)


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def scenario() -> None:
        async with serving() as place:
            reader, writer = await place.raw()
            writer.write(call("WatchEvents", more=True))
            assert (await reply(reader))["continues"]
            assert place.service.streams == 1
            writer.close()
            await until(lambda: not place.service.streams)

    run(scenario)


def test_a_stream_ends_with_a_reply_that_does_not_continue() -> None:
    async def scenario() -> None:
        async with serving() as place:

            def work() -> int:
                with AdminClient(place.path) as client:
                    count = sum(1 for _ in client.stream("WatchEvents", {"after": 5}))
                    assert client.call("ListFunctions") == {"functions": []}  # still in step
                    return count

            assert await asyncio.to_thread(work) == 6

    run(scenario)


def test_a_stream_must_be_asked_for() -> None:
    async def scenario() -> None:
        async with serving() as place:
            reader, writer = await place.raw()
            writer.write(call("WatchEvents"))
            assert (await reply(reader))["error"] == "org.varlink.service.ExpectedMore"
            writer.write(call("ListFunctions", upgrade=True))
            assert (await reply(reader))["error"] == "org.varlink.service.InvalidParameter"
            writer.close()

    run(scenario)


def test_a_client_that_closes_its_side_gets_its_answers() -> None:
    async def scenario() -> None:
        async with serving() as place:
            reader, writer = await place.raw()
            writer.write(call("ListDomains") + call("ListFunctions"))
            writer.write_eof()
            await until(lambda: place.service.running > 0)
            place.service.release.set()
            assert (await reply(reader))["parameters"] == {"domains": []}
            assert (await reply(reader))["parameters"] == {"functions": []}
            assert await reader.read() == b""
            writer.close()

    run(scenario)


def test_a_client_that_is_gone_is_not_worked_for() -> None:
    async def scenario() -> None:
        async with serving() as place:
            _, writer = await place.raw()
            writer.write(call("ListDomains"))
            await until(lambda: place.service.running > 0)
            writer.close()
            await until(lambda: place.service.broken_off > 0)

    run(scenario)


def test_what_a_client_wants_no_answer_to_is_done_without_it() -> None:
    async def scenario() -> None:
        async with serving() as place:
            _, writer = await place.raw()
            writer.write(call("ListDomains", oneway=True))
            writer.close()
            await until(lambda: place.service.running > 0)
            place.service.release.set()
            await until(lambda: not place.service.running)
            assert not place.service.broken_off

    run(scenario)


def test_a_reply_that_is_too_long_is_an_error_not_a_broken_stream() -> None:
    async def scenario() -> None:
        async with serving() as place:
            with pytest.raises(DataError) as caught:
                await place.call("DomainXml", domain=str(LIMITS.admin_message_bytes))
            assert caught.value.code == "message-too-long"
            size = LIMITS.admin_message_bytes // 2
            assert len((await place.call("DomainXml", domain=str(size)))["xml"]) == size

    run(scenario)


def test_stopping_drops_clients_and_their_calls() -> None:
    async def scenario() -> None:
        async with serving() as place:
            reader, writer = await place.raw()
            writer.write(call("ListDomains"))
            await until(lambda: place.service.running > 0)
            await place.server.stop()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reply(reader)
            writer.close()

    run(scenario)


def test_stopping_leaves_the_path_alone() -> None:
    """D3: socket gone. asyncio's own unix server removes it from Python 3.13 on."""

    async def scenario() -> None:
        async with serving() as place:
            await place.server.stop()
            assert Path(place.path).is_socket()

    run(scenario)


def test_a_client_without_credentials_is_not_served() -> None:
    def unknown(sock: socket.socket) -> Peer:
        raise OSError(9, "no credentials")

    async def scenario() -> None:
        async with serving(identify=unknown) as place:
            with pytest.raises(UnavailableError):
                await place.call("ListFunctions")

    run(scenario)


def test_plain_varlink_is_a_client() -> None:
    """PyPI's varlink package knows nothing of us but the introspection."""
    import varlink

    async def scenario() -> None:
        async with serving() as place:

            def work() -> None:
                with (
                    varlink.Client(address=f"unix:{place.path}") as client,
                    client.open(admin.INTERFACE) as connection,
                ):
                    assert connection.ListFunctions() == {"functions": []}
                    with pytest.raises(varlink.VarlinkError) as caught:
                        connection.GetCard("x")
                    assert caught.value.as_dict()["error"] == "io.accelvisor.Admin.NotFound"
                    events = connection.WatchEvents(2, _more=True)
                    assert len([item for item in events if item.get("event")]) == 2

            await asyncio.to_thread(work)

    run(scenario)


def test_deadline_of_the_first_byte() -> None:
    """A19: client waits for ever on a stuck daemon."""

    async def scenario() -> None:
        async with serving() as place:

            def work() -> None:
                with AdminClient(place.path, reply_s=0.1) as client:
                    client.call("ListDomains")

            with pytest.raises(DeadlineError) as caught:
                await asyncio.to_thread(work)
            assert caught.value.code == "daemon-deadline"

    run(scenario)
