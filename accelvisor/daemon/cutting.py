"""Cards that are cut once: the partition table is signed when a card is enabled, and frozen.

The row of a card says how far it is (:mod:`accelvisor.isolation.static` has the states), and keeps
what was signed: whose the card is, the number, the table and its digest. Nothing is assigned from a
card unless the table that the configuration gives *now* has that digest and the signature is this
host's own. A table is signed once; what does not match is never signed anew, only told of: the way
back is the old configuration, or to disable the card.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from accelvisor.abi.registers import PAGE, WindowLayout
from accelvisor.daemon import seals
from accelvisor.daemon.chips import Chips
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.seals import Seal
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    StateError,
    UsageError,
)
from accelvisor.frames import canonical
from accelvisor.frames.envelope import SignatureError
from accelvisor.isolation import placing, static
from accelvisor.isolation.exhaustion import Slot
from accelvisor.isolation.resources import Card, Profile
from accelvisor.isolation.sriov import (
    CONTROL,
    NUM_VFS,
    VF_ENABLE,
    VF_MEMORY_SPACE,
    PhysicalFunction,
)
from accelvisor.isolation.static import Event, State, Table
from accelvisor.limits import LIMITS, MIB

LOG = logging.getLogger(__name__)

#: Of a signed partition table.
TYPE = "application/vnd.accelvisor.partition"
#: A table of 256 chips in 64 banks is some kilobytes.
#: A window has at least this size, as those of the built-in profiles.
_WINDOW_BYTES = 16 * MIB

#: The named points after each step, for fault injection in tests.
ENABLE_STEPS = ("card:journaled", "card:signed", "card:committed")
DISABLE_STEPS = ("card:closing", "card:closed")


@dataclass(frozen=True, slots=True)
class Row:
    """What the store has of a card."""

    state: State = State.DISABLED
    number: int = 0
    envelope: bytes | None = None


class Slots(Protocol):
    """Who hands the partitions out."""

    def added(self, card: str, slots: Sequence[Slot]) -> None:
        """A card was enabled."""

    def removed(self, card: str) -> Sequence[Slot]:
        """Take a card's partitions out. ConflictError ``card-in-use``; else which they were."""

    def judged(self, card: str, *, sound: bool) -> None:
        """Whether a card's table is the one that was signed."""


class Cutting:
    """One per daemon.

    Args:
        host: this host's UUID.
    """

    def __init__(self, functions: Functions, host: str) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._host = host
        self._seal: Seal | None = None
        self._slots: Slots | None = None
        self._rows: dict[str, Row] = {}
        self._bad: set[str] = set()
        self.chips = Chips(functions)
        functions.static = self.static

    async def load(self) -> None:
        """Read the rows, and end what was interrupted: enabling is undone, disabling is finished.
        Once, before any function is placed.

        Raises:
            StateError: ``store-damaged``.
        """
        await self.chips.load()
        for name, state, number, table in await self._registry.cards():
            try:
                row = Row(State(state), number, table)
            except ValueError as error:
                raise StateError(
                    f"damaged: the row of card {name}: {error}", code="store-damaged", where="store"
                ) from error
            self._rows[name] = row
            if row.state is State.ENABLING:
                await self._write(name, Row(), "is not cut: that was interrupted")
            elif row.state is State.DISABLING:
                await self._write(name, Row(), "is dynamic again")

    def use(self, seal: Seal, slots: Slots) -> None:
        """The key is there, and whoever hands partitions out; all tables are looked at."""
        self._seal, self._slots = seal, slots
        self.check()

    # --- what is so -------------------------------------------------------------------------------

    def static(self) -> Collection[str]:
        """Names of the cards on which no function of a profile is placed."""
        return {name for name, row in self._rows.items() if row.state is not State.DISABLED}

    def row(self, card: str) -> Row:
        return self._rows.get(card, Row())

    def enabled(self) -> Mapping[str, int]:
        """How many partitions each enabled card has."""
        rows = self._rows.items()
        return {name: row.number for name, row in rows if row.state is State.ENABLED}

    def table(self, card: str) -> Table:
        """The table of an enabled card, after it was compared with what was signed.

        Raises:
            ConflictError: ``card-not-static``, ``card-table-changed``.
        """
        row = self.row(card)
        if row.state is not State.ENABLED:
            raise not_static(card)
        try:
            signed = seals.opened(self._seal, TYPE, row.envelope or b"")
        except (DataError, SignatureError) as error:
            raise _changed(card, f"its signature is not this host's: {error}") from error
        whose = (signed.get("host"), signed.get("card"), signed.get("number"))
        if whose != (self._host, card, row.number):
            raise _changed(card, f"what was signed is of {whose}")
        found = next((item for item in self._functions.cards if item.name == card), None)
        if found is None:
            raise _changed(card, "it is not configured any more")
        try:
            table = static.partition(found, row.number)
        except UsageError as error:
            raise _changed(card, error.message) from error
        document = signed.get("document")
        version = document.get("format") if isinstance(document, Mapping) else None
        version = 1 if version == 1 else static.FORMAT
        same = canonical.encode(table.document(version)) == canonical.encode(document)
        if not same or table.digest(version) != signed.get("digest"):
            raise _changed(card, "its chips, cores, links, memory, queues or vectors are others")
        return table

    def wrong(self, card: str) -> AccelvisorError | None:
        """What :meth:`table` would raise."""
        try:
            self.table(card)
        except AccelvisorError as error:
            return error
        return None

    def check(self) -> None:
        """Look at the tables of all enabled cards, and give out nothing of those that are wrong."""
        for card in self.enabled():
            error = self.wrong(card)
            if error is not None and card not in self._bad:
                LOG.error("%s", error.message)
            (self._bad.discard if error is None else self._bad.add)(card)
            if self._slots is not None:
                self._slots.judged(card, sound=error is None)

    def digest(self, card: str) -> str:
        """The digest that was signed, as the envelope has it; empty without one."""
        try:
            signed = seals.opened(self._seal, TYPE, self.row(card).envelope or b"")
            return str(signed.get("digest", ""))
        except (DataError, SignatureError):
            return ""

    def physical(self, card: str) -> PhysicalFunction:
        """The PF of a card as it is now: its configuration space follows the row.

        Raises:
            NotFoundError: ``card-not-found``.
        """
        found = self._card(card)
        row = self.row(card)
        number = row.number if row.state is State.ENABLED else 0
        bus = list(self._functions.cards).index(found) + 1
        # As the functions have it; before there are any, as the largest would have it.
        window = window_bytes(min(found.queues // (number or 1), LIMITS.queues))
        made = PhysicalFunction(found.functions, window, bus << 8)
        if number:
            made.write(NUM_VFS, number.to_bytes(2, "little"))
            enabled = VF_ENABLE | VF_MEMORY_SPACE
            made.write(CONTROL, enabled.to_bytes(2, "little"))
        return made

    # --- cutting ----------------------------------------------------------------------------------

    async def set_number(self, card: str, number: int) -> None:
        """Cut a card into so many static functions, or with 0 make it dynamic again.

        Raises:
            NotFoundError: ``card-not-found``.
            UsageError: ``functions-count``.
            ConflictError: ``card-in-use``, ``card-enabled``, ``card-changing``.
        """
        await self._functions.carry(self._set(card, number))

    async def _set(self, card: str, number: int) -> None:
        # Nothing is placed meanwhile, so what is counted stays true.
        async with self._functions.placing:
            if number:
                await self._enable(self._card(card), number)
            else:
                if card not in self._rows:
                    self._card(card)
                await self._disable(card)

    async def _enable(self, card: Card, number: int) -> None:
        row, name = self.row(card.name), card.name
        if row.state is State.ENABLED and row.number == number:
            self.table(name)
            return
        static.move(row.state, Event.SET_NUMBER, name, 0)
        table = static.partition(card, number)
        _require_function(table)
        state = static.move(row.state, Event.ENABLE, name, self._count(name))
        fault = self._functions.world.fault
        await self._write(name, Row(state, number), f"is being cut into {number}")
        fault("card:journaled")
        try:
            sealed = self._signed(table)
            fault("card:signed")
            state = static.move(state, Event.ENABLED, name, 0)
            made = Row(state, number, sealed)
            await self._write(name, made, f"is cut into {number}: {table.digest()}")
        except Exception:
            state = static.move(State.ENABLING, Event.FAILED, name, 0)
            await self._write(name, Row(state), "is not cut: that failed")
            raise
        fault("card:committed")
        if self._slots is not None:
            self._slots.added(name, [Slot(name, index) for index in range(number)])

    async def _disable(self, name: str) -> None:
        row = self.row(name)
        state = static.move(row.state, Event.DISABLE, name, self._count(name))
        if state is State.DISABLED:
            return
        gone = self._slots.removed(name) if self._slots is not None else ()
        try:
            await self._write(name, Row(state, row.number, row.envelope), "is being disabled")
        except Exception:
            if self._slots is not None:
                self._slots.added(name, gone)
            raise
        self._functions.world.fault("card:closing")
        state = static.move(state, Event.DISABLED, name, 0)
        await self._write(name, Row(state), "is dynamic again")
        self._functions.world.fault("card:closed")

    # --- inside -----------------------------------------------------------------------------------

    def _card(self, name: str) -> Card:
        placing.require_card(self._functions.cards, name)
        return next(item for item in self._functions.cards if item.name == name)

    def _count(self, card: str) -> int:
        """Functions that exist on it, or are about to."""
        return sum(item.card == card for item in self._registry.held())

    async def _write(self, card: str, row: Row, words: str) -> None:
        message = f"card {card} {words}"
        await self._registry.set_card(card, row.state.value, row.number, row.envelope, message)
        self._rows[card] = row

    def _signed(self, table: Table) -> bytes:
        if self._seal is None:
            raise RuntimeError("a table cannot be signed yet")
        document = {
            "host": self._host,
            "card": table.card.name,
            "number": table.number,
            "digest": table.digest(),
            "document": table.document(),
        }
        return seals.signed(self._seal, TYPE, document)


def profile(table: Table, index: int) -> Profile:
    """The size of the function that fills partition ``index``: all of it."""
    part = table.parts[index]
    return Profile(
        f"static/{table.number}",
        part.core_count,
        len(part.cores),
        part.memory_bytes,
        window_bytes(part.queues.count),
        part.queues.count,
        LIMITS.ring_entries,
    )


def window_bytes(queues: int) -> int:
    """The smallest window, of at least 16 MiB, that holds the rings and a page for the guest."""
    need = WindowLayout(queues, LIMITS.ring_entries).staging + PAGE
    return max(_WINDOW_BYTES, 1 << (need - 1).bit_length())


def not_static(card: str | None) -> ConflictError:
    """No partition of it can be had: it has none."""
    what = "no card here is" if card is None else f'card "{card}" is not'
    return ConflictError(
        f"{what} cut into static functions",
        code="card-not-static",
        where="cards" if card is None else f"card:{card}",
        hint=f"accelctl card set {card or 'CARD'} --functions N; or accelctl function create",
    )


def _require_function(table: Table) -> None:
    """UsageError ``functions-count``: a part is more than one function can have."""
    part = table.parts[0]
    if part.core_count > LIMITS.cores:
        why = f"{part.core_count} cores, and a function has at most {LIMITS.cores}"
    elif len(part.cores) > LIMITS.chips:
        why = f"{len(part.cores)} chips, and a function has at most {LIMITS.chips}"
    elif part.memory_bytes > LIMITS.memory_bytes:
        why = f"{part.memory_bytes} bytes of memory, at most {LIMITS.memory_bytes}"
    elif max(len(item.ranges) for item in table.parts) > LIMITS.segments:
        why = f"memory in more than {LIMITS.segments} banks"
    else:
        return
    raise UsageError(
        f'card "{table.card.name}" cannot be cut into {table.number} functions:'
        f" each would have {why}",
        code="functions-count",
        where=f"card:{table.card.name}",
        hint="cut it into more",
    )


def _changed(card: str, why: str) -> ConflictError:
    return ConflictError(
        f'card "{card}" is not the one whose partition table was signed: {why}',
        code="card-table-changed",
        where=f"card:{card}",
        hint="configure it as it was; or delete its functions and accelctl card set --functions 0",
    )
