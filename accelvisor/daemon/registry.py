"""The functions as the daemon sees them: a mirror of the store that the loop may read at any time.

Every change is committed first, on the store's own thread, then shown here, then published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import ParamSpec, TypeVar

from accelvisor.daemon.events import EventHub
from accelvisor.daemon.rows import Change
from accelvisor.daemon.store import EventRecord, Function, Store
from accelvisor.errors import NotFoundError
from accelvisor.isolation.resources import Placement

P = ParamSpec("P")
T = TypeVar("T")


class Registry:
    """All functions of this host.

    Args:
        store: the database; from now on used through this registry only.
        database: an executor of one thread.
        hub: told of every event after it was committed.
    """

    def __init__(self, store: Store, database: Executor, hub: EventHub) -> None:
        self._store = store
        self._database = database
        self._hub = hub
        self._functions: dict[str, Function] = {}
        self._changes: dict[str, Change] = {}

    async def load(self) -> None:
        """Read the store; once, before anything else."""
        self._functions = {item.uuid: item for item in await self._call(self._store.functions)}
        self._changes = {item.function: item for item in await self._call(self._store.changes)}

    def all(self) -> list[Function]:
        return list(self._functions.values())

    def held(self) -> list[Placement]:
        """What no other function may have: what a change leaves behind too, until it is made."""
        return [*self.placements().values(), *(c.after for c in self._changes.values())]

    def placements(self) -> dict[str, Placement]:
        """By UUID."""
        return {item.uuid: item.placement for item in self._functions.values()}

    def change(self, uuid: str) -> Change | None:
        """One that has begun."""
        return self._changes.get(uuid)

    async def begin_change(self, change: Change) -> None:
        """Raises ConflictError (``change-unfinished``)."""
        await self._call(self._store.begin_change, change)
        self._changes[change.function] = change

    async def end_change(self, function: Function, kind: str, message: str) -> None:
        record = await self._call(self._store.end_change, function, kind, message)
        self._changes.pop(function.uuid, None)
        self._functions[function.uuid] = function
        self._hub.publish(record)

    async def add_scrub(self, function: str, epoch: int, envelope: bytes) -> None:
        await self._call(self._store.add_scrub, function, epoch, envelope)

    async def scrubs(self, function: str) -> list[tuple[int, bytes]]:
        """(epoch, envelope), newest first."""
        return await self._call(self._store.scrubs, function)

    async def cards(self) -> list[tuple[str, str, int, bytes | None]]:
        """(name, state, number, envelope) of those that are, or were, cut once."""
        return await self._call(self._store.cards)

    async def set_card(
        self, name: str, state: str, number: int, envelope: bytes | None, message: str
    ) -> None:
        record = await self._call(
            self._store.set_card, name, state, number, envelope, message
        )
        self._hub.publish(record)

    async def chips(self) -> list[tuple[str, int, str]]:
        """(card, chip, mode) of those of which the operator said something."""
        return await self._call(self._store.chips)

    async def set_chip(self, card: str, chip: int, mode: str, message: str) -> None:
        self._hub.publish(await self._call(self._store.set_chip, card, chip, mode, message))

    def get(self, uuid: str) -> Function | None:
        return self._functions.get(uuid)

    def find(self, key: str) -> Function:
        """By UUID or name. Raises NotFoundError (``function-not-found``)."""
        for item in self._functions.values():
            if key in (item.uuid, item.name):
                return item
        raise NotFoundError(
            f'there is no function "{key}"',
            code="function-not-found",
            where="functions",
            hint="accelctl function list",
        )

    async def insert(self, function: Function, message: str) -> None:
        """Raises ConflictError (``function-exists``)."""
        record = await self._call(self._store.insert, function, message)
        self._functions[function.uuid] = function
        self._hub.publish(record)

    async def commit(self, function: Function, kind: str, message: str) -> None:
        known = self._functions.get(function.uuid)
        tenant = function.domain_uuid or (known.tenant if known is not None else None)
        function = replace(function, tenant=tenant)
        record = await self._call(self._store.update, function, kind, message)
        self._functions[function.uuid] = function
        self._hub.publish(record)

    async def clean(self, function: Function, message: str) -> None:
        """It was scrubbed: nobody's data is in it."""
        function = replace(function, tenant=None)
        record = await self._call(self._store.update, function, "function-scrubbed", message)
        self._functions[function.uuid] = function
        self._hub.publish(record)

    def touch(self, function: Function) -> None:
        """Show the same row as another object: whoever planned with the old one plans anew."""
        self._functions[function.uuid] = replace(function)

    async def remove(self, uuid: str, message: str) -> None:
        record = await self._call(self._store.delete, uuid, message)
        self._functions.pop(uuid, None)
        self._changes.pop(uuid, None)
        self._hub.publish(record)

    async def record(self, kind: str, subject: str, message: str) -> None:
        """An event that changes no function."""
        self._hub.publish(await self._call(self._store.record, kind, subject, message))

    async def events(self, after: int | None, limit: int) -> Sequence[EventRecord]:
        return await self._call(self._store.events, after, limit)

    async def boot_id(self) -> str | None:
        """The boot in which the store was last used."""
        return await self._call(self._store.boot_id)

    async def set_boot_id(self, boot_id: str) -> None:
        await self._call(self._store.set_boot_id, boot_id)

    async def host_uuid(self, fresh: Callable[[], str]) -> str:
        return await self._call(self._store.host_uuid, fresh)

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._database, lambda: work(*args, **kwargs))
