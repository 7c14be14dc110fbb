"""A domain's part in saving and loading its VM: the server of :mod:`accelvisor.hypervisor.dbus`.

QEMU calls from the middle of a migration, with its VM stopped and all of itself waiting, and gives
up after 25 s. So each question has a deadline of ours below that, and every failure is an answer:

* *owners* that fails or is late: "nobody is here", and the migration or the save is rolled back;
* *save* that fails: an error. A migration is rolled back, but ``virsh save`` ignores it and loses
  the guest: whatever can fail belongs into *owners*;
* *load* that fails: an error, and the destination gives up before its guest ran.

QEMU connects once, when the object is made. A bus that nobody is connected to (the daemon was
restarted) refuses every migration, until :meth:`accelvisor.hypervisor.private.Private.reattach`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from accelvisor.errors import AccelvisorError, DeadlineError, SystemFailure
from accelvisor.hypervisor.dbus import Connection, Question, Request
from accelvisor.hypervisor.endpoints import Door, Peer
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
_CHUNK = 1 << 16
#: QEMU asks one at a time; who asks more must wait to be read.
_QUESTIONS = 4
T = TypeVar("T")


class Handler(Protocol):
    """Who decides. ``domain`` is a UUID. Every coroutine may be cancelled: it was too late, or QEMU
    hung up. QEMU does not say whether it will save or load when it asks for the owners; whoever
    expects an incoming VM knows.
    """

    async def owners(self, domain: str) -> bool:
        """May it go on? Before a save this is the last moment to say no."""
        ...

    async def save(self, domain: str) -> bytes:
        """What goes to the destination within QEMU's own stream (``LIMITS.vmstate_bytes``)."""
        ...

    async def load(self, domain: str, token: bytes) -> None:
        """What the source's ``save`` returned, which may have been altered on its way. Raises to
        keep the guest from running here.
        """
        ...


class Bus:
    """The bus of one domain.

    Args:
        path: of its socket.
        domain: UUID.
        deadline_s: for each question.
        trusted: whether this peer may be the domain's QEMU; the socket's permissions come first.
    """

    def __init__(
        self,
        path: str | Path,
        domain: str,
        handler: Handler,
        *,
        deadline_s: float = LIMITS.vmstate_s,
        trusted: Callable[[Peer], bool] = lambda _: True,
    ) -> None:
        self.domain = domain
        self._handler = handler
        self._deadline_s = deadline_s
        self._guid = secrets.token_hex(16)
        self._door = Door(path, self._serve, trusted)
        self._ready = False

    @property
    def connected(self) -> bool:
        """QEMU is there, and can ask."""
        return self._ready

    async def start(self, *, group: int | None = None) -> None:
        """Listen; the socket gets this group (gid). SystemFailure ``domain-socket``."""
        await self._door.open(group)

    async def close(self) -> None:
        """Hang up and leave no socket behind. Idempotent."""
        await self._door.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer
    ) -> None:
        connection = Connection(self._guid, peer.uid)
        questions: asyncio.Queue[Request] = asyncio.Queue(_QUESTIONS)
        answering = asyncio.create_task(self._answers(questions, writer, connection))
        try:
            while data := await reader.read(_CHUNK):
                found = connection.feed(data)
                self._ready = connection.ready
                writer.write(connection.outgoing())
                await writer.drain()
                for request in found:
                    await questions.put(request)
        finally:
            self._ready = False
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answers(
        self,
        questions: asyncio.Queue[Request],
        writer: asyncio.StreamWriter,
        connection: Connection,
    ) -> None:
        while True:
            await self._answer(connection, await questions.get())
            writer.write(connection.outgoing())

    async def _answer(self, connection: Connection, request: Request) -> None:
        handler, domain = self._handler, self.domain
        try:
            match request.question:
                case Question.OWNERS:
                    present = await self._in_time(handler.owners(domain), "owners")
                    connection.owners(request, present)
                case Question.SAVE:
                    connection.saved(request, await self._in_time(handler.save(domain), "save"))
                case Question.LOAD:
                    await self._in_time(handler.load(domain, request.data), "load")
                    connection.loaded(request)
        except AccelvisorError as error:
            LOG.warning("%s of %s: %s", request.question.name.lower(), domain, error.message)
            if request.question is Question.OWNERS:
                connection.owners(request, False)
            else:
                connection.refuse(request, error.message)

    async def _in_time(self, answer: Awaitable[T], what: str) -> T:
        """The answer; whatever goes wrong is one of our errors."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await answer
        except TimeoutError:
            raise DeadlineError(
                f"no answer to {what} within {self._deadline_s:g} s",
                code="vmstate-deadline",
                where="vmstate",
            ) from None
        except AccelvisorError:
            raise
        except Exception as error:
            LOG.exception("%s of domain %s", what, self.domain)
            raise SystemFailure(f"{type(error).__name__}: {error}", where="vmstate") from error
