"""The other hosts, as moves see them: one connection after another, and messages in between.

The destination connects to the source and goes on doing so; the source answers over whatever
connection the destination used last. What is sent while there is none is lost: the machines send
again when the link is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from uuid import UUID

import msgspec

from accelvisor.daemon.moving.fit import AskFit, Fit
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.places import AskPlace, AskPlaces, Placed, Places
from accelvisor.errors import AccelvisorError, ProtocolError
from accelvisor.frames.trust import Host
from accelvisor.limits import LIMITS
from accelvisor.migration import link as links
from accelvisor.migration import messages as wire
from accelvisor.migration.channel import Channel
from accelvisor.migration.link import Handler, PeerLink
from accelvisor.migration.listener import open_channel

LOG = logging.getLogger(__name__)
T = TypeVar("T")
#: Between two tries to reach a host again (seconds): it doubles up to the second.
_FIRST_S, _MOST_S = 0.05, 1.0


class AskTickets(msgspec.Struct, frozen=True, tag="tickets", forbid_unknown_fields=True):
    """For the bulk connections of a move; answered with a list for each function."""

    migration: bytes


class AskContext(msgspec.Struct, frozen=True, tag="context", forbid_unknown_fields=True):
    """The PCI configuration space of each function of a move, as it is now."""

    migration: bytes


class AskDomain(msgspec.Struct, frozen=True, tag="domain", forbid_unknown_fields=True):
    """Whether the host has the functions of this domain."""

    domain: str


class TellRotation(msgspec.Struct, frozen=True, tag="rotation", forbid_unknown_fields=True):
    """The host has new keys."""

    statement: bytes


Question = AskTickets | AskContext | AskDomain | TellRotation | AskFit | AskPlaces | AskPlace
_QUESTIONS = msgspec.msgpack.Decoder(Question)


def read_question(payload: bytes) -> Question:
    """Raises ProtocolError ``peer-request``."""
    try:
        return _QUESTIONS.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(
            f"a peer asks what is not understood: {error}", code="peer-request", where="peer"
        ) from error


class Asking:
    """A destination's way to its source; all moves from there share it.

    Args:
        lost, back: told when the connection breaks, and when there is a new one.
    """

    #: How often the connection broke.
    breaks = 0
    #: Whether anybody ever wanted one.
    tried = False

    def __init__(
        self,
        keys: Keys,
        host: Host,
        handler: Handler,
        lost: Callable[[], None],
        back: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._host = host
        self._handler = handler
        self._lost = lost
        self._back = back
        self._link: PeerLink | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def host(self) -> UUID:
        return UUID(self._host.uuid)

    async def open(self) -> PeerLink:
        """Connect if that was not done yet, then stay connected.

        Raises:
            as :func:`accelvisor.migration.link.connect`.
        """
        self.tried = True
        async with self._opening:
            if self._keeping is None:
                self._link = await self._connect()
                self._keeping = asyncio.get_running_loop().create_task(self._keep(self._link))
            link = self._link
            if link is None or link.closed.done():
                # Whoever asks now wants an answer now, and with the reason why there is none.
                link = self._link = await self._connect()
                self._keeping.cancel()
                self._keeping = asyncio.get_running_loop().create_task(self._keep(link))
                self._back()
            return link

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    def send(self, message: wire.Message) -> None:
        """A message; lost when the link is down."""
        send(self._link, message)

    async def ask(
        self, question: Question, *, deadline_s: float = LIMITS.peer_handshake_s
    ) -> bytes:
        """Raises UnavailableError ``peer-lost``, DeadlineError, and what the peer answers with."""
        link = self._link or await self.open()
        payload = msgspec.msgpack.encode(question)
        return await link.request(payload, deadline_s=deadline_s)

    async def tickets(self, migration: bytes) -> list[list[bytes]]:
        """As :class:`AskTickets`."""
        answer = await self.ask(AskTickets(migration))
        return _read(answer, list[list[bytes]])

    async def context(self, migration: bytes) -> list[bytes]:
        """As :class:`AskContext`."""
        return _read(await self.ask(AskContext(migration)), list[bytes])

    async def fit(self, question: AskFit) -> Fit:
        """As :class:`accelvisor.daemon.moving.fit.AskFit`."""
        return _read(await self.ask(question), Fit)

    async def places(self, question: AskPlaces) -> Places:
        """As :class:`accelvisor.daemon.moving.places.AskPlaces`."""
        return _read(await self.ask(question), Places)

    async def place(self, question: AskPlace) -> Placed:
        """As :class:`accelvisor.daemon.moving.places.AskPlace`: a process comes up, a guest takes
        its device.
        """
        deadline_s = LIMITS.function_ready_s + LIMITS.libvirt_call_s
        return _read(await self.ask(question, deadline_s=deadline_s), Placed)

    async def channel(self, ticket: bytes) -> Channel:
        """A bulk connection."""
        address = Keys.address_of(self._host)
        return await open_channel(address, ticket, self.host, self._keys.credentials)

    async def _connect(self) -> PeerLink:
        address = Keys.address_of(self._host)
        return await links.connect(address, self.host, self._keys.credentials, self._handler)

    async def _keep(self, link: PeerLink) -> None:
        while True:
            error = await asyncio.shield(link.closed)
            self.breaks += 1
            LOG.info("the link to host %s broke: %s", self._host.name, error.message)
            self._lost()
            pause = _FIRST_S
            while True:
                await asyncio.sleep(pause)
                pause = min(_MOST_S, pause * 2)
                with suppress(AccelvisorError):
                    link = self._link = await self._connect()
                    break
            self._back()


class Ways:
    """The links to sources: one for each host, however many moves come from there.

    Args:
        tell: (move, whether its link is back or else broke).
    """

    def __init__(self, keys: Keys, handler: Handler, tell: Callable[[bytes, bool], None]) -> None:
        self._keys = keys
        self._handler = handler
        self._tell = tell
        self._askings: dict[str, tuple[Asking, set[bytes]]] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def to(self, host: Host, move: bytes) -> Asking:
        """The link that a move uses until :meth:`retire`."""
        known = self._askings.get(host.uuid)
        if known is None:
            moves: set[bytes] = set()
            asking = Asking(
                self._keys, host, self._handler,
                lambda: self._say(moves, back=False), lambda: self._say(moves, back=True),
            )  # fmt: skip
            known = self._askings[host.uuid] = (asking, moves)
        asking, moves = known
        moves.add(move)
        return asking

    def retire(self, host: UUID, move: bytes, done: Callable[[], None]) -> None:
        """The move is over. What it said last must still arrive, over a new link if need be: it
        keeps its link until that has lived for as long as it takes to find that one is dead; then
        ``done`` is called.
        """
        task = asyncio.get_running_loop().create_task(self._retire(str(host), move, done))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for asking, _ in self._askings.values():
            await asking.close()
        self._askings.clear()

    async def _retire(self, host: str, move: bytes, done: Callable[[], None]) -> None:
        known = self._askings.get(host)
        if known is None or move not in known[1]:
            return  # it was over before
        asking, moves = known
        while True:
            before = asking.breaks
            await asyncio.sleep(LIMITS.peer_dead_s)
            if not asking.tried:
                break
            with suppress(AccelvisorError):
                # An answer shows that what was said before it arrived, if on the same connection.
                await asking.ask(AskDomain(""))
                if asking.breaks == before:
                    break
        moves.discard(move)
        done()
        if not moves:
            del self._askings[host]
            await asking.close()

    def _say(self, moves: set[bytes], *, back: bool) -> None:
        for move in list(moves):
            self._tell(move, back)


class Answering:
    """A source's way to its destination: whatever connection that one used last."""

    def __init__(self, link: PeerLink | None, host: UUID, lost: Callable[[], None]) -> None:
        self.link = link
        self.host = host
        self._lost = lost
        if link is not None:
            self._watch(link)

    def use(self, link: PeerLink) -> bool:
        """Answer over this connection from here on; whether it is another one."""
        if link is self.link:
            return False
        self.link = link
        self._watch(link)
        return True

    def send(self, message: wire.Message) -> None:
        """A message; lost when the link is down."""
        send(self.link, message)

    def _watch(self, link: PeerLink) -> None:
        def ended(_: object) -> None:
            if self.link is link:
                self._lost()

        link.closed.add_done_callback(ended)


def send(link: PeerLink | None, message: wire.Message) -> None:
    """Over a link, if there is one."""
    if link is None:
        return
    try:
        link.notify(wire.encode(message))
    except AccelvisorError as error:
        LOG.info("%s was not sent: %s", type(message).__name__, error.message)


def _read(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"a peer's answer cannot be read: {error}", code="peer-answer", where="peer"
        ) from error
