"""The verifier: the steps of :mod:`accelvisor.frames.steps` in their order, with a record of each.

:meth:`Verifier.open` is steps 1 to 5, from an envelope alone. A receiver
(:mod:`accelvisor.frames.receive`) then takes the chunks; its ``finish`` is steps 1 to 5 once more
(a key may have been revoked, and time has passed), then 6 and 7. What comes out is a
:class:`Verified`, the only thing that whoever loads state should accept.

Step 1 reads the manifest, bounded and strictly; nothing that it says is acted upon before step 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from accelvisor.errors import DataError, FrameRefused
from accelvisor.frames import envelope as envelopes
from accelvisor.frames import manifest as manifests
from accelvisor.frames.audit import Event, Sink
from accelvisor.frames.envelope import Envelope, PublicKey, SignatureError
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import (
    MANIFEST_TYPE,
    OFFER_TYPE,
    Manifest,
    Offer,
    Profile,
    Statement,
)
from accelvisor.frames.steps import refuse
from accelvisor.limits import LIMITS

#: The code of a record of a step that was passed.
PASSED = "passed"

Result = TypeVar("Result")

_SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Policy:
    """How strict a verification is.

    Args:
        skew_ns: how far ahead of this host's clock a checkpoint may be made.
        max_age_ns: how old it may be; None: only its own expiry counts.
        epoch_jump: how far ahead of the known epoch it may be; None: any. Where no epoch is known
            there is nothing to jump from: the first move of a function to a host, and what lies
            behind a known state (a link of a chain, a step back), may be of any.
        retired_keys: a rotated key counts for what it signed in its time. Only for checkpoints at
            rest: whoever has a rotated key can write an old date.
        once: a nonce is used up.
    """

    skew_ns: int = int(LIMITS.clock_skew_s * _SECOND)
    max_age_ns: int | None = int(LIMITS.frame_age_s * _SECOND)
    epoch_jump: int | None = LIMITS.epoch_jump
    retired_keys: bool = False
    once: bool = True


#: A peer sends it now.
MIGRATION = Policy()
#: It lay in a file; its epoch, not its age, says whether it is of use.
AT_REST = Policy(max_age_ns=None, retired_keys=True, once=False)
#: Somebody wants to know whether it is whole and who signed it; nothing will be loaded.
INSPECTION = Policy(max_age_ns=None, epoch_jump=None, retired_keys=True, once=False)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known before; None where nothing is.

    Args:
        me: this host's UUID; the audience must be it.
        source: the peer's UUID, as TLS authenticated it.
        nonce: that this host chose.
        epoch: of the function as this host knows it: the floor; 0: it knows none.
        sequence: of the last checkpoint that was taken of that epoch; -1 for none.
        boot: the highest that was seen of the source.
        parent: digest of the manifest that must be continued; empty: it must be whole.
        owner: SHA-256 of the name; ``function``, ``domain`` UUIDs; ``profile`` of the function
            that the state is loaded into.
    """

    me: str | None = None
    source: str | None = None
    nonce: bytes | None = None
    epoch: int = 0
    sequence: int = -1
    boot: int = 0
    parent: bytes | None = None
    owner: bytes | None = None
    function: str | None = None
    domain: str | None = None
    profile: Profile | None = None


class UsedNonces(Protocol):
    """Which nonces were used; kept on disk until they expire."""

    def seen(self, nonce: bytes) -> bool: ...

    def use(self, nonce: bytes, until_ns: int) -> bool:
        """Use it up; False when it was used before. Durable when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class Opened(Generic[Statement]):
    """An offer or manifest that passed steps 1 to 5.

    Args:
        statement: what it says.
        digest: SHA-256 of its payload; a manifest's name.
        signers: UUIDs of the hosts that signed it.
        envelope: the bytes that were verified.
    """

    statement: Statement
    digest: bytes
    signers: frozenset[str]
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that passed all seven steps: what it says, its name, and who signed it.

    Whoever decrypts, expands, parses or loads asks for one of these.
    """

    manifest: Manifest
    digest: bytes
    signers: frozenset[str]
    envelope: bytes


class Verifier:
    """Verifies one checkpoint against what this host knows.

    Args:
        keyring: asked anew each time, so that a revocation counts at once.
        clock_ns: nanoseconds since 1970.
        audit: gets a record for each step that was passed or that refused.
        used: asked where the policy says that a nonce is used up.
    """

    def __init__(
        self,
        *,
        keyring: Callable[[], Keyring],
        policy: Policy,
        expected: Expected,
        clock_ns: Callable[[], int],
        audit: Sink,
        used: UsedNonces,
    ) -> None:
        self._keyring = keyring
        self._policy = policy
        self._audit = audit
        self._used = used
        self.expected = expected
        self.clock_ns = clock_ns

    def open(self, envelope: bytes) -> Opened[Manifest]:
        """Steps 1 to 5 of a manifest.

        Raises:
            FrameRefused: it has the step and its code.
        """
        return self._open(envelope, MANIFEST_TYPE, Manifest)

    def open_offer(self, envelope: bytes) -> Opened[Offer]:
        """Steps 1 to 5 of an offer, and 7 at once: what will be refused should not be sent.

        Raises:
            FrameRefused: as for a manifest.
        """
        opened = self._open(envelope, OFFER_TYPE, Offer)
        self._step(7, opened.digest, lambda: self._bind(opened.statement))
        return opened

    def again(self, envelope: bytes) -> Opened[Manifest]:
        """:meth:`open` once more, at the end of a transfer; only a refusal makes records."""
        return self._open(envelope, MANIFEST_TYPE, Manifest, quiet=True)

    def finish(self, opened: Opened[Manifest]) -> Verified:
        """Step 7, and the nonce is used up. For whoever did step 6: the receiver."""
        manifest = opened.statement
        self._step(7, opened.digest, lambda: self._bind(manifest))
        if self._policy.once and not self._used.use(manifest.nonce, manifest.expires_ns):
            self.refused(_replayed(), opened.digest)
        return Verified(manifest, opened.digest, opened.signers, opened.envelope)

    def refused(self, error: FrameRefused, subject: bytes) -> NoReturn:
        """Record a refusal and raise it."""
        self._record(error.step, error.code, subject, error.message)
        raise error

    def passed(self, step: int, subject: bytes) -> None:
        self._record(step, PASSED, subject)

    def _record(self, step: int, code: str, subject: bytes, detail: str = "") -> None:
        self._audit.record(Event(self.clock_ns(), step, code, subject.hex(), detail))

    def _step(
        self, step: int, subject: bytes, action: Callable[[], Result], quiet: bool = False
    ) -> Result:
        try:
            result = action()
        except FrameRefused as error:
            self.refused(error, subject)
        if not quiet:
            self.passed(step, subject)
        return result

    def _open(
        self, data: bytes, kind: str, form: type[Statement], quiet: bool = False
    ) -> Opened[Statement]:
        try:
            envelope, found = _shape(data, kind, form)
        except FrameRefused as error:
            # It has no digest of its own, so the record names the bytes as they came.
            self.refused(error, hashlib.sha256(data).digest())
        subject = manifests.manifest_digest(envelope.payload)
        if not quiet:
            self.passed(1, subject)
        now, keyring = self.clock_ns(), self._keyring()
        signed = min(now, found.created_ns) if self._policy.retired_keys else now
        keys = self._step(2, subject, lambda: _keys(envelope, keyring, signed), quiet)
        signers = self._step(
            3, subject, lambda: _signatures(envelope, keys, keyring.manifest_threshold), quiet
        )
        self._step(4, subject, lambda: self._address(found, signers), quiet)
        self._step(5, subject, lambda: self._freshness(found, now), quiet)
        return Opened(found, subject, signers, data)

    def _address(self, found: Manifest | Offer, signers: frozenset[str]) -> None:
        expected = self.expected
        if found.source not in signers:
            raise refuse("frame-source", f"host {found.source} did not sign it itself")
        if expected.source not in (None, found.source):
            raise refuse("frame-source", f"it is from {found.source}, not {expected.source}")
        audience = found.audience or found.source
        if expected.me not in (None, audience):
            raise refuse("frame-audience", f"it was made for host {audience}")
        if expected.nonce not in (None, found.nonce):
            raise refuse("frame-nonce", "its nonce is not the one that was given out")
        if self._policy.once and self._used.seen(found.nonce):
            raise _replayed()

    def _freshness(self, found: Manifest | Offer, now: int) -> None:
        policy, expected = self._policy, self.expected
        if found.created_ns > now + policy.skew_ns:
            ahead = (found.created_ns - now) / _SECOND
            raise refuse("frame-future", f"it was made {ahead:.1f} s from now")
        if now > found.expires_ns:
            late = (now - found.expires_ns) / _SECOND
            raise refuse("frame-stale", f"it expired {late:.1f} s ago")
        if policy.max_age_ns is not None and now - found.created_ns > policy.max_age_ns:
            age = (now - found.created_ns) / _SECOND
            raise refuse("frame-stale", f"it was made {age:.1f} s ago")
        if found.boot < expected.boot:
            raise refuse("frame-epoch-old", "its host has started again since it was made")
        if found.epoch < expected.epoch:
            raise refuse(
                "frame-epoch-old", f"epoch {expected.epoch} is known, it is of {found.epoch}"
            )
        if found.epoch == expected.epoch and found.sequence <= expected.sequence:
            raise refuse(
                "frame-epoch-old",
                f"checkpoint {expected.sequence} of epoch {found.epoch} is known, "
                f"it is {found.sequence}",
            )
        jump = policy.epoch_jump if expected.epoch else None
        if jump is not None and found.epoch - expected.epoch > jump:
            raise refuse(
                "frame-epoch-jump", f"epoch {expected.epoch} is known, it is of {found.epoch}"
            )

    def _bind(self, found: Manifest | Offer) -> None:
        expected = self.expected
        if expected.owner not in (None, found.owner):
            raise refuse("frame-owner", "it belongs to another owner")
        if expected.function not in (None, found.function):
            raise refuse("frame-function", f"it is of function {found.function}")
        if expected.domain not in (None, found.domain):
            raise refuse("frame-domain", f"it is of domain {found.domain or 'none'}")
        if expected.profile is not None and not found.profile.fits(expected.profile):
            raise refuse("frame-profile", "it is of a function of another size")


def _shape(data: bytes, kind: str, form: type[Statement]) -> tuple[Envelope, Statement]:
    try:
        envelope = envelopes.decode(data, kind=kind, max_bytes=LIMITS.manifest_bytes)
    except DataError as error:
        raise refuse("frame-shape", str(error)) from error
    return envelope, manifests.decode(envelope.payload, form)


def _keys(envelope: Envelope, keyring: Keyring, when_ns: int) -> dict[str, PublicKey]:
    return {s.key_id: keyring.usable(s.key_id, when_ns) for s in envelope.signatures}


def _signatures(envelope: Envelope, keys: dict[str, PublicKey], threshold: int) -> frozenset[str]:
    try:
        return envelopes.verify(envelope, keys, threshold)
    except SignatureError as error:
        raise refuse(f"frame-{error.kind}", str(error)) from error


def _replayed() -> FrameRefused:
    return refuse("frame-replayed", "its nonce was used before")
