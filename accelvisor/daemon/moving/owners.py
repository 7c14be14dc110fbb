"""Who owns which function: the ledger as moves use it, with this host's keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from accelvisor.daemon.moving.keys import Keys
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    NotFoundError,
    UnavailableError,
)
from accelvisor.frames import envelope as envelopes
from accelvisor.frames.envelope import Envelope, PublicKey, SignatureError
from accelvisor.limits import KIB, LIMITS
from accelvisor.migration import messages as wire
from accelvisor.migration import succession
from accelvisor.migration.ledger import (
    PAYLOAD_TYPE,
    Item,
    Ledger,
    Record,
    Signed,
    Standing,
    Transfer,
)
from accelvisor.migration.succession import Hand

LOG = logging.getLogger(__name__)
_RECORD_BYTES = 4 * KIB
Arbiter = Literal["source", "etcd"]


class KeySigner:
    """Signs ledger records with whatever key this host has then."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def sign(self, payload_type: str, payload: bytes) -> bytes:
        """The envelope's bytes."""
        return envelopes.sign(payload_type, payload, [self._keys.identity]).encode()


class Owners:
    """One host's view of the ledger.

    Args:
        arbiter: who decides about moves: the source's own ledger, or one that all hosts share.
    """

    def __init__(self, ledger: Ledger, keys: Keys, arbiter: Arbiter) -> None:
        self.ledger = ledger
        self.arbiter: Arbiter = arbiter
        self._keys = keys
        #: Until then (the loop's time) a ledger that did not answer is not waited for again.
        self._away_until = 0.0

    async def gone(self, function: str) -> NotFoundError | None:
        """Of a function that is not here: that this host gave it away, and to whom. None when the
        ledger knows nothing of the kind, or cannot be asked.
        """
        try:
            found = await self.ledger.get(function)
        except AccelvisorError:
            return None
        if found is None or found.record.owner == str(self._keys.host):
            return None
        host = self._keys.keyring.effective.host(found.record.owner)
        where = host.name if host is not None else found.record.owner
        return NotFoundError(
            f"function {function} is not here any more: it moved to host {where}",
            code="function-moved",
            where="functions",
            hint="start its domain there, or undefine it here",
        )

    async def next_epoch(self, function: str) -> int:
        """The epoch at which this host, the owner, may give a function away; one that the ledger
        does not know, or knows as deleted, is claimed.

        Raises:
            ConflictError: ``ledger-not-owner``, ``ledger-undecided``.
            UnavailableError: ``ledger-unreachable``.
        """
        return (await self._mine(function, await self.ledger.get(function))).epoch + 1

    async def require_ours(self, function: str, *, known: bool) -> None:
        """Before a domain is let into a function that is here: the ledger names no other host. One
        that no move ever touched is in no ledger.

        libvirt may wait for this in its hook. When the ledger does not answer in time, a domain
        that has the function already (``known``) gets it: what moved away is ended here before its
        move is over, so only an old state directory that was put back could be wrong, and hosts
        that start together with their etcd must not wait for each other. To a domain that does
        not have it yet nothing is given meanwhile.

        Raises:
            ConflictError: ``ledger-not-owner``, ``ledger-undecided``.
            UnavailableError: ``ledger-unreachable``, and the domain does not have it.
        """
        loop = asyncio.get_running_loop()
        if known and loop.time() < self._away_until:
            return  # a VM may have many functions, and the hook has one deadline for all
        try:
            async with asyncio.timeout(LIMITS.ledger_admit_s):
                found = await self.ledger.get(function)
                if found is not None:
                    await self._mine(function, found)
        except (TimeoutError, UnavailableError) as error:
            self._away_until = loop.time() + LIMITS.hook_s
            if not known:
                raise UnavailableError(
                    f"the ledger does not answer: whose function {function} is cannot be said",
                    code="ledger-unreachable",
                    where="ledger",
                    hint="until it does, only domains that have their functions already may start",
                ) from error
            LOG.warning("function %s: by its row alone, the ledger does not answer", function)

    async def give_up(self, function: str) -> None:
        """A function is no more here. Whose it is, or where it went, the ledger knows: one that was
        this host's own is nobody's from here on.

        Raises:
            UnavailableError, StateError: the ledger's.
        """
        known = await self.ledger.get(function)
        if known is not None and known.record.runs_at(str(self._keys.host)):
            await self.ledger.release(function)

    async def _mine(self, function: str, found: Signed | None) -> Record:
        """The record that says that this host owns a function; what is nobody's is claimed."""
        if found is None or found.record.state is Standing.RELEASED:
            found = await self.ledger.claim(function)
        record = found.record
        if record.state is Standing.PREPARED:
            raise ConflictError(
                f"a move of function {function} is not decided yet",
                code="ledger-undecided",
                where="ledger",
                hint="it is decided when the other host can be reached",
            )
        if record.owner != str(self._keys.host):
            raise ConflictError(
                f"function {function} belongs to host {record.owner}",
                code="ledger-not-owner",
                where="ledger",
                hint="what is still here of it is of before it moved: delete that",
            )
        return record

    def transfer(self, migration: bytes, other: str, parts: Sequence[wire.Part]) -> Transfer:
        """A move from this host to ``other``."""
        return self._transfer(migration, str(self._keys.host), other, parts)

    def arrival(self, migration: bytes, other: str, parts: Sequence[wire.Part]) -> Transfer:
        """A move from ``other`` to this host."""
        return self._transfer(migration, other, str(self._keys.host), parts)

    @staticmethod
    def _transfer(
        migration: bytes, source: str, destination: str, parts: Sequence[wire.Part]
    ) -> Transfer:
        # Of a move that is known from a journal alone the digest may be, too: then it is empty.
        items = tuple(Item(p.function, p.epoch, p.digest if any(p.digest) else b"") for p in parts)
        return Transfer(migration, source, destination, items)

    async def adopt(self, envelopes_: Sequence[bytes], wanted: Transfer) -> None:
        """The source's signed records say that a move was committed: into our ledger.

        Raises:
            DataError: ``ledger-record``, ``ledger-signature``: they are not the source's, or not
                of this move.
        """
        records = [Signed.open(data) for data in envelopes_]
        for signed, item in zip(records, wanted.items, strict=True):
            self._verify(signed, wanted.source)
            said = signed.record
            same = (said.function, said.epoch, said.migration, said.owner, said.state) == (
                item.function, item.epoch, wanted.migration, wanted.destination,
                Standing.COMMITTED,
            )  # fmt: skip
            if not same:
                raise DataError(
                    "the source's record is of another move", code="ledger-record", where="ledger"
                )
        await self.ledger.adopt(records)

    def _verify(self, signed: Signed, host: str) -> None:
        if host not in signers(self._keys, signed):
            raise _unsigned(host)


def signers(keys: Keys, signed: Signed) -> frozenset[str]:
    """The trusted hosts that signed a record. A revoked key signs for nobody; a retired one does
    for what it signed in its time.

    Raises:
        DataError: ``ledger-signature``: none, or a signature is wrong.
    """
    try:
        return _holders(_opened(signed), keys.keyring.find)
    except SignatureError as error:
        raise _unsigned() from error


def judge(keys: Keys, signed: Signed) -> Hand:
    """By whom a record of a shared ledger is signed: any host may have written it, at any time."""
    ring, opened = keys.keyring, _opened(signed)
    allowed = succession.writers(signed.record)
    used = {signature.key_id for signature in opened.signatures}
    revoked = not used.isdisjoint(ring.document.revoked)
    known = any(ring.once(name) for name in used)
    try:
        right = not allowed.isdisjoint(_holders(opened, ring.once))
    except SignatureError:
        right = False
    if right and not revoked:
        return Hand.RIGHT
    if not allowed <= {host.uuid for host in ring.effective.hosts}:
        return Hand.LEFT
    return Hand.REVOKED if revoked and (right or not known) else Hand.WRONG


def _holders(opened: Envelope, find: Callable[[str], PublicKey | None]) -> frozenset[str]:
    """Raises SignatureError."""
    names = (signature.key_id for signature in opened.signatures)
    known = {name: key for name in names if (key := find(name)) is not None}
    return envelopes.verify(opened, known, 1)


def _opened(signed: Signed) -> Envelope:
    return envelopes.decode(signed.envelope, kind=PAYLOAD_TYPE, max_bytes=_RECORD_BYTES)


def _unsigned(host: str = "") -> DataError:
    whom = f"host {host}" if host else "a host that is trusted"
    return DataError(
        f"the record is not signed by {whom}", code="ledger-signature", where="ledger"
    )
