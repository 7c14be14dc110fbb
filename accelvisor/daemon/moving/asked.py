"""Whether somebody at this host sends the VM away. Another host that is trusted gets nothing of a
VM that stays: not its functions' memory, and not their time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from accelvisor.errors import AccelvisorError, ConflictError

LOG = logging.getLogger(__name__)
#: How often it is asked again while rounds are sent (seconds).
AGAIN_S = 2.0


class Asked:
    """Of one move.

    Args:
        leaves: whether somebody migrates a domain away, as libvirt says.
    """

    def __init__(self, leaves: Callable[[str], Awaitable[bool]], domain: str) -> None:
        self._leaves = leaves
        self._domain = domain
        self._task: asyncio.Task[None] | None = None

    async def require(self) -> None:
        """
        Raises:
            ConflictError: ``migration-not-asked``; AccelvisorError: libvirt does not say.
        """
        if not await self._leaves(self._domain):
            raise ConflictError(
                "nobody migrates the domain away from here",
                code="migration-not-asked",
                where=f"domain:{self._domain}",
                hint="virsh migrate, or accelctl migrate, at the host where the domain runs",
            )

    def watch(self, active: Callable[[], bool], failed: Callable[[AccelvisorError], None]) -> None:
        """Whoever asked may change their mind, which the other host need not respect: ``failed`` is
        told so, once, if it is still ``active`` then.
        """
        self._task = asyncio.get_running_loop().create_task(self._watch(active, failed))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(
        self, active: Callable[[], bool], failed: Callable[[AccelvisorError], None]
    ) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            if not active():
                return
            try:
                await self.require()
            except ConflictError as error:
                if active():
                    failed(error)
                return
            except AccelvisorError as error:
                LOG.info("%s: %s", self._domain, error.message)  # libvirt is busy, or away
