"""What a domain's QEMU asks and tells, led to the move or to the saved state that it belongs to.

QEMU asks the same three questions whether its VM moves, is saved to a file or comes back from one.
A move is known before: its destination reserved it. What waits for a VM without a move waits for a
file, and what is asked to save without a move is saved to one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from accelvisor.daemon.moving.doors import Doors
from accelvisor.daemon.moving.moves import Moves
from accelvisor.daemon.moving.saving import DomainSaves
from accelvisor.errors import AccelvisorError, ConflictError
from accelvisor.hypervisor import context

LOG = logging.getLogger(__name__)
#: How long a waiting QEMU may take to connect its private monitor (seconds).
_MONITOR_S = 5.0


class Switch:
    """Is :class:`accelvisor.hypervisor.vmstate.Handler`, and takes the monitors' events."""

    def __init__(self, moves: Moves, saves: DomainSaves) -> None:
        self._moves = moves
        self._saves = saves
        #: Domains whose QEMU waits for a VM from a file.
        self._restoring: set[str] = set()
        self._tokens: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- questions --------------------------------------------------------------------------------

    async def owners(self, domain: str) -> bool:
        """May it go on? Before a save this is where everything that can fail is done."""
        answer = await self._moves.owners(domain)
        if answer is not None:
            return answer
        if domain in self._restoring:
            return True
        self._tokens[domain] = await self._saves.save_for_domain(domain)
        return True

    async def save(self, domain: str) -> bytes:
        """The token that goes into QEMU's stream."""
        token = await self._moves.save(domain)
        if token is None:
            token = self._tokens.pop(domain, None)
        if token is None:
            raise ConflictError("nothing was saved", code="save-refused", where="save")
        return token

    async def load(self, domain: str, token: bytes) -> None:
        """Load what the token names; raises to keep the VM from running here."""
        if not await self._moves.load(domain, token):
            await self._saves.load_for_domain(domain, token)

    # --- events -----------------------------------------------------------------------------------

    def event(self, domain: str, name: str) -> None:
        """An event of a domain's private monitor."""
        move = self._moves.going(domain)
        if name == "STOP" and move is not None:
            move.pace.mark("stop")
        elif name in ("STOP", "MIGRATION") and self._moves.coming(domain) is None:
            if domain not in self._restoring and move is None:
                self._spawn(self._watch(domain))
        elif name == "RESUME":
            if move is not None:
                move.pace.times.pop("stop", None)  # somebody's pause, not the switch-over's
            self._restoring.discard(domain)
            self._tokens.pop(domain, None)
            self._moves.resumed(domain)
            self._spawn(self._saves.resumed(domain))

    async def gone(self, domain: str) -> None:
        """The domain's QEMU is not there any more."""
        self._restoring.discard(domain)
        self._tokens.pop(domain, None)
        self._moves.gone(domain)
        await self._saves.gone(domain)

    async def _watch(self, domain: str) -> None:
        try:
            await self._saves.watch(domain)
        except AccelvisorError as error:
            # Saving is refused then, which is better than to lose what a function writes.
            LOG.warning("domain %s: %s", domain, error.message)

    # --- a VM that waits for a file ---------------------------------------------------------------

    async def restore_context(self, doors: Doors, domain: str) -> None:
        """The domain's QEMU has started without a move. If it waits for a VM, it gets the PCI
        context that its functions had when they were saved last.

        Raises:
            FrameRefused, StateError: what was saved is not what it was.
        """
        pair = doors.find(domain)
        if pair is None:
            return
        await pair.monitor.wait_connected(_MONITOR_S)
        status = await pair.monitor.execute("query-status")
        if status.get("status") != "inmigrate":
            return
        self._restoring.add(domain)
        await self._saves.watch(domain)
        for function, config in (await self._saves.context_for_domain(domain)).items():
            await context.restore(pair.monitor, function, config)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
