"""Questions to the other hosts that belong to no move: who has a domain, whether it would fit, and
that our keys are new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from accelvisor.daemon.moving.fit import AskFit, Fit
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.peers import AskDomain, Asking, TellRotation
from accelvisor.daemon.moving.places import AskPlace, AskPlaces, Placed
from accelvisor.errors import AccelvisorError, NotFoundError, UnavailableError
from accelvisor.frames.trust import Host
from accelvisor.limits import LIMITS
from accelvisor.migration.link import Handler

#: Of the way to another host: a busy CPU on either side may spoil one of them.
_PROBES = 3
#: Between two questions to a host whose connection broke (seconds).
_AGAIN_S = 0.2


class Neighbours:
    """The hosts that this one trusts."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def source_of(self, domain_uuid: str, hint: str) -> Host:
        """The host that has the functions of a domain.

        Args:
            hint: UUID of the host that should have it; it is asked first. Empty: nobody knows.

        Raises:
            NotFoundError: ``migration-no-source``.
            AccelvisorError: why the host of ``hint`` cannot be asked, when no other one has it.
        """
        hosts = self._keys.peers()
        missing: AccelvisorError | None = None
        for host in [host for host in hosts if host.uuid == hint]:
            try:
                if await self._has(host, domain_uuid):
                    return host
            except AccelvisorError as error:
                missing = error
            hosts.remove(host)
        silent: list[str] = []
        asked = {asyncio.ensure_future(self._has(host, domain_uuid)): host for host in hosts}
        left = set(asked)
        try:
            # A host that is down must not hold up the one that answers.
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    failure = answer.exception()
                    if failure is not None:
                        silent.append(f"{asked[answer].name} ({failure})")
                    elif answer.result():
                        return asked[answer]
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if missing is not None:
            raise missing
        raise NotFoundError(
            "no host that this one trusts has the functions of this domain"
            + "".join(f"; no answer from {name}" for name in silent),
            code="migration-no-source",
            where="migration",
            hint="accelctl trust show; accelctl trust invite and join make hosts trust each other",
        )

    async def _has(self, host: Host, domain_uuid: str) -> bool:
        """Asked again where a connection breaks: what comes of it decides about a whole move."""
        try:
            return await self._has_it(host, domain_uuid)
        except UnavailableError:
            await asyncio.sleep(_AGAIN_S)
            return await self._has_it(host, domain_uuid)

    async def _has_it(self, host: Host, domain_uuid: str) -> bool:
        asking = self._asking(host)
        try:
            return (await asking.ask(AskDomain(domain_uuid))) == b"\1"
        finally:
            await asking.close()

    async def fit(self, host: Host, question: AskFit) -> tuple[Fit, float]:
        """(what a host says, bytes a second of the same question, filled up, and at its quickest).

        Raises:
            as :func:`accelvisor.migration.link.connect`; ProtocolError ``peer-answer``.
        """
        asking = self._asking(host)
        loop = asyncio.get_running_loop()
        try:
            said = await asking.fit(question)
            filled = msgspec.structs.replace(question, filler=bytes(LIMITS.chunk_bytes))
            took = []
            for _ in range(_PROBES):
                began = loop.time()
                await asking.fit(filled)
                took.append(loop.time() - began)
            return said, LIMITS.chunk_bytes / max(min(took), 1e-6)
        finally:
            await asking.close()

    async def places(self, host: Host, domain_uuid: str) -> int:
        """How many static functions a host has for a domain that may come. Raises as :meth:`fit`,
        and ProtocolError ``peer-request`` of one that does not know the question.
        """
        asking = self._asking(host)
        try:
            return (await asking.places(AskPlaces(domain_uuid))).free
        finally:
            await asking.close()

    async def place(self, host: Host, question: AskPlace) -> Placed:
        """The static function that a host gave a domain that came. Raises as :meth:`fit`, and what
        stood in the way there.
        """
        asking = self._asking(host)
        try:
            return await asking.place(question)
        finally:
            await asking.close()

    async def rotate(
        self, hosts: Sequence[Host], rotate: Callable[[], bytes]
    ) -> list[BaseException | None]:
        """Change our keys and tell these hosts; for each what hinders it, or None.

        They are connected to before that: who does not know the new keys yet lets nobody in that
        shows them.
        """
        ways = [self._asking(host) for host in hosts]
        try:
            opened = await asyncio.gather(*(way.open() for way in ways), return_exceptions=True)
            question = TellRotation(rotate())
            found: list[BaseException | None] = []
            for way, link in zip(ways, opened, strict=True):
                if isinstance(link, BaseException):
                    found.append(link)
                    continue
                try:
                    await way.ask(question)
                    found.append(None)
                except AccelvisorError as error:
                    found.append(error)
            return found
        finally:
            await asyncio.gather(*(way.close() for way in ways))

    def _asking(self, host: Host) -> Asking:
        return Asking(self._keys, host, Handler(), lambda: None, lambda: None)
