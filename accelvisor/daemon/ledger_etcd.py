"""The ledger of a fleet: the same records and rules on etcd, so that no two hosts can both decide.

Keys, below a prefix: ``function/UUID`` holds the newest record, ``history/UUID/EPOCH/STATE`` each
one that ever was; values are signed envelopes. A change reads the newest records of all functions
of a move at one revision, applies the rules, and writes if those keys are still at the revision
that was read. Who loses that comparison reads again, and is then answered by the rules: the same
answer if it was its own earlier try that won, ``ledger-conflict`` otherwise.

What is read counts only if the newest record is the last of the history, and if the history follows
from what this host saw last (:mod:`accelvisor.migration.succession`). So a read brings what was
written since, however much that is: in pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from accelvisor.daemon.etcd import Entry, EtcdClient, Range, beginning_with
from accelvisor.daemon.ledger_seen import Seen
from accelvisor.errors import ConflictError, DataError, StateError
from accelvisor.migration import succession
from accelvisor.migration.ledger import (
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

#: Records of one function in one answer: those of all functions of a move fit into one together.
#: An epoch has five of them at most, one for each state.
PAGE = 64
#: Of a function that this host has never seen: most have no longer history.
FIRST = 16


def _trust_all(signed: Signed) -> succession.Hand:
    """etcd's own access control is trusted."""
    return succession.Hand.RIGHT


@dataclass(frozen=True, slots=True)
class _Found:
    """What etcd has of one function, and the revision of its newest record (0: none)."""

    latest: Signed | None
    at: Signed | None
    revision: int


class EtcdLedger:
    """:class:`accelvisor.migration.ledger.Ledger` on etcd. Each call blocks one of a few threads.

    Args:
        client: whose calls block.
        host: this host's UUID.
        signer: signs what this host writes.
        clock_ns: nanoseconds since 1970.
        judge: says who signed a record.
        seen: the newest records that this host has seen; closed with the ledger.
    """

    def __init__(
        self,
        client: EtcdClient,
        host: str,
        signer: Signer,
        clock_ns: Callable[[], int],
        judge: succession.Judge = _trust_all,
        seen: Seen | None = None,
    ) -> None:
        self._client, self._host, self._signer = client, host, signer
        self._clock_ns, self._judge = clock_ns, judge
        self._seen = seen or Seen()
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="etcd")

    async def get(self, function: str) -> Signed | None:
        [found] = await self._run(lambda: self._read([(function, None)]))
        return found.latest

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
        entries = await self._run(lambda: list(self._pages(function)))
        return tuple(map(self._open, sorted(entries, key=lambda entry: entry.revision)))

    async def floor(self, function: str) -> int:
        newest = await self.get(function)
        return newest.record.epoch if newest else 0

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._seen.close()

    # --- inside ----------------------------------------------------------------------------------

    def _alone(self, rule: Callable[..., tuple[Record, bool]], function: str) -> Signed:
        for _ in range(TRIES):
            [found] = self._read([(function, None)])
            latest = found.latest.record if found.latest else None
            record, new = rule(function, self._host, latest, self._clock_ns())
            if found.latest and not new:
                return found.latest
            signed = sign(self._signer, record)
            if self._write({_newest(function): found.revision}, [signed]):
                return signed
        raise _crowded()

    def _change(self, operation: Operation, transfer: Transfer) -> tuple[Signed, ...]:
        for _ in range(TRIES):
            answers, fresh, expected = [], [], {}
            every = self._read([(item.function, item.epoch) for item in transfer.items])
            for item, found in zip(transfer.items, every, strict=True):
                record, new = decide(
                    operation,
                    transfer,
                    item,
                    found.latest.record if found.latest else None,
                    found.at.record if found.at else None,
                    self._clock_ns(),
                )
                expected[_newest(item.function)] = found.revision
                known = found.at or found.latest
                if new or known is None:
                    known = sign(self._signer, record)
                    fresh.append(known)
                answers.append(known)
            if not fresh or self._write(expected, fresh):
                return tuple(answers)
        raise _crowded()

    def _write(self, expected: dict[bytes, int], records: Sequence[Signed]) -> bool:
        if not self._client.swap(expected, _puts(records)):
            return False
        for signed in records:
            self._seen.saw(signed)
        return True

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, asked: Sequence[tuple[str, int | None]]) -> list[_Found]:
        """Functions, and the epoch of each that is of interest, all at one revision."""
        while True:
            # Before etcd is asked: it must show at least this.
            seen = [self._seen.get(function) for function, _ in asked]
            ranges: list[Range] = []
            for (function, epoch), known in zip(asked, seen, strict=True):
                of_epoch = beginning_with(_history(function, epoch or 0))  # none is 0
                ranges += [Range(_newest(function)), _since(function, known), of_epoch]
            answers = iter(self._client.read(ranges))
            found = [
                self._found(known, next(answers), next(answers), next(answers)) for known in seen
            ]
            if None not in found:
                return [one for one in found if one is not None]

    def _found(
        self,
        known: Signed | None,
        newest: Sequence[Entry],
        since: Sequence[Entry],
        of_epoch: Sequence[Entry],
    ) -> _Found | None:
        """None: there is more to be read."""
        latest = self._open(newest[0]) if newest else None
        records = sorted(map(self._open, since), key=lambda signed: signed.record.epoch)
        more = known is not None and len(since) == PAGE
        if more:  # of the last epoch there may be more, too
            records = [r for r in records if r.record.epoch < records[-1].record.epoch]
        elif known is None and len(since) == FIRST:  # and of the first
            records = [r for r in records if r.record.epoch > records[0].record.epoch]
        last = succession.follow(known, records, self._judge)
        if last is not None and last != known:
            self._seen.saw(last)
        if more:
            return None
        if last != latest:
            function = next(s.record.function for s in (last, latest) if s is not None)
            raise succession.rolled_back(function, "the newest is not the last of its history")
        at = succession.settled([self._open(entry) for entry in of_epoch])
        return _Found(latest, at, newest[0].revision if newest else 0)

    def _pages(self, function: str) -> Iterator[Entry]:
        wanted = replace(beginning_with(_history(function)), limit=PAGE)
        while True:
            [entries] = self._client.read([wanted])
            yield from entries
            if len(entries) < PAGE:
                return
            wanted = replace(wanted, key=entries[-1].key + b"\0")

    def _open(self, entry: Entry) -> Signed:
        try:
            signed = Signed.open(entry.value)
            if entry.key not in _puts([signed]):
                raise DataError("it lies under another function's key", code="ledger-record")
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


def _since(function: str, known: Signed | None) -> Range:
    """What was written since ``known``, with its own epoch; else the last records."""
    every = beginning_with(_history(function))
    if known is None:
        return replace(every, limit=FIRST, last=True)
    return replace(every, key=_history(function, known.record.epoch), limit=PAGE)


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
