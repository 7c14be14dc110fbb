"""The private monitor of a domain: QEMU's monitor protocol with QEMU as the client.

libvirt's monitor is no help during a migration: what it passes on waits for the job to end. So a
domain with functions has one more monitor, whose character device connects to a socket of
accelvisord and, when that goes, tries again every second: a restarted daemon gets its monitors back
without a word to QEMU. While QEMU loads or saves the state of its devices it answers nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    ProtocolError,
    UnavailableError,
)
from accelvisor.hypervisor.companions import VMSTATE_ID, vmstate_object
from accelvisor.hypervisor.endpoints import Door, Peer
from accelvisor.hypervisor.monitor import MonitorError
from accelvisor.hypervisor.qmp import Codec, Event, Greeting, Reply
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
_CHUNK = 1 << 16
#: What is passed on; QEMU has some eighty more.
EVENTS = frozenset({"STOP", "RESUME", "SHUTDOWN", "RESET", "MIGRATION"})


class Private:
    """The private monitor of one domain, for as long as the daemon knows it.

    Args:
        path: of the socket.
        domain: UUID.
        on_event: called in the loop with (domain, event) for each of EVENTS, in their order; it
            must not block.
        on_connect: called in the loop when commands can be sent (again). Events may have been lost
            since the last connection: ask ``query-status``.
        trusted: whether this peer may be the domain's QEMU; the socket's permissions come first.
    """

    def __init__(
        self,
        path: str | Path,
        domain: str,
        on_event: Callable[[str, Event], None],
        *,
        on_connect: Callable[[str], None] = lambda _: None,
        trusted: Callable[[Peer], bool] = lambda _: True,
    ) -> None:
        self.domain = domain
        self._on_event = on_event
        self._on_connect = on_connect
        self._door = Door(path, self._serve, trusted)
        self._session: _Session | None = None
        self._connected = asyncio.Event()

    @property
    def connected(self) -> bool:
        """A QEMU is there and takes commands."""
        return self._connected.is_set()

    async def start(self, *, group: int | None = None) -> None:
        """Listen; the socket gets this group (gid). SystemFailure ``domain-socket``."""
        await self._door.open(group)

    async def close(self) -> None:
        """Hang up and leave no socket behind. Idempotent."""
        await self._door.close()

    async def wait_connected(self, deadline_s: float) -> None:
        """Until a QEMU takes commands. UnavailableError ``monitor-unavailable``."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._connected.wait()
        except TimeoutError:
            raise self._nobody() from None

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = LIMITS.monitor_command_s,
    ) -> Any:
        """The command's return value.

        MonitorError when QEMU refuses it; DeadlineError (``monitor-deadline``), after which it may
        still be carried out; UnavailableError when there is no QEMU (``monitor-unavailable``) or it
        went (``monitor-closed``).
        """
        if self._session is None or not self.connected:
            raise self._nobody()
        return await self._session.execute(command, arguments, deadline_s)

    async def human(self, line: str, *, deadline_s: float = LIMITS.monitor_command_s) -> str:
        """The output of a command of the human monitor. Raises as :meth:`execute`."""
        arguments = {"command-line": line}
        return str(await self.execute("human-monitor-command", arguments, deadline_s=deadline_s))

    async def require_precopy(self) -> None:
        """The VM does not run here before all its memory has come: QEMU fetches the rest when the
        VM touches it, and knows nothing of a function that does (userfaultfd(2) is per process).

        Raises:
            ConflictError: ``migration-postcopy``; and as :meth:`execute`.
        """
        for one in await self.execute("query-migrate-capabilities"):
            if one.get("capability") == "postcopy-ram" and one.get("state"):
                raise ConflictError(
                    "a VM with a function cannot migrate by post-copy",
                    code="migration-postcopy",
                    where="migration",
                    hint="migrate without --postcopy: the function would read the VM's memory"
                    " before it is there",
                )

    async def reattach(self, bus: str) -> None:
        """Have QEMU connect to the bus again, at the path ``bus``: it does that only when the
        object is made. Raises as :meth:`execute`; a failure leaves the domain without the object,
        so that it would migrate without asking: then repeat it.
        """
        with suppress(MonitorError):  # it is not there: a repeated or a first attachment
            await self.execute("object-del", {"id": VMSTATE_ID})
        await self.execute("object-add", vmstate_object(bus))

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _peer: Peer
    ) -> None:
        self._session = session = _Session(reader, writer, self._event)
        opening = asyncio.create_task(self._open(session, writer))
        try:
            await session.run()
        finally:
            self._connected.clear()
            self._session = None
            session.end()
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening

    async def _open(self, session: _Session, writer: asyncio.StreamWriter) -> None:
        """Leave negotiation mode, whenever QEMU gets to it: it may be in the middle of a load."""
        await session.greeted.wait()
        try:
            # Nothing here needs commands out of band: what we send is for QEMU's main loop.
            await session.execute("qmp_capabilities", None, None)
        except AccelvisorError as error:
            LOG.warning("monitor of %s: %s", self.domain, error.message)
            writer.close()
            return
        self._connected.set()
        self._on_connect(self.domain)

    def _event(self, event: Event) -> None:
        if event.name in EVENTS:
            self._on_event(self.domain, event)

    def _nobody(self) -> UnavailableError:
        return UnavailableError(
            "QEMU has not connected its private monitor",
            code="monitor-unavailable",
            where=f"domain:{self.domain}",
            hint="it tries every second; a VM that was started before accelvisor knew it has none",
        )


class _Session:
    """One connection, from greeting to hang-up."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[Event], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._codec = Codec()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.greeted = asyncio.Event()

    async def run(self) -> None:
        """Until QEMU hangs up."""
        while data := await self._reader.read(_CHUNK):
            for message in self._codec.feed(data):
                self._take(message)

    async def execute(
        self, command: str, arguments: Mapping[str, Any] | None, deadline_s: float | None
    ) -> Any:
        identifier, data = self._codec.command(command, arguments)
        future = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = future
        try:
            self._writer.write(data)
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()
                reply: Reply = await future
        except TimeoutError:
            raise DeadlineError(
                f"{command}: no reply within {deadline_s:g} s",
                code="monitor-deadline",
                where="qmp",
                hint="QEMU answers nothing while it loads or saves its state",
            ) from None
        except OSError as error:
            raise _gone(error.strerror or str(error)) from error
        finally:
            self._waiting.pop(identifier, None)
            self._codec.abandon(identifier)
        if reply.failed:
            raise MonitorError(command, reply)
        return reply.value

    def end(self) -> None:
        """Nobody waits any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_gone("it closed the connection"))

    def _take(self, message: Greeting | Reply | Event) -> None:
        if isinstance(message, Event):
            self._on_event(message)
        elif isinstance(message, Reply):
            future = self._waiting.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif not self.greeted.is_set():
            self.greeted.set()
        else:
            raise ProtocolError("QEMU's monitor: a second greeting", code="qmp", where="qmp")


def _gone(reason: str) -> UnavailableError:
    return UnavailableError(f"QEMU's monitor is gone: {reason}", code="monitor-closed", where="qmp")
