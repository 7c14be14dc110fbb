"""Control messages between two accelvisords that move a function; sans-IO.

msgpack, one map a message, tagged by ``t``. Every field is bounded, a field or type that is not
known is refused, and so is anything behind the message. Chunks of state do not pass here (the link
carries them); neither do greetings with versions, and keep-alives (``link``).

The life of a move, D the destination and S the source::

    D -> S  Reserve        S -> D  Offer       or Refuse
    D -> S  Accept                             D has room and made it: send
    S -> D  Round          D -> S  Ack         each pre-copy round; Resume after a broken link
    S -> D  Sealed         D -> S  Verified    or Refuse
    D -> S  Commit         S -> D  Committed   or Aborted: the arbiter's answer
    D -> S  Running                            S may scrub
    S -> D  Abort          D -> S  Discarded   at any time before

Every message of a move carries its id; with the type it names the step, so that a repeated request
gets the first answer.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS

_MAX_INT = 2**63 - 1

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]  # chosen by the destination at random
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]  # SHA-256
Uuid = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", max_length=36)]
Text = Annotated[str, Meta(max_length=LIMITS.migration_text_chars)]
Code = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9]*(-[a-z0-9]+)*\Z", max_length=64)]
Name = Annotated[str, Meta(max_length=LIMITS.name_chars)]
Count = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Epoch = Annotated[int, Meta(ge=1, le=_MAX_INT)]
Chip = Annotated[int, Meta(ge=0, lt=LIMITS.chips)]
#: Pairs of a function's chips, by its own numbers, that links join.
Shape = Annotated[tuple[tuple[Chip, Chip], ...], Meta(max_length=LIMITS.function_links)]
Signed = Annotated[bytes, Meta(max_length=LIMITS.migration_envelope_bytes)]  # an envelope


class _Wire(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Part(_Wire, frozen=True):
    """One function of a move: at which epoch it moves, and its manifest's digest."""

    function: Uuid
    epoch: Epoch
    digest: Digest


Parts = Annotated[
    tuple[Part, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
]


class Wanted(_Wire, frozen=True):
    """A function as the domain's XML names it, with the size that the destination read there."""

    function: Uuid
    profile: Name


class Offered(_Wire, frozen=True, omit_defaults=True):
    """What the source will send of one function, and how it is called there. The destination gives
    no byte more than this.

    ``chunks`` and ``bytes`` bound the whole stream, all rounds together.
    """

    function: Uuid
    epoch: Epoch
    profile: Name
    cores: Annotated[int, Meta(ge=1, le=2**16)]
    chips: Annotated[int, Meta(ge=1, le=2**16)]
    queues: Annotated[int, Meta(ge=1, le=LIMITS.queues)]
    ring_entries: Annotated[int, Meta(ge=2, le=LIMITS.ring_entries)]
    memory_bytes: Annotated[int, Meta(ge=1, le=LIMITS.memory_bytes)]
    window_bytes: Annotated[int, Meta(ge=1, le=LIMITS.window_bytes)]
    chunks: Count
    bytes: Count
    name: Name = ""
    #: What decides about the bits of its results; the destination compares before anything moves.
    firmware: Annotated[dict[Name, Text], Meta(max_length=32)] = {}
    #: Its programs name these: where they cannot be had it does not go.
    links: Shape = ()


class Message(_Wire, frozen=True, tag_field="t"):
    """Base of all control messages."""


class Step(Message, frozen=True):
    """A message of one move."""

    migration: Id


class Reserve(Step, frozen=True, tag="reserve"):
    """D asks for a domain's functions. ``nonce`` comes back inside every signed manifest."""

    domain: Uuid
    destination: Uuid
    nonce: Id
    functions: Annotated[
        tuple[Wanted, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
    ]


class Offer(Step, frozen=True, tag="offer"):
    """S agrees. ``envelopes`` sign the same values, one for each function (frames.manifest.Offer).
    """

    arbiter: Annotated[str, Meta(pattern=r"\A(source|etcd)\Z")]
    functions: Annotated[
        tuple[Offered, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
    ]
    envelopes: Annotated[
        tuple[Signed, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
    ]


class Refuse(Step, frozen=True, tag="refused"):
    """Either side will not go on, and says why: the four fields of an error."""

    code: Code
    message: Text
    where: Text = ""
    hint: Text = ""


class Accept(Step, frozen=True, tag="accept"):
    """D has the functions and the staging: S may send."""


class Round(Step, frozen=True, tag="round"):
    """S: round ``number`` (from 0) has been sent; totals since the beginning."""

    number: Count
    chunks: Count
    bytes: Count
    last: bool = False


class Ack(Step, frozen=True, tag="ack"):
    """D has all chunks of that round."""

    number: Count
    chunks: Count


class Resume(Step, frozen=True, tag="resume"):
    """D, on a new connection: the first chunk that it does not have."""

    chunk: Count


class Sealed(Step, frozen=True, tag="sealed"):
    """S: the signed manifests, in the order of ``parts``."""

    parts: Parts
    envelopes: Annotated[
        tuple[Signed, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
    ]


class Verified(Step, frozen=True, tag="verified"):
    parts: Parts


class Commit(Step, frozen=True, tag="commit"):
    """D's QEMU runs: may the function run there? Asked again until it is answered."""

    parts: Parts


class Committed(Step, frozen=True, tag="committed"):
    """The signed ledger records; for each part one, in order."""

    parts: Parts
    records: Annotated[
        tuple[Signed, ...], Meta(min_length=1, max_length=LIMITS.migration_functions)
    ]


class Abort(Step, frozen=True, tag="abort"):
    """S keeps the function."""

    code: Code = "migration-aborted"
    message: Text = ""


class Aborted(Step, frozen=True, tag="aborted"):
    """The answer to a Commit that came after the abort."""

    records: Annotated[tuple[Signed, ...], Meta(max_length=LIMITS.migration_functions)] = ()


class Discarded(Step, frozen=True, tag="discarded"):
    """D dropped what it had and will never commit this move."""

    code: Code = "migration-discarded"
    message: Text = ""


class Running(Step, frozen=True, tag="running"):
    """D's device computes; the commit is on D's disk."""


ToSource = Reserve | Accept | Ack | Resume | Refuse | Verified | Commit | Discarded | Running
ToDestination = Offer | Refuse | Round | Sealed | Committed | Abort | Aborted
AnyMessage = (
    Reserve | Offer | Refuse | Accept | Round | Ack | Resume | Sealed | Verified | Commit
    | Committed | Abort | Aborted | Discarded | Running
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (ToSource, ToDestination, AnyMessage)
}


def encode(message: Message) -> bytes:
    """The wire form.

    Raises:
        ProtocolError: ``peer-message`` (out of bounds) or ``peer-message-too-long``; the same
            checks as the receiver's, so that a slip shows where it was made.
    """
    raw = _ENCODER.encode(message)
    decode(raw)
    return raw


def decode(raw: bytes | memoryview, kind: Any = AnyMessage) -> Any:
    """One message of ``kind``: :data:`ToSource`, :data:`ToDestination` or any.

    Raises:
        ProtocolError: ``peer-message-too-long``; ``peer-message``: not that, or out of bounds.
    """
    if len(raw) > LIMITS.migration_message_bytes:
        raise ProtocolError(
            f"a message of {len(raw)} bytes; at most {LIMITS.migration_message_bytes} are allowed",
            code="peer-message-too-long",
            where="migration",
        )
    try:
        message = _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"not a message of this protocol: {error}", code="peer-message", where="migration"
        ) from error
    functions = [part.function for part in _named(message)]
    if len(set(functions)) != len(functions):
        raise ProtocolError("a function is named twice", code="peer-message", where="migration")
    if isinstance(message, Offer | Sealed | Committed):
        signed = message.records if isinstance(message, Committed) else message.envelopes
        if len(signed) != len(_named(message)):
            raise ProtocolError(
                f"{len(_named(message))} functions with {len(signed)} signatures",
                code="peer-message",
                where="migration",
            )
    return message


def _named(message: Message) -> tuple[Part | Wanted | Offered, ...]:
    if isinstance(message, Reserve | Offer):
        return message.functions
    if isinstance(message, Sealed | Verified | Commit | Committed):
        return message.parts
    return ()
