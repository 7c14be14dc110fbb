"""Watermarks as documents: keys, where a model lies, and signed verdicts on what was found there.

The marks themselves are numbers and belong to :mod:`accelvisor.kernels.watermark`. Which bits a
model carries follows from its owner's key and its name, so nothing but the key must be known to
look for them, and a checkpoint that names a model tells nobody what its mark is.

A *registration* says which tensor of a function is a marked layer. A manifest names each model with
its registration's digest; the destination finds the tensor as the one whose registration would have
that digest, since handles and addresses do not change in a move. It needs no key for that.

A *verdict* is what a host found when it looked, signed by the host. Its envelope is that of
:mod:`accelvisor.frames.envelope`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from accelvisor.errors import DataError
from accelvisor.frames import canonical
from accelvisor.frames import envelope as envelopes
from accelvisor.frames.envelope import SignatureError
from accelvisor.frames.identity import KEY_ID_CHARS, Signer
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import Count, Hash, KeyId, MaybeHash, Model, Name, Nonce, Uuid
from accelvisor.limits import LIMITS

VERDICT_TYPE = "application/vnd.accelvisor.watermark"

KEY_BYTES = 32
#: Of a mark. Unrelated weights have half of them wrong, give or take 6.
BITS = 128
#: So many bits may be wrong: unrelated weights come this near once in 3 * 10**18 times.
THRESHOLD = 16

_HEADER = "accelvisor watermark key 1"
_SKEW_NS = int(LIMITS.clock_skew_s * 10**9)
_AGE_NS = int(LIMITS.frame_age_s * 10**9)

Errors: TypeAlias = Annotated[int, Meta(ge=0, le=BITS)]
Dim: TypeAlias = Annotated[int, Meta(ge=0, le=LIMITS.tensor_bytes)]
Shape: TypeAlias = Annotated[tuple[Dim, ...], Meta(max_length=LIMITS.tensor_rank)]
#: What marks are read in.
DTypeName: TypeAlias = Literal["float16", "float32", "float64", "int8", "int16", "int32", "int64"]
#: A handle has 64 bits, which no type of msgspec bounds; an address stays below 2**63.
Handle: TypeAlias = Annotated[int, Meta(ge=0)]


# --- keys -----------------------------------------------------------------------------------------


class Key(Struct, frozen=True):
    """An owner's secret. Shows it in no ``repr``."""

    secret: bytes

    @classmethod
    def generate(cls, entropy: Callable[[int], bytes]) -> Key:
        """``entropy(32)`` must be unguessable: ``os.urandom``."""
        return cls(entropy(KEY_BYTES))

    @property
    def key_id(self) -> str:
        """32 hex digits that name the key and tell nothing of it."""
        return hashlib.sha256(b"accelvisor watermark key id 1\0" + self.secret).hexdigest()[
            :KEY_ID_CHARS
        ]

    def message(self, model: str) -> bytes:
        """The 16 bytes that a model of this name carries."""
        seed = b"accelvisor watermark bits 1\0" + self.secret + model.encode()
        return hashlib.shake_256(seed).digest(BITS // 8)

    def to_text(self) -> str:
        """What is kept in a file (0600) and given to other hosts."""
        return f"{_HEADER}\n{self.secret.hex()}\n"

    @classmethod
    def from_text(cls, text: bytes) -> Key:
        """Raises DataError ``watermark-key``."""
        try:
            header, digits, rest = text.decode("ascii").split("\n")
            secret = bytes.fromhex(digits)
            right = (header, rest, secret.hex()) == (_HEADER, "", digits)
        except ValueError:
            right = False
        if not right or len(secret) != KEY_BYTES:
            raise DataError(
                "it is no watermark key",
                code="watermark-key",
                where="watermark",
                hint="accelctl watermark key export writes such files",
            )
        return cls(secret)

    def __repr__(self) -> str:
        return f"<Key {self.key_id}>"


# --- where a model lies ---------------------------------------------------------------------------


class Place(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tensor of a function: what the guest calls it, its device address, and what it holds."""

    handle: Handle
    address: Count
    dtype: DTypeName
    shape: Shape


class Registration(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A marked layer in a function's memory.

    Args:
        model: its owner's name for it; the bits follow from it.
        key: id of the key that it was marked with.
    """

    function: Uuid
    model: Name
    key: KeyId
    place: Place

    @property
    def identity(self) -> bytes:
        """SHA-256 of what kind of thing is marked: dtype, shape, and the key's id."""
        return _hash({"dtype": self.place.dtype, "key": self.key, "shape": self.place.shape})

    @property
    def digest(self) -> bytes:
        """How a manifest names it (:class:`accelvisor.frames.manifest.Model`): SHA-256 over the
        model's name, its identity, its place, and how many bits may be wrong.
        """
        return _hash(
            {
                "version": 1,
                "function": self.function,
                "model": self.model,
                "identity": self.identity,
                "handle": self.place.handle,
                "address": self.place.address,
                "bits": BITS,
                "threshold": THRESHOLD,
            }
        )

    def as_model(self) -> Model:
        """What a manifest says of it."""
        return Model(model=self.model, key=self.key, digest=self.digest)


def register(function: str, model: str, key: str, place: Place) -> Registration:
    """A checked registration. Raises DataError ``watermark-registration``."""
    made = Registration(function=function, model=model, key=key, place=place)
    return decode_registration(encode_registration(made))


def encode_registration(registration: Registration) -> bytes:
    """Its canonical bytes."""
    return canonical.encode(msgspec.to_builtins(registration))


def decode_registration(data: bytes) -> Registration:
    """Raises DataError ``watermark-registration``."""
    try:
        value: Any = canonical.decode(data, max_bytes=LIMITS.watermark_verdict_bytes)
        return msgspec.convert(value, Registration)
    except (DataError, msgspec.ValidationError, OverflowError) as error:
        raise DataError(
            f"it is no registration of a model: {error}",
            code="watermark-registration",
            where="watermark",
            hint="a model's name is 1 to 128 printable ASCII characters; a key id 32 hex digits",
        ) from error


def locate(function: str, model: Model, places: list[Place]) -> Registration | None:
    """The registration that a manifest means, among the tensors that are there; None without."""
    for place in places:
        found = Registration(function=function, model=model.model, key=model.key, place=place)
        if found.digest == model.digest:
            return found
    return None


def _hash(value: canonical.Value) -> bytes:
    return hashlib.sha256(canonical.encode(value)).digest()


# --- verdicts -------------------------------------------------------------------------------------


class Verdict(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a host found in a function's memory.

    Args:
        host: who looked.
        registration: digest of the registration, as a manifest names it.
        errors: bits that were wrong; None when the tensor is gone or holds no usable numbers.
        accepted: ``errors`` is at most ``threshold``.
        nonce: of whoever asked.
        created_ns: nanoseconds since 1970 by the host's clock.
        manifest: digest of the manifest that the state was loaded from; empty without.
    """

    version: Literal[1] = 1
    host: Uuid
    function: Uuid
    model: Name
    key: KeyId
    registration: Hash
    errors: Errors | None
    threshold: Errors = THRESHOLD
    accepted: bool
    nonce: Nonce
    created_ns: Count
    manifest: MaybeHash


def judge(
    registration: Registration,
    errors: int | None,
    *,
    host: str,
    nonce: bytes,
    created_ns: int,
    manifest: bytes = b"",
) -> Verdict:
    """The verdict that follows from the number of wrong bits."""
    return Verdict(
        host=host,
        function=registration.function,
        model=registration.model,
        key=registration.key,
        registration=registration.digest,
        errors=errors,
        accepted=errors is not None and errors <= THRESHOLD,
        nonce=nonce,
        created_ns=created_ns,
        manifest=manifest,
    )


def sign(verdict: Verdict, signer: Signer) -> bytes:
    """The envelope. Raises DataError ``verdict-shape``: a field is out of bounds."""
    payload = canonical.encode(msgspec.to_builtins(verdict, builtin_types=(bytes,)))
    _decode(payload)
    return envelopes.sign(VERDICT_TYPE, payload, [signer]).encode()


def verify(envelope: bytes, keyring: Keyring, *, nonce: bytes, now_ns: int) -> Verdict:
    """A verdict that the host it names has signed just now, for whoever chose ``nonce``. Whether it
    is good news stands in ``accepted``, and what it is about in the other fields.

    Raises:
        DataError: ``envelope-invalid``, ``document-invalid``, ``verdict-shape``,
            ``verdict-signature``, ``verdict-nonce``, ``verdict-stale``.
        FrameRefused: ``frame-key-unknown``, ``frame-key-revoked``, ``frame-key-expired``.
    """
    opened = envelopes.decode(
        envelope, kind=VERDICT_TYPE, max_bytes=LIMITS.watermark_verdict_bytes
    )
    found = _decode(opened.payload)
    keys = {s.key_id: keyring.usable(s.key_id, now_ns) for s in opened.signatures}
    try:
        holders = envelopes.verify(opened, keys, 1)
    except SignatureError as error:
        raise _refused("verdict-signature", str(error)) from error
    if holders != {found.host}:
        raise _refused("verdict-signature", f"it is not signed by host {found.host} alone")
    if found.nonce != nonce:
        raise _refused("verdict-nonce", "it answers another question")
    if not -_SKEW_NS <= now_ns - found.created_ns <= _AGE_NS:
        raise _refused("verdict-stale", "it is not of now: compare the clocks")
    return found


def _decode(payload: bytes) -> Verdict:
    try:
        value: Any = canonical.decode(payload, max_bytes=LIMITS.watermark_verdict_bytes)
        found = msgspec.convert(value, Verdict, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError, OverflowError) as error:
        raise _refused("verdict-shape", str(error)) from error
    faults = {
        "a field is missing": set(value) != set(Verdict.__struct_fields__),
        "it accepts what it should refuse, or the other way round": found.accepted
        != (found.errors is not None and found.errors <= found.threshold),
        "it allows another number of wrong bits": found.threshold != THRESHOLD,
        "its manifest is no digest": len(found.manifest) not in (0, 32),
    }
    for fault, there in faults.items():
        if there:
            raise _refused("verdict-shape", fault)
    return found


def _refused(code: str, why: str) -> DataError:
    return DataError(
        f"the verdict on a watermark is not usable: {why}", code=code, where="watermark"
    )
