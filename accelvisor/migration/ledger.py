"""Who owns a function: records, the rules for changing them, and the interface of a ledger. Pure.

A function has one owner at one **epoch**. Each move takes the next epoch, and each epoch is decided
exactly once: *committed* (it belongs to the destination) or *aborted* (it stays; the epoch is
spent). So the epoch is a fencing token: whoever shows a lower one than the ledger's is too late,
and a state that was sealed for an aborted epoch can never run.

======== =============================================================== =======================
state    meaning                                                         may compute
======== =============================================================== =======================
owned    the function was made here                                      the owner
prepared a state is sealed for ``peer``, undecided                       nobody
committed it moved: ``owner`` is the destination, ``peer`` the source    the owner
aborted  the move did not happen: ``owner`` is still the source          the owner
released it was deleted; its UUID may be used again, at the next epoch   nobody
======== =============================================================== =======================

:data:`RULES` says what each operation does to what the ledger holds; :func:`decide` applies it to
one function. Both ledgers (SQLite and etcd) call it inside their own atomic step, and write what it
returns for all functions of a move or for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from types import MappingProxyType
from typing import Protocol

from accelvisor.errors import ConflictError, DataError, StateError
from accelvisor.frames import canonical, envelope
from accelvisor.limits import KIB

PAYLOAD_TYPE = "application/vnd.accelvisor.ledger"
#: A record is about 300 bytes.
_RECORD_BYTES = 4 * KIB
_MAX_EPOCH = 2**63 - 1


class Standing(StrEnum):
    OWNED = "owned"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    RELEASED = "released"


#: What ends an epoch's uncertainty; an epoch has one of them at most.
SETTLED = frozenset(Standing) - {Standing.PREPARED}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a function's history. Hosts and functions are UUIDs in text.

    ``migration`` is 16 bytes, ``digest`` the manifest's 32; both empty where there is none.
    ``time_ns`` is the writer's clock, for people only: nothing is decided by it.
    """

    function: str
    epoch: int
    owner: str
    state: Standing
    migration: bytes = b""
    peer: str = ""
    digest: bytes = b""
    time_ns: int = 0

    def runs_at(self, host: str) -> bool:
        """May the function compute on that host?"""
        runs = (Standing.OWNED, Standing.COMMITTED, Standing.ABORTED)
        return self.owner == host and self.state in runs

    def encode(self) -> bytes:
        """The payload that is signed."""
        return canonical.encode(
            {
                "function": self.function,
                "epoch": self.epoch,
                "owner": self.owner,
                "state": self.state.value,
                "migration": self.migration,
                "peer": self.peer,
                "digest": self.digest,
                "time_ns": self.time_ns,
            }
        )

    @classmethod
    def decode(cls, payload: bytes) -> Record:
        """
        Raises:
            DataError: ``document-invalid``; ``ledger-record``: it is no record.
        """
        value = canonical.decode(payload, max_bytes=_RECORD_BYTES, max_values=32)
        try:
            record = cls(**{**value, "state": Standing(value["state"])})
        except (TypeError, KeyError, ValueError) as error:
            raise _no_record(f"its fields are others: {error}") from error
        record._check()
        return record

    def _check(self) -> None:
        texts = (self.function, self.owner, self.peer)
        if not all(isinstance(text, str) and len(text) <= 64 for text in texts):
            raise _no_record("a UUID is none")
        numbers = (self.epoch, self.time_ns)
        if not all(type(number) is int and 0 <= number <= _MAX_EPOCH for number in numbers):
            raise _no_record("a number is out of range")
        if not (isinstance(self.migration, bytes) and len(self.migration) in (0, 16)):
            raise _no_record("its migration is none")
        if not (isinstance(self.digest, bytes) and len(self.digest) in (0, 32)):
            raise _no_record("its digest is none")
        if self.epoch < 1 or not self.function or not self.owner:
            raise _no_record("it names no function, owner or epoch")


@dataclass(frozen=True, slots=True)
class Signed:
    """A record and the envelope that carries it, signed by the host that wrote it."""

    record: Record
    envelope: bytes

    @classmethod
    def open(cls, data: bytes) -> Signed:
        """What an envelope says. **Nothing is verified**: whoever got it from a peer does that.

        Raises:
            DataError: ``envelope-invalid``, ``document-invalid``, ``ledger-record``.
        """
        opened = envelope.decode(data, kind=PAYLOAD_TYPE, max_bytes=_RECORD_BYTES)
        return cls(Record.decode(opened.payload), data)


class Signer(Protocol):
    """Signs as this host: payload type and payload in, the envelope's bytes out."""

    def sign(self, payload_type: str, payload: bytes) -> bytes: ...


def sign(signer: Signer, record: Record) -> Signed:
    return Signed(record, signer.sign(PAYLOAD_TYPE, record.encode()))


@dataclass(frozen=True, slots=True)
class Item:
    """One function of a move: the epoch that it moves at, the digest of its manifest (empty before
    it is sealed)."""

    function: str
    epoch: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A move as the ledger sees it: all its functions, or none."""

    migration: bytes
    source: str
    destination: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a move was decided, and the records that say so, in the order of its items."""

    committed: bool
    records: tuple[Signed, ...]


class Ledger(Protocol):
    """What both ledgers offer. Every operation can be repeated and then answers the same.

    Raises (all of them):
        UnavailableError: ``ledger-unreachable``. It may have happened, or happen yet: ask again.
        ConflictError: ``ledger-conflict`` and the other codes of :data:`RULES`.
        StateError: ``ledger-damaged``, ``ledger-rollback``.
    """

    async def get(self, function: str) -> Signed | None:
        """The newest record."""

    async def claim(self, function: str) -> Signed:
        """This host has the function: the record that says so. What is new or was released
        becomes its own."""

    async def release(self, function: str) -> Signed:
        """The function was deleted here, by its owner. What the ledger does not know is nobody's
        already, but is written down as well."""

    async def prepare(self, transfer: Transfer) -> tuple[Signed, ...]:
        """This host, the owner, has frozen and is about to seal. Undecided from here on."""

    async def commit(self, transfer: Transfer) -> Verdict:
        """Decide for the destination, unless it was decided."""

    async def abort(self, transfer: Transfer) -> Verdict:
        """Decide for the source, unless it was decided. What was never prepared is spent as well,
        so that a late ``prepare`` cannot come after it."""

    async def adopt(self, records: Sequence[Signed]) -> None:
        """This host is the owner that these committed records name; the caller has verified them.
        They are on disk when it returns."""

    async def history(self, function: str) -> tuple[Signed, ...]:
        """All records, oldest first."""

    async def floor(self, function: str) -> int:
        """The highest epoch ever seen; 0: none. A state of a lower epoch is too old."""


# --- the rules -----------------------------------------------------------------------------------


class Operation(StrEnum):
    CLAIM = "claim"
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    ADOPT = "adopt"


class Found(StrEnum):
    """How what the ledger holds relates to one item of a move."""

    NOTHING = auto()  # it never heard of the function
    READY = auto()  # settled, owned by the source, one epoch before
    FOREIGN = auto()  # settled one epoch before, and somebody else's
    UNDECIDED = auto()  # an earlier epoch is prepared and not decided
    GAP = auto()  # settled, more than one epoch before
    PREPARED = auto()  # this move, undecided
    COMMITTED = auto()  # this move, and it happened
    ABORTED = auto()  # this move, and it did not
    OTHER = auto()  # the epoch is or was another move's
    CHANGED = auto()  # this move, but another state was sealed or other hosts take part


class Do(StrEnum):
    """What to write."""

    PREPARE = auto()
    COMMIT = auto()
    ABORT = auto()
    ADOPT = auto()
    KEEP = auto()  # nothing: that is the answer already
    LOST = auto()  # nothing: the epoch went to another move, so this one never happened


@dataclass(frozen=True, slots=True)
class Refused:
    code: str
    message: str
    hint: str = ""


_CONFLICT = Refused(
    code="ledger-conflict", message="another host or move was first: the ledger has gone on"
)
_UNKNOWN = Refused(
    code="ledger-unknown", message="the ledger does not know the function",
    hint="a function that was made before this ledger was set up is claimed when its daemon starts",
)  # fmt: skip
_NOT_OWNER = Refused(code="ledger-not-owner", message="another host owns the function")
_UNDECIDED = Refused(
    code="ledger-undecided", message="an earlier move of the function is not decided yet"
)
_EPOCH = Refused(code="ledger-epoch", message="it is not the function's next epoch")
_DECIDED = Refused(code="ledger-decided", message="the move has been decided already")
_UNPREPARED = Refused(code="ledger-not-prepared", message="nothing was sealed for this move")
_CHANGED = Refused(
    code="ledger-changed", message="another state, source or destination was prepared for this move"
)

#: operation -> what was found -> what to do. Claims are simpler and are not here.
RULES: Mapping[Operation, Mapping[Found, Do | Refused]] = MappingProxyType(
    {
        Operation.PREPARE: {
            Found.NOTHING: _UNKNOWN, Found.READY: Do.PREPARE, Found.FOREIGN: _NOT_OWNER,
            Found.UNDECIDED: _UNDECIDED, Found.GAP: _EPOCH, Found.PREPARED: Do.KEEP,
            Found.COMMITTED: _DECIDED, Found.ABORTED: _DECIDED, Found.OTHER: _CONFLICT,
            Found.CHANGED: _CHANGED,
        },
        Operation.COMMIT: {
            Found.NOTHING: _UNKNOWN, Found.READY: _UNPREPARED, Found.FOREIGN: _UNPREPARED,
            Found.UNDECIDED: _UNPREPARED, Found.GAP: _UNPREPARED, Found.PREPARED: Do.COMMIT,
            Found.COMMITTED: Do.KEEP, Found.ABORTED: Do.KEEP, Found.OTHER: Do.LOST,
            Found.CHANGED: _CHANGED,
        },
        Operation.ABORT: {
            Found.NOTHING: _UNKNOWN, Found.READY: Do.ABORT, Found.FOREIGN: _NOT_OWNER,
            Found.UNDECIDED: _UNDECIDED, Found.GAP: _EPOCH, Found.PREPARED: Do.ABORT,
            Found.COMMITTED: Do.KEEP, Found.ABORTED: Do.KEEP, Found.OTHER: Do.LOST,
            Found.CHANGED: _CHANGED,
        },
        # A host's own ledger hears of what the peer's decided; a gap is what it did not see.
        Operation.ADOPT: {
            Found.NOTHING: Do.ADOPT, Found.READY: Do.ADOPT, Found.FOREIGN: Do.ADOPT,
            Found.UNDECIDED: _UNDECIDED, Found.GAP: Do.ADOPT, Found.PREPARED: Do.ADOPT,
            Found.COMMITTED: Do.KEEP, Found.ABORTED: _DECIDED, Found.OTHER: _CONFLICT,
            Found.CHANGED: _CHANGED,
        },
    }
)  # fmt: skip


def find(transfer: Transfer, item: Item, latest: Record | None, at: Record | None) -> Found:
    """How the ledger stands to one item.

    Args:
        latest: the function's newest record.
        at: the newest record of the item's epoch; None where the epoch is not used.
    """
    if latest is None:
        return Found.NOTHING
    if at is None:
        if latest.epoch > item.epoch:
            return Found.OTHER
        if latest.state is Standing.PREPARED:
            return Found.UNDECIDED
        if latest.epoch != item.epoch - 1:
            return Found.GAP
        return Found.READY if latest.runs_at(transfer.source) else Found.FOREIGN
    if at.migration != transfer.migration:
        return Found.OTHER
    moved = at.state is Standing.COMMITTED
    hosts = (transfer.destination, transfer.source) if moved else (
        transfer.source, transfer.destination)  # fmt: skip
    # Who aborts may have forgotten what was sealed.
    changed = bool(item.digest and at.digest) and item.digest != at.digest
    if (at.owner, at.peer) != hosts or changed:
        return Found.CHANGED
    return Found[at.state.name]


def decide(
    operation: Operation,
    transfer: Transfer,
    item: Item,
    latest: Record | None,
    at: Record | None,
    time_ns: int,
) -> tuple[Record, bool]:
    """The record that answers ``operation`` for one item, and whether it is new (to be written).

    What is not new is ``at``, or ``latest`` where that is None.

    Raises:
        ConflictError: the codes of :data:`RULES`.
    """
    found = find(transfer, item, latest, at)
    move = RULES[operation][found]
    if isinstance(move, Refused):
        raise ConflictError(
            f"function {item.function}, epoch {item.epoch}: {move.message}",
            code=move.code,
            where="ledger",
            hint=move.hint,
        )
    known = at or latest
    if move in (Do.KEEP, Do.LOST) and known is not None:
        # A lost epoch was never this move's: the newest record shows that it is spent.
        return known, False
    made = Record(
        function=item.function,
        epoch=item.epoch,
        owner=transfer.source,
        state=Standing.PREPARED,
        migration=transfer.migration,
        peer=transfer.destination,
        digest=item.digest or (at.digest if at else b""),
        time_ns=time_ns,
    )
    if move is Do.ABORT:
        made = replace(made, state=Standing.ABORTED)
    elif move in (Do.COMMIT, Do.ADOPT):
        made = replace(
            made, state=Standing.COMMITTED, owner=transfer.destination, peer=transfer.source
        )
    return made, True


def decide_claim(
    function: str, host: str, latest: Record | None, time_ns: int
) -> tuple[Record, bool]:
    """The record that says that ``host`` has a function, and whether it is new.

    Raises:
        ConflictError: ``ledger-conflict``, ``ledger-undecided``.
    """
    if latest is not None and latest.runs_at(host):
        return latest, False
    if latest is None or latest.state is Standing.RELEASED:
        epoch = latest.epoch + 1 if latest else 1
        return Record(function, epoch, host, Standing.OWNED, time_ns=time_ns), True
    raise _not_ours(latest, host)


def decide_release(
    function: str, host: str, latest: Record | None, time_ns: int
) -> tuple[Record, bool]:
    """The record that gives a deleted function up, and whether it is new.

    Raises:
        ConflictError: ``ledger-conflict``, ``ledger-undecided``.
    """
    if latest is not None and latest.state is Standing.RELEASED:
        return latest, False
    if latest is None or latest.runs_at(host):
        epoch = latest.epoch + 1 if latest else 1
        return Record(function, epoch, host, Standing.RELEASED, time_ns=time_ns), True
    raise _not_ours(latest, host)


def _not_ours(latest: Record, host: str) -> ConflictError:
    refused = _UNDECIDED if latest.owner == host else _CONFLICT
    return ConflictError(
        f"function {latest.function} has owner {latest.owner}, epoch {latest.epoch}:"
        f" {refused.message}",
        code=refused.code,
        where="ledger",
    )


def verdict(transfer: Transfer, records: Sequence[Signed]) -> Verdict:
    """What the records of all items say together.

    Raises:
        StateError: ``ledger-damaged``, one was committed and another was not.
    """
    moved = {
        signed.record.state is Standing.COMMITTED
        and signed.record.migration == transfer.migration
        for signed in records
    }
    if len(moved) != 1:
        raise StateError(
            "the functions of one move were decided differently",
            code="ledger-damaged",
            where="ledger",
        )
    return Verdict(moved.pop(), tuple(records))


def transfer_of(records: Sequence[Signed]) -> Transfer:
    """The move that committed records are of, for ``adopt``.

    Raises:
        DataError: ``ledger-record``, they are not the committed records of one move.
    """
    heads = {
        (signed.record.migration, signed.record.owner, signed.record.peer, signed.record.state)
        for signed in records
    }
    if len(heads) != 1:
        raise _no_record("the records are of several moves, or there are none")
    migration, owner, peer, state = heads.pop()
    if state is not Standing.COMMITTED or len(migration) != 16:
        raise _no_record("it does not say that a move was committed")
    items = tuple(Item(s.record.function, s.record.epoch, s.record.digest) for s in records)
    return Transfer(migration, peer, owner, items)


def _no_record(why: str) -> DataError:
    return DataError(f"no ledger record: {why}", code="ledger-record", where="ledger")

