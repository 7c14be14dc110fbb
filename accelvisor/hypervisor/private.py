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

from accelvisor.errors import AccelvisorError, DeadlineError, ProtocolError, UnavailableError
from accelvisor.hypervisor import endpoints
from accelvisor.hypervisor.companions import VMSTATE_ID, vmstate_object
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
        trusted: Callable[[endpoints.Peer], bool] = lambda _: True,
    ) -> None:
        self.path = Path(path)
        self.domain = domain
        self._on_event = on_event
        self._on_connect = on_connect
        self._trusted = trusted
        self._server: asyncio.Server | None = None
        self._session: _Session | None = None
        self._connected = asyncio.Event()

    @property
    def connected(self) -> bool:
        """A QEMU is there and takes commands."""
        return self._connected.is_set()

    async def start(self, *, group: int | None = None) -> None:
        """Listen. SystemFailure ``domain-socket``."""
        sock = endpoints.listen(self.path, group)
        self._server = await asyncio.start_server(self._accept, sock=sock, limit=_CHUNK)

    async def close(self) -> None:
        """Hang up and leave no socket behind. Idempotent."""
        if self._server is not None:
            endpoints.remove(self.path)
            self._server.close()
        if self._session is not None:
            self._session.task.cancel()
            with suppress(asyncio.CancelledError):
                await self._session.task
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

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

    async def reattach(self, bus: str) -> None:
        """Have QEMU connect to the bus again, at the path ``bus``: it does that only when the
        object is made. Raises as :meth:`execute`; a failure leaves the domain without the object,
        so that it would migrate without asking: then repeat it.
        """
        with suppress(MonitorError):  # it is not there: a repeated or a first attachment
            await self.execute("object-del", {"id": VMSTATE_ID})
        await self.execute("object-add", vmstate_object(bus))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = opening = None
        try:
            peer = endpoints.peer_of(writer.get_extra_info("socket"))
            if self._session is not None or not self._trusted(peer):
                why = "not the domain's QEMU" if self._session is None else "one more client"
                LOG.warning("monitor of %s: %s (pid %d)", self.domain, why, peer.pid)
                return
            self._session = session = _Session(reader, writer, self._event)
            opening = asyncio.create_task(self._open(session, writer))
            await session.run()
        except (ProtocolError, UnavailableError) as error:
            LOG.info("monitor of %s: %s", self.domain, error.message)
        except OSError as error:
            LOG.info("monitor of %s: %s", self.domain, error)
        finally:
            if session is not None:
                self._connected.clear()
                self._session = None
                session.end()
            if opening is not None:
                opening.cancel()
                with suppress(asyncio.CancelledError):
                    await opening
            writer.close()

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
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a session belongs to a task")
        self.task = task
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._codec = Codec()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.greeted = asyncio.Event()

    async def run(self) -> None:
        """Until QEMU hangs up: UnavailableError ``monitor-closed``."""
        while data := await self._reader.read(_CHUNK):
            for message in self._codec.feed(data):
                self._take(message)
        raise _gone("it closed the connection")

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
