"""Emptying a host: which VM goes to which host (pure), and doing it one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import views
from accelvisor.daemon.moving.facts import Looked, Wish
from accelvisor.daemon.moving.host import MovingHost
from accelvisor.daemon.moving.operator import Operator
from accelvisor.daemon.moving.planner import Plan
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, NotFoundError


@dataclass(frozen=True, slots=True)
class Stay:
    """What is not moved away, and what to do with it."""

    name: str
    uuid: str
    what: str  # "vm" or "function"
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class Try:
    """One VM and one host: the host's answer."""

    host: str
    plan: Plan


def choose(tries: Sequence[Try]) -> Try | None:
    """The first host that nothing stands against and that is predicted the shortest downtime."""
    able = [item for item in tries if not item.plan.blockers]
    return min(able, key=_downtime) if able else None


def _downtime(item: Try) -> float:
    made = item.plan.prediction
    return made.downtime_s if made is not None else 0.0


def why_not(name: str, uuid: str, tries: Sequence[Try]) -> Stay:
    """Of a VM that no host can take: what each says."""
    if not tries:
        return Stay(
            name, uuid, "vm", "no other host is trusted",
            "accelctl trust invite and join make hosts trust each other",
        )  # fmt: skip
    # What is said of the VM itself is the same for each host.
    said: dict[str, list[str]] = {}
    fixes: dict[str, str] = {}
    for item in tries:
        first = item.plan.blockers[0]
        said.setdefault(first.message, []).append(item.host)
        fixes.setdefault(first.message, first.fix)
    words = "; ".join(
        f"{', '.join(hosts)}: {text}" if len(said) > 1 else text for text, hosts in said.items()
    )
    return Stay(name, uuid, "vm", words, next(iter(fixes.values())))


def without_vm(function: Function) -> Stay | None:
    """A function that no running VM has: it does not move by itself."""
    if function.state is State.RUNNING:
        return None
    name, uuid = function.name, function.uuid
    if function.domain:
        return Stay(
            name, uuid, "function", f"VM {function.domain}, which has it, does not run",
            f"start the VM and drain again, or accelctl function delete {name} --force",
        )  # fmt: skip
    return Stay(
        name, uuid, "function", f"no VM has it ({function.state})",
        f"accelctl checkpoint create {name} keeps what is in it; accelctl function delete {name}",
    )  # fmt: skip


class Drain:
    """One round over this host's VMs.

    Args:
        to: names of the hosts to choose from; empty for all that are trusted.
        uri: template of their libvirt; empty to follow the configuration.
    """

    def __init__(
        self, operator: Operator, moving: MovingHost, to: Sequence[str] = (), uri: str = ""
    ) -> None:
        self._operator = operator
        self._moving = moving
        self._to = list(to)
        self._uri = uri

    async def run(self, *, dry_run: bool) -> AsyncGenerator[dict[str, Any], None]:
        """For each VM its plan, progress and report; then what stays.

        The plan of each is made when its turn comes, since those before it have taken room. So a
        dry run may promise two VMs the same room; the run itself does not.

        Raises:
            NotFoundError: ``trust-host-unknown``: one of the hosts is not trusted.
        """
        hosts = self._hosts()
        functions = self._moving.services.functions.registry.all()
        domains = {
            function.domain_uuid: function.domain or function.domain_uuid
            for function in functions
            if function.domain_uuid is not None and function.state is State.RUNNING
        }
        stay: list[Stay] = []
        for uuid, name in domains.items():
            async for step in self._one(uuid, name, hosts, stay, dry_run):
                yield {"domain": name, **step}
        stay += [found for item in functions if (found := without_vm(item)) is not None]
        for item in stay:
            yield {
                "stay": {
                    "what": item.what,
                    "name": item.name,
                    "uuid": item.uuid,
                    "reason": item.reason,
                    "fix": item.fix,
                }
            }

    def _hosts(self) -> list[str]:
        keys = self._moving.keys
        if self._to:
            return [keys.find(name).uuid for name in self._to]
        hosts = [host.uuid for host in keys.peers()]
        if not hosts:
            raise NotFoundError(
                "this host trusts no other one",
                code="trust-host-unknown",
                where="migration",
                hint="accelctl trust invite and join make hosts trust each other",
            )
        return hosts

    async def _one(
        self, uuid: str, name: str, hosts: Sequence[str], stay: list[Stay], dry_run: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        tries: list[Try] = []
        seen: dict[str, tuple[Looked, Wish]] = {}
        for host in hosts:
            wish = Wish(uuid, host, self._uri)
            looked, made = await self._operator.plan(wish)
            tries.append(Try(looked.facts.host, made))
            seen[looked.facts.host] = (looked, wish)
        chosen = choose(tries)
        if chosen is None:
            stay.append(why_not(name, uuid, tries))
            return
        looked, wish = seen[chosen.host]
        yield {"plan": views.plan(looked, chosen.plan)}
        if dry_run:
            return
        try:
            async for step in self._operator.carry(looked, wish):
                yield step
                report = step.get("report")
                if report and report["outcome"] != "moved":
                    stay.append(Stay(name, uuid, "vm", report["message"], report["hint"]))
        except AccelvisorError as error:
            stay.append(Stay(name, uuid, "vm", error.message, error.hint))
