"""Static functions to VMs: who holds which partition, who waits for one, and the way to it.

A partition is held by one VM from the moment it is granted until no function fills it any more,
whatever ended that function. Who waits holds nothing but a place in the queue, and loses it by
going away. After a restart the partitions are held by those whose functions are in the store;
nobody waits then, since a waiting call ends with the daemon that it asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from accelvisor.daemon import attach, cutting, wire
from accelvisor.daemon.cutting import Cutting
from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, CapacityError, ConflictError
from accelvisor.hypervisor.port import Attachment, Domain
from accelvisor.isolation.exhaustion import (
    Candidate,
    Denied,
    Granted,
    Migrate,
    OnExhaustion,
    Slot,
    Waiters,
)
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
#: Between two signs of life to one that waits (seconds).
ALIVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a VM's operator asks for.

    Attributes:
        card: None for any.
        timeout_s: how long it waits at most; None for as long as it may.
        live, persistent: as of :func:`accelvisor.daemon.attach.attach`.
    """

    domain: str
    card: str | None = None
    policy: OnExhaustion = OnExhaustion.DENY
    timeout_s: float | None = None
    live: bool | None = None
    persistent: bool | None = None


class Abroad(Protocol):
    """The other hosts."""

    async def candidates(self, domain: Domain) -> Sequence[Candidate]:
        """Those that were asked. Raises nothing for one that does not answer."""

    def go(
        self, domain: Domain, candidates: Sequence[Candidate], wish: Wish
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Move the VM to one of them, and have it given a function there: steps as of
        :meth:`Assigning.attach`.
        """


class Assigning:
    """One per daemon. Is a :class:`accelvisor.daemon.cutting.Slots`."""

    def __init__(self, functions: Functions, cuts: Cutting, links: DomainsLink[Any]) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._cutting = cuts
        self._links = links
        self._waiters = Waiters()
        self._futures: dict[str, asyncio.Future[Slot]] = {}
        self._names: dict[str, str] = {}
        #: Held, and no function has to be there: one is being made, or attached.
        self._busy: set[Slot] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.abroad: Abroad | None = None

    async def begin(self) -> None:
        """Take over what the store says; functions that were made for a VM and never given to it
        are ended. From here on it is asked before a domain gets any function.
        """
        every = {
            Slot(card, index)
            for card, number in self._cutting.enabled().items()
            for index in range(number)
        }
        held = {slot: who for slot, who in self._filled().items() if slot in every}
        self._waiters = Waiters(every - set(held), held)
        functions = self._functions
        removed, scrub = functions.on_removed, functions.scrub

        async def on_removed(uuid: str) -> None:
            self._sweep()
            await removed(uuid)

        async def before_owner(function: Function, domain_uuid: str) -> Function:
            self._require_its_own(function, domain_uuid)
            return await scrub(function, domain_uuid)

        functions.on_removed, functions.scrub = on_removed, before_owner
        for function in self._registry.all():
            if function.partition is not None and function.uuid not in functions.held:
                await functions.carry(self._end_unused(function.uuid, "no VM got it"))

    def stop(self) -> None:
        """Nobody is told of a deadline any more."""
        if self._timer is not None:
            self._timer.cancel()

    # --- a VM wants one ---------------------------------------------------------------------------

    async def attach(self, wish: Wish) -> AsyncGenerator[dict[str, Any], None]:
        """Give a VM a static function. Steps: ``waiting`` (its place in the queue, now and then),
        ``progress`` and ``report`` of a move, ``assigned`` at the end. A caller that goes away
        waits no more; what was granted is carried to its end.

        Raises:
            ConflictError: ``one-function-per-vm``, ``card-not-static``, ``card-table-changed``, and
                what :func:`accelvisor.daemon.attach.attach` raises: the VM has no function then.
            CapacityError: ``no-function-free``, ``waiters-full``, ``no-room``.
        """
        domain = await self._links.call(lambda port: port.get(wish.domain))
        self._require_none(domain)
        self._require_cards(wish)
        candidates: Sequence[Candidate] = ()
        if wish.policy is OnExhaustion.MIGRATE and not self._could_have(wish):
            candidates = await self._candidates(domain)
        now = self._now()
        limit = LIMITS.function_wait_s if wish.timeout_s is None else wish.timeout_s
        answer = self._waiters.ask(
            domain.uuid, wish.policy, now + limit, now, candidates, wish.card
        )
        if isinstance(answer, Denied):
            raise _named(answer.error, domain, candidates)
        if isinstance(answer, Migrate):
            if self.abroad is not None:
                async with aclosing(self.abroad.go(domain, answer.candidates, wish)) as steps:
                    async for step in steps:
                        yield step
            return
        self._names[domain.uuid] = domain.name
        if isinstance(answer, Granted):
            slot = answer.slot
            self._busy.add(slot)
        else:
            future = self._line_up(domain.uuid)
            async with aclosing(self._wait(domain.uuid, future)) as positions:
                async for position in positions:
                    yield {"waiting": position}
            slot = future.result()
        # From here on it is carried to its end: nothing may wait in between.
        yield {"assigned": await self._functions.carry(self._give(slot, domain, wish))}

    async def _candidates(self, domain: Domain) -> Sequence[Candidate]:
        return () if self.abroad is None else await self.abroad.candidates(domain)

    def _line_up(self, who: str) -> asyncio.Future[Slot]:
        future = self._futures[who] = asyncio.get_running_loop().create_future()
        self._arm()
        return future

    async def _wait(self, who: str, future: asyncio.Future[Slot]) -> AsyncGenerator[int, None]:
        """Its place in the queue, now and then, until ``future`` has what came of it."""
        served = False
        try:
            while not future.done():
                yield self._waiters.waiting.index(who) + 1
                await asyncio.wait((future,), timeout=ALIVE_S)
            served = True
        finally:
            if self._futures.get(who) is future:
                self._leave(who)
                self._waiters.withdraw(who)
                self._arm()
            elif not served and future.exception() is None:
                self._done_with(future.result())  # it went in the moment in which it was served

    def _leave(self, who: str) -> asyncio.Future[Slot]:
        """It waits no more, and has nothing."""
        self._names.pop(who, None)
        return self._futures.pop(who)

    async def _give(self, slot: Slot, domain: Domain, wish: Wish) -> dict[str, Any]:
        try:
            function = await self._make(slot, domain)
            try:
                done = await attach.attach(
                    self._functions, self._links, domain.uuid, function.uuid,
                    wish.live, wish.persistent,
                )  # fmt: skip
            except Exception:
                await self._end_unused(function.uuid, f"VM {domain.name} could not get it")
                raise
            return _assigned(slot, done)
        finally:
            self._done_with(slot)

    async def _make(self, slot: Slot, domain: Domain) -> Function:
        self._require_none(domain)  # it may have waited for hours
        try:
            table = self._cutting.table(slot.card)
        except AccelvisorError:
            self._cutting.check()
            raise
        if len(self._registry.all()) >= LIMITS.functions:
            raise CapacityError(
                f"this host has {LIMITS.functions} functions, the maximum",
                code="no-room",
                where="planner",
                hint="delete one that nobody needs (accelctl function list)",
            )
        size = cutting.profile(table, slot.index)
        return await self._functions.fill(size, table.placement(slot.index), slot.index)

    async def _end_unused(self, uuid: str, why: str) -> None:
        """A static function is for one VM: if that did not get it, nobody does."""
        async with self._functions.lock(uuid):
            function = self._registry.get(uuid)
            if function is None or function.domain_uuid is not None:
                return
            if function.state in (State.READY, State.FAILED):
                try:
                    await self._functions.end(function, f"{function.name} is static, and {why}")
                except AccelvisorError as error:
                    LOG.error("ending function %s: %s", uuid, error.message)

    # --- what is asked before ---------------------------------------------------------------------

    def _require_none(self, domain: Domain) -> None:
        mine = [item for item in self._registry.all() if item.domain_uuid == domain.uuid]
        names = [item.name for item in mine]
        names += [*domain.live_functions, *domain.persistent_functions] if not names else []
        if names:
            raise _second(domain.name, f"has function {names[0]}")

    def _require_cards(self, wish: Wish) -> None:
        """There is a card that it could have a function of. Each use looks at the tables."""
        self._cutting.check()
        if wish.policy is OnExhaustion.MIGRATE and wish.card is None:
            return
        if wish.card is not None:
            self._cutting.table(wish.card)
            return
        wrong = [self._cutting.wrong(card) for card in self._cutting.enabled()]
        if not wrong:
            raise cutting.not_static(None)
        first = wrong[0]
        if first is not None and all(wrong):
            raise first

    def _could_have(self, wish: Wish) -> bool:
        return any(wish.card in (None, slot.card) for slot in self._waiters.free)

    def _require_its_own(self, function: Function, domain_uuid: str) -> None:
        """Before a domain gets a function, by whatever way: a static one is for the VM that it was
        made for, and that has no other.
        """
        held = self._waiters.held
        if function.partition is None:
            if domain_uuid in held.values():
                raise _second(domain_uuid, "has a static function")
            return
        if held.get(Slot(function.card, function.partition)) != domain_uuid:
            raise ConflictError(
                f'function "{function.name}" is static: it was made for another VM',
                code="function-in-use",
                where=f"function:{function.name}",
                hint=f"accelctl attach VM --card {function.card} takes a partition of its own",
            )

    # --- slots ------------------------------------------------------------------------------------

    def added(self, card: str, slots: Sequence[Slot]) -> None:
        """A card was enabled: who waits longest is served first."""
        self._grant(self._waiters.added(slots, self._now()))

    def removed(self, card: str) -> Sequence[Slot]:
        """A card is to be disabled. ConflictError ``card-in-use``; else the slots that it had."""
        return self._waiters.removed(card)

    def judged(self, card: str, *, sound: bool) -> None:
        """Whether its slots may be given to anybody."""
        if sound:
            self._grant(self._waiters.allow(card, self._now()))
        else:
            self._waiters.withhold(card)

    def free(self, card: str | None = None) -> Sequence[Slot]:
        """What could be had now."""
        return [slot for slot in self._waiters.free if card in (None, slot.card)]

    def view(self, card: str) -> dict[str, Any]:
        """Of the Admin interface's Card: what is static about it."""
        number = self._cutting.enabled().get(card, 0)
        error = self._cutting.wrong(card) if number else None
        functions = {
            item.partition: item
            for item in self._registry.all()
            if item.card == card and item.partition is not None
        }
        holders = []
        for slot, who in sorted(self._waiters.held.items()):
            function = functions.get(slot.index)
            if slot.card == card:
                name = function.domain if function is not None else self._names.get(who)
                holders.append(
                    {
                        "partition": slot.index,
                        "domain_uuid": who,
                        "domain": name or "",
                        "function": function.uuid if function is not None else None,
                    }
                )
        return {
            "mode": "static" if number else "dynamic",
            "partitions": number,
            "partitions_free": [slot.index for slot in self.free(card)],
            "table_digest": self._cutting.digest(card) if number else "",
            "problem": "" if error is None else error.message,
            "holders": holders,
            "waiting": [
                self._names.get(who, who) for who in self._waiters.waiting_for(card)
            ],
        }

    # --- inside -----------------------------------------------------------------------------------

    def _filled(self) -> dict[Slot, str]:
        """The slots that functions fill, also those that come or go, with the VM of each."""
        return {
            Slot(item.card, item.partition): item.domain_uuid or item.tenant or item.uuid
            for item in self._registry.all()
            if item.partition is not None
        }

    def _done_with(self, slot: Slot) -> None:
        self._busy.discard(slot)
        self._names.pop(self._waiters.held.get(slot, ""), None)
        self._sweep()

    def _sweep(self) -> None:
        """Give on what is held and which nothing fills any more."""
        filled = self._filled()
        for slot in list(self._waiters.held):
            if slot not in filled and slot not in self._busy:
                who = self._waiters.released(slot, self._now())
                if who is not None:
                    self._grant({slot: who})
        self._arm()

    def _grant(self, given: Mapping[Slot, str]) -> None:
        for slot, who in given.items():
            self._busy.add(slot)
            self._futures.pop(who).set_result(slot)

    def _arm(self) -> None:
        """Be called at the next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._waiters.next_deadline
        if deadline is not None and deadline != math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(deadline, loop.time()), self._expire)

    def _expire(self) -> None:
        for who in self._waiters.expired(self._now()):
            error = CapacityError(
                f'VM "{self._names.get(who, who)}": no static function became free in time',
                code="no-function-free",
                where=f"domain:{who}",
                hint="accelctl card show says who has them",
            )
            self._leave(who).set_exception(error)
        self._arm()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _assigned(slot: Slot, done: Attachment) -> dict[str, Any]:
    return {
        "host": None,
        "card": slot.card,
        "partition": slot.index,
        "function": done.function,
        "attachment": wire.attachment(done),
    }


def _second(name: str, why: str) -> ConflictError:
    return ConflictError(
        f'VM "{name}" {why}, and a VM with a static function has no other',
        code="one-function-per-vm",
        where=f"domain:{name}",
        hint="detach the other first, or use a card whose functions are not static",
    )


def _named(
    error: AccelvisorError, domain: Domain, candidates: Sequence[Candidate]
) -> AccelvisorError:
    """The same with the VM's name in the place of its UUID, and with the hosts that were asked."""
    said = [
        f"host {item.host} has {item.free} free" if item.trusted else f"host {item.host}: no answer"
        for item in candidates
    ]
    words = "; ".join([error.message.replace(domain.uuid, domain.name), *said])
    return type(error)(words, code=error.code, where=error.where, hint=error.hint)
