"""Host CPUs and borrowed cores: what :mod:`accelvisor.isolation.sharing` decides, carried out.

Asked whenever the partition has changed (:attr:`Functions.on_shared`): loans that end are called
back first, and waited for, then the others get what is left. No timer, and who keeps what it has is
not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from accelvisor.daemon import function_link
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import ALIVE
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError
from accelvisor.isolation import sharing
from accelvisor.isolation.resources import Policy
from accelvisor.isolation.sharing import Member, Share

LOG = logging.getLogger(__name__)
#: Of a unit, and of any process, unless it is told otherwise.
USUAL_WEIGHT = 100
#: Functions that are told at once, each by a process of the supervisor's.
TOGETHER = 4


class Sharing:
    """One per daemon."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._lock = asyncio.Lock()
        self._turn = asyncio.Semaphore(TOGETHER)
        #: What each function was given last; of one that is not in it that is not known.
        self.given: dict[str, Share] = {}
        #: Called when that is done: what else is shared may have to be divided anew, too.
        self.on_settled: Callable[[], None] = lambda: None
        functions.on_shared = self.settle
        functions.on_reshaped = self.reshaped
        scrubbed = functions.on_fresh

        async def fresh(function: Function) -> None:
            self.fresh(function.uuid)
            await scrubbed(function)

        functions.on_fresh = fresh

    async def settle(self) -> None:
        """Divide anew. A function that cannot be asked keeps what it has, and is asked next time:
        nobody waits for it.
        """
        async with self._lock:
            functions = self._functions
            members = {
                item.uuid: Member(item.placement, _policy(item), item.weight)
                for item in self._registry.all()
                if item.state in ALIVE and not item.revoked
            }
            wanted = sharing.divide(
                members, functions.cards, self._registry.held(), functions.cpus
            )
            self.given = {uuid: share for uuid, share in self.given.items() if uuid in wanted}
            changed = {
                uuid: share for uuid, share in wanted.items() if self.given.get(uuid) != share
            }
            less = {
                uuid: share for uuid, share in changed.items() if share.borrowed < self._lent(uuid)
            }
            await asyncio.gather(*(self._give(*item) for item in less.items()))
            more = [self._give(*item) for item in changed.items() if item[0] not in less]
            await asyncio.gather(*more)
        self.on_settled()

    def fresh(self, uuid: str) -> None:
        """It has a new process, which begins with what every process has."""
        self.given[uuid] = Share(tuple(self._functions.cpus), USUAL_WEIGHT, 0)

    def reshaped(self, uuid: str) -> None:
        """It has another shape, and gave back what it had borrowed with the old one."""
        if uuid in self.given:
            self.given[uuid] = replace(self.given[uuid], borrowed=0)

    def _lent(self, uuid: str) -> int:
        return self.given[uuid].borrowed if uuid in self.given else 0

    async def _give(self, uuid: str, share: Share) -> None:
        async with self._turn:
            await self._tell(uuid, share)

    async def _tell(self, uuid: str, share: Share) -> None:
        paths = self._functions.world.paths.function(uuid)
        try:
            before = self.given.get(uuid)
            if before is None or (before.cpus, before.weight) != (share.cpus, share.weight):
                await self._functions.world.supervisor.confine(uuid, share.cpus, share.weight)
            # Also where only the CPUs are others: the worker places its threads anew.
            wanted = {"borrowed": share.borrowed}
            await function_link.call(paths.control_socket, "share", wanted)
            self.given[uuid] = share
        except AccelvisorError as error:
            LOG.warning("the share of function %s: %s", uuid, error.message)


def _policy(function: Function) -> Policy:
    """A static function has what it has: it borrows nothing, however idle its card is."""
    return function.policy if function.partition is None else Policy.GUARANTEED
