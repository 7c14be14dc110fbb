"""A VM that comes by a move, seen from its QEMU: it is started, and gets its functions' PCI context
before its memory comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from accelvisor.daemon.moving import orders
from accelvisor.daemon.moving.destination import DestinationMove
from accelvisor.daemon.moving.doors import Doors
from accelvisor.daemon.moving.services import Services
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    ProtocolError,
    UnavailableError,
)
from accelvisor.hypervisor import context
from accelvisor.limits import LIMITS
from accelvisor.migration import destination

LOG = logging.getLogger(__name__)
#: How often it is asked whether the guest changed its PCI context (seconds).
_CONTEXT_S = 0.5
#: How long a QEMU may take to connect its private monitor (seconds): it tries once a second.
MONITOR_S = 3.0


class Arriving:
    """One per daemon."""

    def __init__(self, services: Services, doors: Doors) -> None:
        self._services = services
        self._doors = doors

    async def expect(self, move: DestinationMove) -> None:
        """A hook that was killed, or a libvirt that gave up, says nothing: a reservation for which
        no QEMU is started is given back."""
        pair = await self._doors.open(move.domain_uuid)
        try:
            await pair.monitor.wait_connected(LIMITS.migration_start_s)
        except UnavailableError:
            move.driver.error = DeadlineError(
                f"libvirt started no QEMU within {LIMITS.migration_start_s:g} s",
                code="migration-start",
                where=f"domain:{move.domain}",
            )
            move.left = True
            with suppress(ConflictError):
                await move.driver.tell(destination.Event.CANCEL)

    async def restore_context(self, move: DestinationMove) -> None:
        """As :meth:`accelvisor.daemon.moving.host.MovingHost.restore_context`.

        Raises:
            ConflictError: ``migration-postcopy``; and what the monitor and the source answer.
        """
        pair = await self._doors.open(move.domain_uuid)
        await pair.monitor.wait_connected(MONITOR_S)
        await pair.monitor.require_precopy()
        paths = self._services.functions.world.paths
        for part in move.parts:
            await orders.control(paths, part.uuid, "track", {"on": True})
        given = await self._give_context(move, None)
        try:
            async with asyncio.timeout(self._services.settings.first_pass_s):
                await move.receiving.first_pass.wait()
        except TimeoutError:
            LOG.info("%s: the first pass goes on beside QEMU's own", move.domain)
        move.beside = asyncio.get_running_loop().create_task(self._refresh(move, given))

    async def _give_context(
        self, move: DestinationMove, known: Sequence[bytes] | None
    ) -> Sequence[bytes]:
        """What the source's functions have now, where it differs from what was given before."""
        pair = await self._doors.open(move.domain_uuid)
        await pair.monitor.wait_connected(MONITOR_S)
        asking = asyncio.create_task(move.peer.context(move.id))
        # Once its QEMU waits for the seal the source's monitor answers nothing: nor do we wait.
        now = asking if known is None else move.receiving.while_receiving(asking)
        wanted = await now or known or ()
        if len(wanted) != len(move.parts):
            raise ProtocolError(
                f"the source told the PCI context of {len(wanted)} functions,"
                f" {len(move.parts)} come",
                code="peer-answer",
                where="migration",
            )
        for index, part in enumerate(move.parts):
            if known is None or known[index] != wanted[index]:
                if known is not None:
                    LOG.info("%s: its guest changed the PCI context of %s", move.domain, part.uuid)
                await context.restore(pair.monitor, part.uuid, wanted[index])
        return wanted

    async def _refresh(self, move: DestinationMove, given: Sequence[bytes]) -> None:
        """The guest may load a driver, or move its interrupt, while its memory is copied.

        It ends with the seal, and the move waits for that before it says that it has verified it:
        until then QEMU cannot come to loading, after which its guest may run, and a port that is
        written then would be the guest's.
        """
        seen = move.receiving.rounds
        while await move.receiving.still_receiving(_CONTEXT_S):
            if move.receiving.rounds == seen:
                continue
            seen = move.receiving.rounds
            try:
                given = await self._give_context(move, given)
            except AccelvisorError as error:
                LOG.info("%s: %s", move.domain, error.message)
