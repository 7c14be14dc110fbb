"""Moving a VM to another host because that one has a static function for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from accelvisor.daemon.assigning import Wish
from accelvisor.daemon.moving.facts import Wish as Move
from accelvisor.daemon.moving.neighbours import Neighbours
from accelvisor.daemon.moving.operator import Operator
from accelvisor.daemon.moving.places import AskPlace
from accelvisor.errors import AccelvisorError, ConflictError
from accelvisor.frames.trust import Host
from accelvisor.hypervisor.port import Domain
from accelvisor.isolation.exhaustion import Candidate

LOG = logging.getLogger(__name__)


class Elsewhere:
    """Asks other hosts. Is an :class:`accelvisor.daemon.assigning.Abroad`.

    Args:
        hosts: those that are trusted now.
    """

    def __init__(
        self, operator: Operator, neighbours: Neighbours, hosts: Callable[[], Sequence[Host]]
    ) -> None:
        self._operator = operator
        self._neighbours = neighbours
        self._hosts = hosts

    async def candidates(self, domain: Domain) -> Sequence[Candidate]:
        """All hosts that are trusted. One that cannot be asked, or does not know the question, has
        none to give.
        """
        named = _named(self._hosts())
        asked = [self._neighbours.places(host, domain.uuid) for host in named.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = []
        for name, answer in zip(named, answers, strict=True):
            if isinstance(answer, int):
                found.append(Candidate(name, answer, trusted=True))
            elif isinstance(answer, AccelvisorError):
                LOG.info("host %s is no candidate: %s", name, answer.message)
                found.append(Candidate(name, 0, trusted=False))
            else:
                raise answer
        return found

    async def go(
        self, domain: Domain, candidates: Sequence[Candidate], wish: Wish
    ) -> AsyncGenerator[dict[str, Any], None]:
        """To the first of ``candidates``, which are ranked, that nothing stands against.

        Raises:
            ConflictError: why it can go to none of them, ``migration-...``: why it stayed, or
                ``moved-without-function``.
        """
        named = _named(self._hosts())
        against: list[tuple[str, str, str, str]] = []
        for candidate in candidates:
            host = named.get(candidate.host)
            if host is None:
                continue  # it is trusted no more
            move = Move(domain.uuid, host.uuid)
            looked, made = await self._operator.plan(move)
            if made.blockers:
                first = made.blockers[0]
                against.append((candidate.host, first.message, first.code, first.fix))
                continue
            if looked.facts.private_memory:
                raise ConflictError(
                    f"VM {domain.name} stays: a function could not reach its memory:"
                    f" {looked.facts.private_memory}",
                    code="domain-memory",
                    where=f"domain:{domain.name}",
                    hint=f"accelctl vm prepare {domain.name}, then power it off and on",
                )
            report: dict[str, Any] = {}
            async with aclosing(self._operator.carry(looked, move)) as steps:
                async for step in steps:
                    report = step.get("report") or report
                    yield step
            _require_moved(report, candidate.host)
            yield {"assigned": await self._there(domain, host, candidate.host, wish)}
            return
        raise _nowhere(domain, against)

    async def _there(self, domain: Domain, host: Host, name: str, wish: Wish) -> dict[str, Any]:
        question = AskPlace(domain.uuid, wish.live, wish.persistent)
        try:
            got = await self._neighbours.place(host, question)
        except AccelvisorError as error:
            raise ConflictError(
                f"VM {domain.name} runs on host {name} now, without a function: {error.message}",
                code="moved-without-function",
                where=f"host:{name}",
                hint=f"there: accelctl attach {domain.name} --card any",
            ) from error
        return {
            "host": name,
            "card": got.card,
            "partition": got.partition,
            "function": got.function,
            "attachment": None,
        }


def _named(hosts: Sequence[Host]) -> dict[str, Host]:
    """By name; of several with one name, by name and UUID."""
    names = [host.name for host in hosts]
    return {
        host.name if names.count(host.name) == 1 else f"{host.name} ({host.uuid})": host
        for host in hosts
    }


def _require_moved(report: dict[str, Any], host: str) -> None:
    if report.get("outcome") == "moved":
        return
    raise ConflictError(
        f"the VM stays: its move to host {host}, which has a function for it, {report['outcome']}:"
        f" {report['message']}",
        code=report["code"] or "migration-cancelled",
        where="migration",
        hint=report["hint"],
    )


def _nowhere(domain: Domain, against: Sequence[tuple[str, str, str, str]]) -> ConflictError:
    words = "; ".join(f"host {host}: {message}" for host, message, _, _ in against)
    _, _, code, hint = against[0] if against else ("", "", "trust-host-unknown", "")
    return ConflictError(
        f"VM {domain.name} stays: it cannot go where a static function is free"
        + (f" ({words})" if words else ""),
        code=code,
        where="migration",
        hint=hint,
    )
