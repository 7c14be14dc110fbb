"""What a domain's QEMU asks and tells, led to the move or to the saved state that it belongs to.

QEMU asks the same three questions whether its VM moves, is saved to a file or comes back from one,
and does not say which. A move is known before: its destination reserved it. A QEMU that waits for a
VM without a move, or has not come so far that it could have run one, waits for a file; every other
one saves to a file. Should that be wrong, something is saved that nobody needs, and dropped again.

libvirt loads a saved VM before its hook is told that QEMU has started, and lets the VM run after
that. So what a device is loaded with comes first here, and its PCI context in QEMU second.
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
#: What a QEMU does that loads, or is about to.
_LOADING = ("inmigrate", "restore-vm")
#: How long a waiting QEMU may take to connect its private monitor (seconds).
_MONITOR_S = 5.0


class Switch:
    """Is :class:`accelvisor.hypervisor.vmstate.Handler`, and takes the monitors' events."""

    def __init__(self, moves: Moves, saves: DomainSaves) -> None:
        self._moves = moves
        self._saves = saves
        self._doors: Doors | None = None
        #: Domains whose QEMU libvirt is about to start: none has run a VM yet.
        self._starting: set[str] = set()
        self._tokens: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def use(self, doors: Doors) -> None:
        """Whose questions and events these are."""
        self._doors = doors

    def starting(self, domain: str) -> None:
        """libvirt is about to start the domain's QEMU, for whatever."""
        self._starting.add(domain)

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
        loads = self._loads(domain)
        status = self._doors.status(domain) if self._doors is not None else None
        LOG.info("%s: its QEMU (%s) %s", domain, status, "loads" if loads else "saves")
        if loads:
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
        if await self._moves.load(domain, token):
            return
        await self._drop(domain)  # it was no save
        await self._saves.load_for_domain(domain, token)
        if self._doors is not None:
            self._doors.loaded(domain)

    def _loads(self, domain: str) -> bool:
        status = self._doors.status(domain) if self._doors is not None else None
        if status in _LOADING:
            return True
        return domain in self._starting and status in (None, "prelaunch")

    async def _drop(self, domain: str) -> None:
        """A token that QEMU did not ask for: nobody can bring it back."""
        token = self._tokens.pop(domain, None)
        if token is not None:
            await self._saves.drop(token)

    # --- events -----------------------------------------------------------------------------------

    def event(self, domain: str, name: str) -> None:
        """An event of a domain's private monitor."""
        move = self._moves.going(domain)
        if name == "STOP" and move is not None:
            move.pace.mark("stop")
        elif name in ("STOP", "MIGRATION") and self._moves.coming(domain) is None:
            if move is None and not self._loads(domain):
                self._spawn(self._watch(domain))
        elif name == "RESUME":
            if move is not None:
                move.pace.times.pop("stop", None)  # somebody's pause, not the switch-over's
            self._starting.discard(domain)
            self._moves.resumed(domain)
            self._spawn(self._resumed(domain))

    async def gone(self, domain: str) -> None:
        """The domain's QEMU is not there any more."""
        self._starting.discard(domain)
        self._tokens.pop(domain, None)
        self._moves.gone(domain)
        await self._saves.gone(domain)

    async def _resumed(self, domain: str) -> None:
        await self._saves.resumed(domain)
        await self._drop(domain)

    async def _watch(self, domain: str) -> None:
        try:
            await self._saves.watch(domain)
        except AccelvisorError as error:
            # Saving is refused then, which is better than to lose what a function writes.
            LOG.warning("domain %s: %s", domain, error.message)

    # --- a VM that waits for a file ---------------------------------------------------------------

    async def restore_context(self, doors: Doors, domain: str) -> None:
        """The domain's QEMU has started without a move, and its VM does not run yet. If it was
        loaded, or waits for that, its devices get the PCI context that their functions had.

        Raises:
            FrameRefused, StateError: what was saved is not what it was.
        """
        pair = doors.find(domain)
        if pair is None:
            return
        await pair.monitor.wait_connected(_MONITOR_S)
        status = await pair.monitor.execute("query-status")
        if status.get("running"):
            return
        if status.get("status") in _LOADING:
            await self._saves.watch(domain)
            contexts = await self._saves.context_for_domain(domain)
        else:
            self._starting.discard(domain)
            contexts = await self._saves.loaded_contexts(domain)
        for function, config in contexts.items():
            await context.restore(pair.monitor, function, config)
        if status.get("status") not in _LOADING:
            await self._saves.require_contexts(domain, contexts)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
