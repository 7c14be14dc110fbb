"""VERSION: what two ends agree on, and the phases of a connection as a table.

The client proposes a version and capabilities as JSON; the server answers with the same major, a
minor not above the proposed one, and a subset of the proposed capabilities. A capability that is
absent has the specification's default. What came of it is an :class:`Agreement`, which a restarted
worker can be given instead of a handshake.

    phase      event             ->  phase     answer
    GREETING   version agreed        READY     reply
    GREETING   version refused       REFUSED   errno, then close
    GREETING   other command         REFUSED   errno, then close
    READY      other command         READY     by the command
    READY      version (any)         READY     errno: it is negotiated once
    REFUSED    anything              REFUSED   close
"""

from __future__ import annotations

import errno
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from accelvisor.limits import LIMITS, MIB
from accelvisor.vfio_user.messages import VERSION, Bytes, PayloadError, bad, need
from accelvisor.vfio_user.protocol import PAGE_BYTES, VERSION_MAJOR, VERSION_MINOR

#: QEMU's proposal has 150 bytes; nothing sensible needs more than this.
MAX_VERSION_BYTES = 4096

#: The specification's values for capabilities that a sender leaves out.
DEFAULT_MAX_FDS = 1
DEFAULT_TRANSFER = MIB
DEFAULT_DMA_MAPS = 65_535


class Phase(Enum):
    GREETING = auto()  # connected, nothing but VERSION is legal
    READY = auto()  # negotiated
    REFUSED = auto()  # answered with an error; only closing is left


class Event(Enum):
    VERSION_AGREED = auto()
    VERSION_REFUSED = auto()
    COMMAND = auto()


class Move(NamedTuple):
    """``refusal`` is the errno to answer with, 0 to go on; ``close`` ends the connection after."""

    phase: Phase
    refusal: int = 0
    close: bool = False


PHASES: MappingProxyType[tuple[Phase, Event], Move] = MappingProxyType(
    {
        (Phase.GREETING, Event.VERSION_AGREED): Move(Phase.READY),
        (Phase.GREETING, Event.VERSION_REFUSED): Move(Phase.REFUSED, errno.EINVAL, True),
        (Phase.GREETING, Event.COMMAND): Move(Phase.REFUSED, errno.EINVAL, True),
        (Phase.READY, Event.VERSION_AGREED): Move(Phase.READY, errno.EINVAL),
        (Phase.READY, Event.VERSION_REFUSED): Move(Phase.READY, errno.EINVAL),
        (Phase.READY, Event.COMMAND): Move(Phase.READY),
        (Phase.REFUSED, Event.VERSION_AGREED): Move(Phase.REFUSED, errno.EINVAL, True),
        (Phase.REFUSED, Event.VERSION_REFUSED): Move(Phase.REFUSED, errno.EINVAL, True),
        (Phase.REFUSED, Event.COMMAND): Move(Phase.REFUSED, errno.EINVAL, True),
    }
)


class _TwinSocket(msgspec.Struct):
    supported: bool = False
    fd_index: int | None = None


class Capabilities(msgspec.Struct):
    """The capabilities object of one side; None where not named. Unknown names are ignored."""

    max_msg_fds: int | None = None
    max_data_xfer_size: int | None = None
    max_dma_maps: int | None = None
    pgsizes: int | None = None
    write_multiple: bool | None = None
    twin_socket: _TwinSocket | None = None

    @property
    def named(self) -> dict[str, Any]:
        """Only what was named, as it goes on the wire."""
        values = {f: getattr(self, f) for f in self.__struct_fields__}
        if self.twin_socket is not None:
            twin: dict[str, Any] = {"supported": self.twin_socket.supported}
            if self.twin_socket.fd_index is not None:
                twin["fd_index"] = self.twin_socket.fd_index
            values["twin_socket"] = twin
        return {name: value for name, value in values.items() if value is not None}


class _VersionData(msgspec.Struct):
    capabilities: Capabilities = msgspec.field(default_factory=Capabilities)


_DECODER = msgspec.json.Decoder(_VersionData)


class Agreement(msgspec.Struct, frozen=True):
    """What holds for a connection: our peer's limits, and our own as the peer knows them.

    ``peer_*`` bound what we may send, ``own_*`` what the peer may send.
    """

    minor: int = VERSION_MINOR
    peer_max_fds: int = DEFAULT_MAX_FDS
    peer_max_transfer: int = DEFAULT_TRANSFER
    own_max_fds: int = LIMITS.vfio_message_fds
    own_max_transfer: int = LIMITS.vfio_transfer_bytes
    max_dma_maps: int = DEFAULT_DMA_MAPS
    page_sizes: int = PAGE_BYTES
    write_multiple: bool = False
    twin_socket: bool = False

    def to_json(self) -> bytes:
        """For a journal: a new worker takes the connection over with it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Agreement:
        """Raises PayloadError for anything that :meth:`to_json` did not write."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise bad("saved agreement", str(error)) from error


def own_capabilities() -> Capabilities:
    """What this implementation can do, as either side proposes it."""
    return Capabilities(
        max_msg_fds=LIMITS.vfio_message_fds,
        max_data_xfer_size=LIMITS.vfio_transfer_bytes,
        max_dma_maps=LIMITS.dma_maps,
        pgsizes=PAGE_BYTES,
        write_multiple=True,
    )


def pack_version(major: int, minor: int, capabilities: Capabilities) -> bytes:
    data = msgspec.json.encode({"capabilities": capabilities.named})
    return VERSION.pack(major, minor) + data + b"\0"


def parse_version(body: Bytes) -> tuple[int, int, Capabilities]:
    """Major, minor and the capabilities that were named; version data is optional.

    Raises:
        PayloadError: too long, no JSON, or a capability of the wrong type or range.
    """
    need(body, VERSION.size, "VERSION")
    if len(body) > MAX_VERSION_BYTES:
        raise bad("VERSION", f"{len(body)} bytes, the limit is {MAX_VERSION_BYTES}")
    major, minor = VERSION.unpack_from(body)
    text = bytes(body[VERSION.size :]).split(b"\0", 1)[0]
    if not text.strip():
        return major, minor, Capabilities()
    try:
        capabilities = _DECODER.decode(text).capabilities
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad("VERSION", f"capabilities: {error}") from error
    _check(capabilities)
    return major, minor, capabilities


def _check(c: Capabilities) -> None:
    for name in ("max_msg_fds", "max_data_xfer_size", "max_dma_maps", "pgsizes"):
        value = getattr(c, name)
        if value is not None and not 0 <= value < 1 << 64:
            raise bad("VERSION", f"capability {name} is {value}")
    if c.pgsizes is not None and not c.pgsizes & PAGE_BYTES:
        raise bad("VERSION", f"page sizes {c.pgsizes:#x} leave out 4 KiB")


def answer_version(
    body: Bytes, own: Capabilities, *, twin: bool = False
) -> tuple[bytes, Agreement]:
    """The server's side: reply body and agreement. ``twin`` offers a socket as descriptor 0.

    Raises:
        PayloadError: a proposal that cannot be agreed to.
    """
    major, minor, theirs = parse_version(body)
    if major != VERSION_MAJOR:
        raise bad("VERSION", f"major {major} is not supported, {VERSION_MAJOR} is")
    minor = min(minor, VERSION_MINOR)
    ours = {
        name: value
        for name, value in own.named.items()
        if name in theirs.named and name != "twin_socket"
    }
    reply = msgspec.convert(ours, Capabilities)
    # QEMU 11.1 ends the connection over a number above the one it proposed ("too large").
    reply.max_dma_maps = _lower(reply.max_dma_maps, theirs.max_dma_maps)
    reply.max_data_xfer_size = _lower(reply.max_data_xfer_size, theirs.max_data_xfer_size)
    reply.max_msg_fds = _lower(reply.max_msg_fds, theirs.max_msg_fds)
    if theirs.write_multiple is False:
        reply.write_multiple = False
    twin = twin and theirs.twin_socket is not None and theirs.twin_socket.supported
    if twin:
        reply.twin_socket = _TwinSocket(True, 0)
    return pack_version(VERSION_MAJOR, minor, reply), _agreement(minor, theirs, reply, twin)


def _lower(ours: int | None, theirs: int | None) -> int | None:
    return None if ours is None or theirs is None else min(ours, theirs)


def accept_version(body: Bytes, own: Capabilities, fds: int) -> tuple[Agreement, int | None]:
    """The client's side: the agreement and the index of the twin socket's descriptor, if any.

    Raises:
        PayloadError: the server's answer breaks the rules of negotiation.
    """
    major, minor, theirs = parse_version(body)
    if major != VERSION_MAJOR or minor > VERSION_MINOR:
        raise bad("VERSION", f"the server answered {major}.{minor}")
    twin = theirs.twin_socket
    index = None
    if twin is not None and twin.supported:
        wanted = own.twin_socket is not None and own.twin_socket.supported
        index = twin.fd_index
        if not wanted or index is None or not 0 <= index < fds:
            raise bad("VERSION", "the server offers a twin socket that it did not send")
    return _agreement(minor, theirs, own, index is not None), index


def _agreement(minor: int, peer: Capabilities, own: Capabilities, twin: bool) -> Agreement:
    """Absent capabilities take the specification's defaults on either side."""

    def pick(value: int | None, default: int) -> int:
        return default if value is None else value

    return Agreement(
        minor=minor,
        peer_max_fds=pick(peer.max_msg_fds, DEFAULT_MAX_FDS),
        peer_max_transfer=min(pick(peer.max_data_xfer_size, DEFAULT_TRANSFER), 1 << 32),
        own_max_fds=pick(own.max_msg_fds, DEFAULT_MAX_FDS),
        own_max_transfer=pick(own.max_data_xfer_size, DEFAULT_TRANSFER),
        max_dma_maps=min(
            pick(peer.max_dma_maps, DEFAULT_DMA_MAPS), pick(own.max_dma_maps, DEFAULT_DMA_MAPS)
        ),
        page_sizes=PAGE_BYTES,
        write_multiple=bool(peer.write_multiple) and bool(own.write_multiple),
        twin_socket=twin,
    )


__all__ = [
    "Agreement",
    "Capabilities",
    "Event",
    "Move",
    "PHASES",
    "PayloadError",
    "Phase",
    "accept_version",
    "answer_version",
    "own_capabilities",
    "pack_version",
    "parse_version",
]
