"""The ledger as moves use it: epochs, and records of another host that must be its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest

from accelvisor.daemon.config import LedgerConfig
from accelvisor.daemon.ledger_sqlite import SqliteLedger
from accelvisor.daemon.moving import ledgers
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.owners import KeySigner, Owners, judge
from accelvisor.daemon.paths import Paths
from accelvisor.errors import ConfigError, ConflictError, DataError
from accelvisor.limits import LIMITS
from accelvisor.migration import messages as wire
from accelvisor.migration.ledger import Record, Signed, Standing, sign
from accelvisor.migration.succession import Hand

F = "33333333-3333-4333-8333-333333333333"
A, B, C = (UUID(f"{n * 8}-{n * 4}-4{n * 3}-8{n * 3}-{n * 12}") for n in "126")
MOVE = b"m" * 16


class Host:
    """Keys and a ledger of one host."""

    def __init__(self, folder: Path, host: UUID, name: str) -> None:
        self.keys = Keys(folder / name, host, name, f"{name}:1")
        self.ledger = SqliteLedger(
            folder / f"{name}.db", str(host), KeySigner(self.keys), time.time_ns
        )
        self.owners = Owners(self.ledger, self.keys, "source")

    def trusts(self, other: Host) -> None:
        self.keys.learn(
            other.keys.host, other.keys.identity.public_identity, "x" + other.keys.identity.key_id,
            "x:1",
        )  # fmt: skip


def run(folder: Path, body: Callable[[Host, Host, Host], Awaitable[None]]) -> None:
    async def inside() -> None:
        hosts = [Host(folder, host, name) for host, name in ((A, "a"), (B, "b"), (C, "c"))]
        for one in hosts:
            for other in hosts:
                if one is not other:
                    one.trusts(other)
        try:
            await body(*hosts)
        finally:
            for host in hosts:
                await host.ledger.close()

    asyncio.run(inside())


def part(epoch: int) -> tuple[wire.Part, ...]:
    return (wire.Part(F, epoch, b"d" * 32),)


async def owned(host: Host) -> Signed:
    """What the host's ledger says of a function that is its own."""
    await host.owners.next_epoch(F)
    mine = await host.ledger.get(F)
    assert mine is not None
    return mine


async def given(source: Host, target: Host, epoch: int) -> list[bytes]:
    """A move that the source's ledger committed: its signed records."""
    transfer = source.owners.transfer(MOVE, str(target.keys.host), part(epoch))
    await source.ledger.prepare(transfer)
    verdict = await source.ledger.commit(transfer)
    assert verdict.committed
    return [signed.envelope for signed in verdict.records]


def test_each_move_takes_the_next_epoch_and_an_aborted_one_is_spent(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        assert await a.owners.next_epoch(F) == 2
        transfer = a.owners.transfer(MOVE, str(B), part(2))
        await a.ledger.prepare(transfer)
        with pytest.raises(ConflictError) as caught:
            await a.owners.next_epoch(F)
        assert caught.value.code == "ledger-undecided"
        assert not (await a.ledger.abort(transfer)).committed
        assert await a.owners.next_epoch(F) == 3

    run(tmp_path, body)


def test_what_the_source_signed_is_adopted_and_the_source_owns_it_no_more(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        await a.owners.next_epoch(F)
        records = await given(a, b, 2)
        await b.owners.adopt(records, b.owners.arrival(MOVE, str(A), part(2)))
        assert await b.owners.next_epoch(F) == 3
        with pytest.raises(ConflictError) as caught:
            await a.owners.next_epoch(F)
        assert caught.value.code == "ledger-not-owner"

    run(tmp_path, body)


def test_a_record_that_another_host_signed_gives_nothing_away(tmp_path: Path) -> None:
    """A trusted host cannot say in another's name that it gave its function away."""

    async def body(a: Host, b: Host, c: Host) -> None:
        await c.owners.next_epoch(F)
        forged = await given(c, b, 2)  # by c; b believes that a moves the function to it
        with pytest.raises(DataError) as caught:
            await b.owners.adopt(forged, b.owners.arrival(MOVE, str(A), part(2)))
        assert caught.value.code == "ledger-signature"
        assert await b.ledger.floor(F) == 0

    run(tmp_path, body)


@pytest.mark.parametrize("what", ["function", "epoch", "migration", "destination"])
def test_a_record_of_another_move_is_refused(tmp_path: Path, what: str) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        await a.owners.next_epoch(F)
        records = await given(a, c if what == "destination" else b, 2)
        wanted = part(3 if what == "epoch" else 2)
        if what == "function":
            wanted = (wire.Part(F.replace("3", "4"), 2, b"d" * 32),)
        migration = b"n" * 16 if what == "migration" else MOVE
        with pytest.raises(DataError) as caught:
            await b.owners.adopt(records, b.owners.arrival(migration, str(A), wanted))
        assert caught.value.code == "ledger-record"

    run(tmp_path, body)


def test_a_revoked_key_signs_no_record(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        await a.owners.next_epoch(F)
        records = await given(a, b, 2)
        b.keys.remove(str(A))
        with pytest.raises(DataError) as caught:
            await b.owners.adopt(records, b.owners.arrival(MOVE, str(A), part(2)))
        assert caught.value.code == "ledger-signature"

    run(tmp_path, body)


def test_a_shared_ledger_is_believed_for_signatures_of_those_who_may_write(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        mine = await owned(a)
        assert judge(b.keys, mine) is Hand.RIGHT
        forged = sign(KeySigner(c.keys), mine.record)
        assert judge(b.keys, forged) is Hand.WRONG
        b.keys.remove(str(A))
        assert judge(b.keys, mine) is judge(b.keys, forged) is Hand.LEFT

    run(tmp_path, body)


def test_the_destination_that_a_record_names_cannot_sign_it_for_the_source(tmp_path: Path) -> None:
    """Any trusted host could have written that a function is about to come to it."""

    async def body(a: Host, b: Host, c: Host) -> None:
        prepared = Record(F, 2, str(A), Standing.PREPARED, MOVE, str(C), b"d" * 32)
        assert judge(b.keys, sign(KeySigner(c.keys), prepared)) is Hand.WRONG
        committed = Record(F, 2, str(C), Standing.COMMITTED, MOVE, str(A), b"d" * 32)
        assert judge(b.keys, sign(KeySigner(c.keys), committed)) is Hand.RIGHT

    run(tmp_path, body)


def test_a_record_counts_however_often_the_key_was_replaced_since(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        mine = await owned(a)
        old = a.keys.identity.key_id
        for _ in range(LIMITS.host_keys + 1):
            b.keys.rotated(a.keys.rotate())
        assert b.keys.keyring.find(old) is None
        assert judge(b.keys, mine) is Hand.RIGHT

    run(tmp_path, body)


def test_a_revoked_key_of_a_host_that_is_trusted_is_told_from_a_forgery(tmp_path: Path) -> None:
    async def body(a: Host, b: Host, c: Host) -> None:
        mine = await owned(a)
        old = a.keys.identity.key_id
        b.keys.rotated(a.keys.rotate())
        b.keys.revoke(old)
        assert judge(b.keys, mine) is Hand.REVOKED

    run(tmp_path, body)


def test_the_configuration_chooses_the_ledger(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path, tmp_path / "toml")
    keys = Keys(tmp_path / "trust", A, "a", "a:1")

    async def body() -> None:
        local, arbiter = ledgers.make(LedgerConfig(), paths, keys)
        assert arbiter == "source"
        await local.close()
        config = LedgerConfig(kind="etcd", endpoints=("http://127.0.0.1:1",))
        shared, arbiter = ledgers.make(config, paths, keys)
        assert arbiter == "etcd"
        await shared.close()
        with pytest.raises(ConfigError) as caught:
            ledgers.make(
                LedgerConfig(kind="etcd", endpoints=("https://x:1",), ca="/nothing"), paths, keys
            )
        assert caught.value.code == "ledger-tls"

    asyncio.run(body())
