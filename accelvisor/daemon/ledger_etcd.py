"""The ledger of a fleet: the same records and rules on etcd, so that no two hosts can both decide.

Keys, below a prefix: ``function/UUID`` holds the newest record, ``history/UUID/EPOCH/STATE`` each
one that ever was; values are signed envelopes. A change reads the newest records of all functions
of a move at one revision, applies the rules, and writes if those keys are still at the revision
that was read. Who loses that comparison reads again, and is then answered by the rules: the same
answer if it was its own earlier try that won, ``ledger-conflict`` otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from accelvisor.daemon.etcd import Entry, EtcdClient, Range, beginning_with
from accelvisor.errors import ConflictError, DataError, StateError
from accelvisor.migration.ledger import (
    SETTLED,
    Operation,
    Record,
    Signed,
    Signer,
    Transfer,
    Verdict,
    decide,
    decide_claim,
    decide_release,
    sign,
    transfer_of,
    verdict,
)

T = TypeVar("T")

PREFIX = b"/accelvisor/ledger/1/"
#: Tries to change something that others keep changing: few hosts ever want the same function.
TRIES = 8

#: Asked before records that were read are believed; raises when their signature is not by a host
#: that may have written them.
Check = Callable[[Signed], None]


def _trust_all(signed: Signed) -> None:
    """etcd's own access control is trusted."""


class EtcdLedger:
    """:class:`accelvisor.migration.ledger.Ledger` on etcd. Each call blocks one of a few threads.

    Args:
        client: whose calls block.
        host: this host's UUID.
        signer: signs what this host writes.
        clock_ns: nanoseconds since 1970.
        check: raises for a record that was not signed by its owner or peer.
    """

    def __init__(
        self,
        client: EtcdClient,
        host: str,
        signer: Signer,
        clock_ns: Callable[[], int],
        check: Check = _trust_all,
    ) -> None:
        self._client, self._host, self._signer = client, host, signer
        self._clock_ns, self._check = clock_ns, check
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="etcd")

    async def get(self, function: str) -> Signed | None:
        [entries] = await self._run(lambda: self._client.read([Range(_newest(function))]))
        return self._open(entries[0]) if entries else None

    async def claim(self, function: str) -> Signed:
        return await self._run(lambda: self._alone(decide_claim, function))

    async def release(self, function: str) -> Signed:
        return await self._run(lambda: self._alone(decide_release, function))

    async def prepare(self, transfer: Transfer) -> tuple[Signed, ...]:
        return await self._run(lambda: self._change(Operation.PREPARE, transfer))

    async def commit(self, transfer: Transfer) -> Verdict:
        records = await self._run(lambda: self._change(Operation.COMMIT, transfer))
        return verdict(transfer, records)

    async def abort(self, transfer: Transfer) -> Verdict:
        records = await self._run(lambda: self._change(Operation.ABORT, transfer))
        return verdict(transfer, records)

    async def adopt(self, records: Sequence[Signed]) -> None:
        """Nothing is written: what was committed is here, or it was not committed.

        Raises:
            ConflictError: ``ledger-not-owner``.
        """
        for given in transfer_of(records).items:
            known = await self.get(given.function)
            record = known.record if known else None
            if record is None or record.epoch != given.epoch or not record.runs_at(self._host):
                raise ConflictError(
                    f"etcd does not say that this host owns function {given.function}"
                    f" at epoch {given.epoch}",
                    code="ledger-not-owner",
                    where="ledger",
                )

    async def history(self, function: str) -> tuple[Signed, ...]:
        [entries] = await self._run(
            lambda: self._client.read([beginning_with(_history(function))])
        )
        return tuple(map(self._open, sorted(entries, key=lambda entry: entry.revision)))

    async def floor(self, function: str) -> int:
        newest = await self.get(function)
        return newest.record.epoch if newest else 0

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- inside ----------------------------------------------------------------------------------

    def _alone(self, rule: Callable[..., tuple[Record, bool]], function: str) -> Signed:
        for _ in range(TRIES):
            [entries] = self._client.read([Range(_newest(function))])
            known = self._open(entries[0]) if entries else None
            latest = known.record if known else None
            record, new = rule(function, self._host, latest, self._clock_ns())
            if known and not new:
                return known
            signed = sign(self._signer, record)
            expected = {_newest(function): entries[0].revision if entries else 0}
            if self._client.swap(expected, _puts([signed])):
                return signed
        raise _crowded()

    def _change(self, operation: Operation, transfer: Transfer) -> tuple[Signed, ...]:
        for _ in range(TRIES):
            asked: list[Range] = []
            for item in transfer.items:
                asked.append(Range(_newest(item.function)))
                asked.append(beginning_with(_history(item.function, item.epoch)))
            found = self._client.read(asked)
            answers, fresh, expected = [], [], {}
            for number, item in enumerate(transfer.items):
                newest, of_epoch = found[2 * number], found[2 * number + 1]
                latest = self._open(newest[0]) if newest else None
                at = self._decided(of_epoch)
                record, new = decide(
                    operation,
                    transfer,
                    item,
                    latest.record if latest else None,
                    at.record if at else None,
                    self._clock_ns(),
                )
                expected[_newest(item.function)] = newest[0].revision if newest else 0
                known = at or latest
                if new or known is None:
                    known = sign(self._signer, record)
                    fresh.append(known)
                answers.append(known)
            if not fresh or self._client.swap(expected, _puts(fresh)):
                return tuple(answers)
        raise _crowded()

    def _decided(self, entries: Sequence[Entry]) -> Signed | None:
        """Of one epoch's records the one that counts: the decision, else the preparation."""
        opened = [self._open(entry) for entry in entries]
        opened.sort(key=lambda signed: signed.record.state in SETTLED)
        return opened[-1] if opened else None

    def _open(self, entry: Entry) -> Signed:
        try:
            signed = Signed.open(entry.value)
            if entry.key not in _puts([signed]):
                raise DataError("it lies under another function's key", code="ledger-record")
            self._check(signed)
        except DataError as error:
            raise StateError(
                f"etcd holds what is no record of ours: {error}",
                code="ledger-damaged",
                where=f"ledger:{entry.key.decode(errors='replace')}",
                hint="look at who may write to etcd below /accelvisor",
            ) from error
        return signed

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _newest(function: str) -> bytes:
    return PREFIX + b"function/" + function.encode()


def _history(function: str, epoch: int | None = None) -> bytes:
    start = PREFIX + b"history/" + function.encode() + b"/"
    return start if epoch is None else start + b"%020d/" % epoch


def _puts(records: Sequence[Signed]) -> dict[bytes, bytes]:
    puts = {}
    for signed in records:
        record = signed.record
        puts[_newest(record.function)] = signed.envelope
        step = _history(record.function, record.epoch) + record.state.value.encode()
        puts[step] = signed.envelope
    return puts


def _crowded() -> ConflictError:
    return ConflictError(
        "the ledger changed at each try",
        code="ledger-conflict",
        where="ledger",
        hint="too many hosts want the function; try again",
    )
