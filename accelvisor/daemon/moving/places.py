"""Static functions at other hosts: what a host is asked before a VM is moved to it for one, and
then for the function itself.

The second question is answered only for a domain that the same host asked about before, that did
not run here then and runs here now: so a host that is trusted can have functions assigned to what
it brings, and not to what runs here anyway.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from accelvisor.daemon.domains import DomainsLink
from accelvisor.errors import ConflictError, DataError, NotFoundError
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.daemon.assigning import Assigning

Text = Annotated[str, Meta(max_length=LIMITS.migration_text_chars)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]


class AskPlaces(msgspec.Struct, frozen=True, tag="places", forbid_unknown_fields=True):
    """How many static functions are free there; this domain may come for one."""

    domain: Text


class Places(msgspec.Struct, frozen=True):
    """The answer. A newer host may say more."""

    free: Count


class AskPlace(msgspec.Struct, frozen=True, tag="place", forbid_unknown_fields=True):
    """The domain has come: give it one."""

    domain: Text
    live: bool | None = None
    persistent: bool | None = None


class Placed(msgspec.Struct, frozen=True):
    """What it got."""

    function: Text
    card: Text
    partition: Count


class Giving:
    """Answers other hosts. One per daemon."""

    def __init__(self, assigning: Assigning, links: DomainsLink[Any]) -> None:
        self._assigning = assigning
        self._links = links
        #: (host, domain) that may come, the oldest first.
        self._expected: dict[tuple[UUID, str], None] = {}

    async def answer(self, host: UUID, asked: AskPlaces | AskPlace) -> bytes:
        """To a host that is trusted.

        Raises:
            DataError: ``domain-uuid``.
            ConflictError: ``migration-not-asked``; and as :meth:`Assigning.attach`.
        """
        _require_uuid(asked.domain)
        if isinstance(asked, AskPlaces):
            return msgspec.msgpack.encode(await self._places(host, asked))
        return msgspec.msgpack.encode(await self._place(host, asked))

    async def _places(self, host: UUID, asked: AskPlaces) -> Places:
        if await self._here(asked.domain):
            return Places(0)
        key = (host, asked.domain)
        self._expected.pop(key, None)
        self._expected[key] = None
        of_it = [item for item in self._expected if item[0] == host]
        for old in of_it[: max(0, len(of_it) - LIMITS.function_askers)]:
            del self._expected[old]
        return Places(len(self._assigning.free()))

    async def _place(self, host: UUID, asked: AskPlace) -> Placed:
        from accelvisor.daemon.assigning import Wish as Local

        key = (host, asked.domain)
        if key not in self._expected or not await self._here(asked.domain):
            raise ConflictError(
                "that domain did not come from there for a function",
                code="migration-not-asked",
                where=f"domain:{asked.domain}",
                hint="accelctl attach VM --card any, at the host where it runs",
            )
        del self._expected[key]
        wish = Local(asked.domain, live=asked.live, persistent=asked.persistent)
        async with aclosing(self._assigning.attach(wish)) as steps:
            async for step in steps:
                if "assigned" in step:
                    got = step["assigned"]
                    return Placed(got["function"], got["card"], got["partition"])
        raise RuntimeError("a function was neither assigned nor denied")

    async def _here(self, domain: str) -> bool:
        try:
            return (await self._links.call(lambda port: port.get(domain))).state.active
        except NotFoundError:
            return False


def _require_uuid(text: str) -> None:
    """libvirt finds domains by their names, too, and those are anybody's."""
    try:
        if str(UUID(text)) == text:
            return
    except ValueError:
        pass
    raise DataError(f'"{text[:80]}" is no UUID of a domain', code="domain-uuid", where="peer")
