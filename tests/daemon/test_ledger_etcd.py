"""The fleet's ledger on a real etcd: who is first owns; who is late, cut off or lying does not."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from accelvisor.daemon import ledger_etcd
from accelvisor.daemon.etcd import Entry, EtcdClient, Range
from accelvisor.daemon.ledger_etcd import PAGE, EtcdLedger
from accelvisor.daemon.ledger_seen import Seen
from accelvisor.errors import ConfigError, ConflictError, StateError, UnavailableError
from accelvisor.limits import LIMITS
from accelvisor.migration.ledger import Record, Signed, Standing, sign
from accelvisor.migration.succession import Hand
from tests.daemon.private_etcd import PrivateEtcd, free_ports, private_etcd
from tests.migration.ledgers import A, B, C, F, G, TestSigner, transfer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    with private_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def fleet(
    server: PrivateEtcd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., EtcdLedger]:
    """Makes a host's ledger; each test has its own keys."""
    monkeypatch.setattr(ledger_etcd, "PREFIX", f"/{tmp_path.name}/".encode())

    def make(host: str, client: EtcdClient | None = None, **named: object) -> EtcdLedger:
        made = client or EtcdClient([server.url])
        return EtcdLedger(made, host, TestSigner(), itertools.count(1).__next__, **named)  # type: ignore[arg-type]

    return make


Fleet = Callable[..., EtcdLedger]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def code_of(result: object) -> str | None:
    return getattr(result, "code", None)


def test_two_hosts_on_one_etcd_cannot_both_own_a_function(fleet: Fleet) -> None:
    async def scenario() -> None:
        hosts = [fleet(host) for host in (A, B, C)]
        results = await asyncio.gather(*(h.claim(F) for h in hosts), return_exceptions=True)
        owners = [result for result in results if isinstance(result, Signed)]
        assert len(owners) == 1
        assert [code_of(r) for r in results if r not in owners] == ["ledger-conflict"] * 2
        seen = {await host.get(F) for host in hosts}
        assert seen == {owners[0]}

    run(scenario)


def test_source_and_destination_at_once_get_one_answer(fleet: Fleet) -> None:
    """QEMU resumed on both sides: the one that comes first is right, the other obeys."""

    async def scenario() -> None:
        a, b = fleet(A), fleet(B)
        await a.claim(F)
        await a.claim(G)
        owner, other, epoch = (a, A), (b, B), 2
        for number in range(12):
            move = transfer(number, owner[1], other[1], epoch, F, G)
            await owner[0].prepare(move)
            deciding = [owner[0].abort(move), other[0].commit(move)]
            answers = await asyncio.gather(*deciding)
            assert len({answer.committed for answer in answers}) == 1
            assert answers[0].records == answers[1].records
            if answers[0].committed:
                await other[0].adopt(answers[0].records)
                owner, other = other, owner
            else:
                with pytest.raises(ConflictError):
                    await other[0].adopt(
                        [sign(TestSigner(), r) for r in committed(answers[0].records, other[1])]
                    )
            epoch += 1
            newest = [await ledger.get(name) for ledger in (a, b) for name in (F, G)]
            assert [s.record.runs_at(owner[1]) for s in newest if s] == [True] * 4
            assert not any(s.record.runs_at(other[1]) for s in newest if s)
        assert await a.floor(F) == await b.floor(G) == epoch - 1

    def committed(records: tuple[Signed, ...], owner: str) -> list[Record]:
        return [
            Record(s.record.function, s.record.epoch, owner, Standing.COMMITTED,
                   s.record.migration, s.record.owner, s.record.digest)
            for s in records
        ]  # fmt: skip

    run(scenario)


def test_a_host_that_was_cut_off_and_comes_back_late_gets_a_conflict(fleet: Fleet) -> None:
    """It read before the partition and writes after it: its comparison fails."""

    class Late(EtcdClient):
        """Between its reading and its writing others go on."""

        meanwhile: Callable[[], None] | None = None

        def swap(self, *given: object) -> bool:  # type: ignore[override]
            if self.meanwhile:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            return super().swap(*given)  # type: ignore[arg-type]

    async def scenario() -> None:
        a = fleet(A)
        await a.claim(F)
        late_client = Late(endpoints(a))
        late = fleet(A, late_client)

        def others() -> None:
            async def go() -> None:
                quick = fleet(A)
                move = transfer(2, A, C, 2)
                await quick.prepare(move)
                assert (await fleet(C).commit(move)).committed

            asyncio.run(go())

        late_client.meanwhile = others
        with pytest.raises(ConflictError) as caught:
            await late.prepare(transfer(1, A, B, 2))
        assert caught.value.code == "ledger-conflict"
        with pytest.raises(ConflictError) as caught:
            await late.claim(F)
        assert caught.value.code == "ledger-conflict"
        newest = await a.get(F)
        assert newest is not None
        assert newest.record.runs_at(C)

    run(scenario)


def endpoints(ledger: EtcdLedger) -> list[str]:
    return [f"{scheme}://{host}:{port}" for scheme, host, port in ledger._client._endpoints]


def test_a_destination_that_lies_cannot_commit_what_was_not_sealed_for_it(fleet: Fleet) -> None:
    async def scenario() -> None:
        a, thief = fleet(A), fleet(C)
        await a.claim(F)
        with pytest.raises(ConflictError) as caught:
            await thief.commit(transfer(1, A, C, 2))
        assert caught.value.code == "ledger-not-prepared"
        await a.prepare(transfer(1, A, B, 2))
        with pytest.raises(ConflictError) as caught:
            await thief.commit(transfer(1, A, C, 2))
        assert caught.value.code == "ledger-changed"
        with pytest.raises(ConflictError) as caught:
            await thief.prepare(transfer(2, C, C, 3))
        assert caught.value.code == "ledger-undecided"
        assert (await fleet(B).commit(transfer(1, A, B, 2))).committed
        assert not (await thief.commit(transfer(9, A, C, 2))).committed

    run(scenario)


def test_an_answer_that_was_lost_is_found_again(fleet: Fleet) -> None:
    """The request was carried out and the connection broke: asked again, it says the same."""

    class Lossy(EtcdClient):
        def swap(self, *given: object) -> bool:  # type: ignore[override]
            super().swap(*given)  # type: ignore[arg-type]
            raise UnavailableError("lost", code="ledger-unreachable")

    async def scenario() -> None:
        a = fleet(A)
        lossy = fleet(A, Lossy(endpoints(a)))
        move = transfer(1, A, B, 2)
        for step, again in (
            (lambda: lossy.claim(F), lambda: a.claim(F)),
            (lambda: lossy.prepare(move), lambda: a.prepare(move)),
            (lambda: lossy.abort(move), lambda: a.abort(move)),
        ):
            with pytest.raises(UnavailableError):
                await step()
            before = len(await a.history(F))
            await again()
            assert len(await a.history(F)) == before
        states = [signed.record.state.value for signed in await a.history(F)]
        assert states == ["owned", "prepared", "aborted"]

    run(scenario)


def test_a_released_function_can_be_made_again_elsewhere(fleet: Fleet) -> None:
    async def scenario() -> None:
        a, b = fleet(A), fleet(B)
        await a.claim(F)
        with pytest.raises(ConflictError):
            await b.release(F)
        assert await a.release(F) == await a.release(F)
        again = await b.claim(F)
        assert (again.record.owner, again.record.epoch) == (B, 3)
        with pytest.raises(ConflictError):
            await a.claim(F)

    run(scenario)


def test_what_is_no_record_or_not_rightly_signed_is_damage(fleet: Fleet) -> None:
    async def scenario() -> None:
        a = fleet(A)
        await a.claim(F)
        client = EtcdClient(endpoints(a))
        client.swap({}, {ledger_etcd.PREFIX + b"function/" + G.encode(): b"rubbish"})
        with pytest.raises(StateError) as caught:
            await a.get(G)
        assert caught.value.code == "ledger-damaged"
        # Another function's record, copied.
        [[entry]] = client.read([Range(ledger_etcd.PREFIX + b"function/" + F.encode())])
        client.swap({}, {ledger_etcd.PREFIX + b"function/" + G.encode(): entry.value})
        with pytest.raises(StateError) as caught:
            await a.claim(G)
        assert caught.value.code == "ledger-damaged"

        with pytest.raises(StateError) as caught:
            await fleet(A, judge=lambda signed: Hand.WRONG).get(F)
        assert caught.value.code == "ledger-damaged"

    run(scenario)


def key(function: str, *step: str) -> bytes:
    kind = "history" if step else "function"
    return ledger_etcd.PREFIX + "/".join((kind, function, *step)).encode()


@pytest.mark.parametrize("history", [False, True], ids=["newest", "newest and history"])
def test_an_old_record_that_is_put_back_is_noticed(fleet: Fleet, history: bool) -> None:
    """By somebody who has no key, but may write to etcd: the source would take its VM back."""

    async def scenario() -> None:
        a, b = fleet(A), fleet(B)
        old = await a.claim(F)
        move = transfer(1, A, B, 2)
        await a.prepare(move)
        assert (await b.commit(move)).committed
        await a.get(F)
        client = EtcdClient(endpoints(a))
        puts = {key(F): old.envelope}
        if history:  # as far as that goes without a deletion
            of_2 = Record(F, 2, A, Standing.ABORTED, move.migration, B)
            back = sign(TestSigner(), of_2).envelope
            puts = {key(F): back, key(F, f"{2:020d}", "aborted"): back}
        client.swap({}, puts)
        for ledger in (a, b, fleet(C)):
            for verb in (ledger.get(F), ledger.prepare(transfer(2, A, C, 3))):
                with pytest.raises(StateError) as caught:
                    await verb
                assert caught.value.code == ("ledger-damaged" if history else "ledger-rollback")

    run(scenario)


def test_a_history_that_was_cut_back_is_noticed_by_who_saw_more(fleet: Fleet) -> None:
    """An old backup of etcd, say. Also after the daemon's restart."""

    class Old(EtcdClient):
        def read(self, ranges: Sequence[Range]) -> list[list[Entry]]:
            found = super().read(ranges)
            return [[e for e in entries if e.revision <= revision] for entries in found]

    async def scenario() -> None:
        a = fleet(A)
        await a.claim(F)
        nonlocal revision
        revision = EtcdClient(endpoints(a)).read([Range(key(F))])[0][0].revision
        seen = Seen(path)
        await fleet(A, seen=seen).release(F)
        await a.claim(F)
        again = fleet(A, Old(endpoints(a)), seen=Seen(path))
        with pytest.raises(StateError) as caught:
            await again.floor(F)
        assert caught.value.code == "ledger-rollback"

    revision = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.db"
        run(scenario)


@pytest.mark.parametrize("epoch", [3, 9])
def test_a_trusted_host_cannot_write_that_a_function_is_its_own(fleet: Fleet, epoch: int) -> None:
    async def scenario() -> None:
        a, b = fleet(A), fleet(B)
        await a.claim(F)
        move = transfer(1, A, B, 2)
        await a.prepare(move)
        await b.commit(move)
        stolen = sign(TestSigner(), Record(F, epoch, C, Standing.OWNED))
        puts = {key(F): stolen.envelope, key(F, f"{epoch:020d}", "owned"): stolen.envelope}
        EtcdClient(endpoints(a)).swap({}, puts)
        for ledger in (a, b, fleet(C)):
            with pytest.raises(StateError) as caught:
                await ledger.get(F)
            assert caught.value.code == "ledger-damaged"

    run(scenario)


def test_a_host_that_comes_back_after_hundreds_of_aborts_reads_them_in_pages(fleet: Fleet) -> None:
    """An abort spends an epoch; all records of a function are too long for one answer of etcd."""

    async def scenario() -> None:
        a, b, late = fleet(A), fleet(B), fleet(C)
        await a.claim(F)
        await late.get(F)
        epochs = range(2, 2 + 2 * PAGE)
        for epoch in epochs:
            move = transfer(epoch, A, B, epoch)
            await a.prepare(move)
            assert not (await a.abort(move)).committed
        longest = 0
        inner = EtcdClient.read

        def read(self: EtcdClient, ranges: Sequence[Range]) -> list[list[Entry]]:
            nonlocal longest
            found = inner(self, ranges)
            longest = max(longest, *map(len, found))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EtcdClient, "read", read)
            assert await late.floor(F) == await b.floor(F) == epochs[-1]
            assert len(await b.history(F)) == 1 + 2 * len(epochs)
        assert longest == PAGE
        move = transfer(1, A, C, epochs[-1] + 1)
        await a.prepare(move)
        assert (await late.commit(move)).committed

    run(scenario)


# --- etcd that is away, slow or not etcd ----------------------------------------------------------


def test_the_next_endpoint_answers_when_the_first_does_not(server: PrivateEtcd) -> None:
    [dead] = free_ports(1)
    client = EtcdClient([f"http://127.0.0.1:{dead}", server.url])
    assert client.swap({b"/next": 0}, {b"/next": b"value"})
    [[entry]] = client.read([Range(b"/next")])
    assert entry.value == b"value"
    assert not client.swap({b"/next": 0}, {b"/next": b"other"})
    assert client.swap({b"/next": entry.revision}, {b"/next": b"other"})


def test_a_restarted_etcd_still_knows(tmp_path: Path) -> None:
    async def scenario() -> None:
        with private_etcd(tmp_path) as etcd:
            client = EtcdClient([etcd.url])
            ledger = EtcdLedger(client, A, TestSigner(), lambda: 1)
            made = await ledger.claim(F)
            etcd.stop()
            with pytest.raises(UnavailableError) as caught:
                await ledger.get(F)
            assert caught.value.code == "ledger-unreachable"
            etcd.start()
            assert await ledger.get(F) == made
            await ledger.close()

    run(scenario)


class Strange(BaseHTTPRequestHandler):
    """Answers whatever the test says."""

    status, body, hang = 200, b"", threading.Event()

    def do_POST(self) -> None:
        if type(self).body == b"hang":
            type(self).hang.wait(60)
            return
        self.send_response(type(self).status)
        self.end_headers()
        self.wfile.write(type(self).body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def strange() -> Iterator[str]:
    Strange.status, Strange.hang = 200, threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Strange) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        Strange.hang.set()
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, b'{"error":"etcdserver: request timed out"}'), (200, b"not json"), (200, b"[]"),
        (200, b'{"responses":[{"x":1}]}'), (200, b'{"responses":1}'), (200, b"hang"),
        (200, b'{"responses":[{"response_range":{"kvs":[{"key":"!"}]}}]}'),
        (200, b"x" * (LIMITS.etcd_answer_bytes + 1)),
    ],
    ids=["503", "rubbish", "list", "other", "number", "silent", "entry", "endless"],
)  # fmt: skip
def test_what_does_not_answer_as_etcd_is_unreachable(
    strange: str, status: int, body: bytes
) -> None:
    Strange.status, Strange.body = status, body
    client = EtcdClient([strange], request_s=0.3)
    with pytest.raises(UnavailableError) as caught:
        client.read([Range(b"key")])
    assert caught.value.code == "ledger-unreachable"


def test_an_answer_without_the_ranges_that_were_asked_for_is_no_empty_ledger(
    strange: str, fleet: Fleet
) -> None:
    """Else a proxy's empty answer would make every function unknown, and free to be claimed."""
    Strange.body = b"{}"
    with pytest.raises(UnavailableError):
        EtcdClient([strange]).read([Range(b"key")])


@pytest.mark.parametrize("url", ["", "127.0.0.1:1", "ftp://h:1", "http://h", "http://h:x"])
def test_an_endpoint_that_is_no_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdClient([url])
    assert caught.value.code == "ledger-endpoint"
    with pytest.raises(ConfigError):
        EtcdClient([])
