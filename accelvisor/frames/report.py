"""What a verification of a file found, step by step, for people and for `accelctl checkpoint
verify`: the file and a trust document are enough, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from accelvisor.errors import DataError, FrameRefused
from accelvisor.frames import envelope as envelopes
from accelvisor.frames import manifest as manifests
from accelvisor.frames import trust
from accelvisor.frames.audit import Event
from accelvisor.frames.chunks import Buffer, Header, Kind, expand
from accelvisor.frames.container import Readable, Reader
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import Manifest
from accelvisor.frames.receive import Receiver
from accelvisor.frames.seal import Opener
from accelvisor.frames.steps import STEP_OF, STEPS
from accelvisor.frames.trust import Trust
from accelvisor.frames.verify import INSPECTION, PASSED, Expected, Policy, Verifier
from accelvisor.limits import LIMITS

#: The result of a step that was not come to.
NOT_REACHED = "not reached"
_DOCUMENTS = (Kind.FUNCTION, Kind.STATUS)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: ``result`` is ``passed``, the code of a refusal, or ``not reached``."""

    number: int
    name: str
    question: str
    result: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        verified: all steps passed.
        code, message, hint: of the refusal; empty when it is verified.
        digest: of the manifest; empty when it could not be read.
        signers: UUIDs of the hosts that signed it; empty unless it is verified.
        manifest: what it says: to be believed only where ``verified``.
        documents: function and status frame as they were signed; only where it is verified, and not
            encrypted.
    """

    verified: bool
    code: str
    message: str
    hint: str
    digest: bytes
    signers: tuple[str, ...]
    steps: tuple[StepResult, ...]
    manifest: Manifest | None
    documents: dict[Kind, bytes]


class _Records:
    """A sink that keeps what was recorded."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)


class _Fresh:
    """No nonce was used: nothing is loaded."""

    def seen(self, nonce: bytes) -> bool:
        return False

    def use(self, nonce: bytes, until_ns: int) -> bool:
        return True


class _Documents:
    """Keeps the chunks of the two documents, as they are stored, as far as these may be long."""

    def __init__(self) -> None:
        self._kept: list[tuple[Header, bytes]] = []
        self._bytes = 0

    def write(self, header: Header, payload: Buffer) -> None:
        if header.kind in _DOCUMENTS:
            self._bytes += max(header.length, len(payload))
            if self._bytes <= 2 * LIMITS.document_bytes:
                self._kept.append((header, bytes(payload)))

    def read(self, opener: Opener | None) -> dict[Kind, bytes]:
        """The checkpoint was verified."""
        if self._bytes > 2 * LIMITS.document_bytes:
            return {}
        found: dict[Kind, bytearray] = {}
        for header, stored in self._kept:
            payload = opener.open_chunk(header, stored) if opener else stored
            data = found.setdefault(Kind(header.kind), bytearray())
            end = header.offset + header.length
            if len(data) < end:
                data.extend(bytes(end - len(data)))
            data[header.offset : end] = expand(header, payload)
        return {kind: bytes(data) for kind, data in found.items()}


def report(
    file: Readable,
    keyring: Keyring,
    clock_ns: Callable[[], int],
    *,
    expected: Expected | None = None,
    policy: Policy = INSPECTION,
    opener: Callable[[Manifest], Opener | None] = lambda manifest: None,
) -> Report:
    """Verify ``file`` and say how far it came. Never raises for what is wrong with the file.

    Args:
        opener: opens what is encrypted, where this host can; None where it cannot.
    """
    records, kept = _Records(), _Documents()
    verifier = Verifier(
        keyring=lambda: keyring,
        policy=policy,
        expected=expected or Expected(),
        clock_ns=clock_ns,
        audit=records,
        used=_Fresh(),
    )
    manifest: Manifest | None = None
    digest = b""
    try:
        reader = Reader(file)
        manifest, digest = _said(reader.envelope)
        opened = verifier.open(reader.envelope)
        receiver = Receiver(verifier, opened, kept)
        for header, payload in reader.chunks(receiver, opened.statement.chunks):
            receiver.take(header, payload)
        verified = receiver.finish()
    except FrameRefused as error:
        return Report(
            False,
            error.code,
            error.message,
            error.hint,
            digest,
            (),
            _steps(records.events, error),
            manifest,
            {},
        )
    documents: dict[Kind, bytes] = {}
    try:
        unsealer = opener(verified.manifest)
        if unsealer is not None or not verified.manifest.sealed:
            documents = kept.read(unsealer)
    except DataError:
        documents = {}  # it is sealed with a key that this host has no more
    return Report(
        True,
        "",
        "",
        "",
        verified.digest,
        tuple(sorted(verified.signers)),
        _steps(records.events, None),
        verified.manifest,
        documents,
    )


def as_object(found: Report) -> dict[str, Any]:
    """A report as JSON has it: bytes are hexadecimal, and the manifest has the fields that
    accelvisor-checkpoint(5) names.
    """
    return {
        "verified": found.verified,
        "code": found.code,
        "message": found.message,
        "hint": found.hint,
        "digest": found.digest.hex(),
        "signers": list(found.signers),
        "steps": [_step(step) for step in found.steps],
        "manifest": None if found.manifest is None else plain(found.manifest),
    }


def plain(document: msgspec.Struct) -> dict[str, Any]:
    """A document with its bytes in hexadecimal."""
    made: dict[str, Any] = _hex(msgspec.to_builtins(document, builtin_types=(bytes,)))
    return made


def _step(step: StepResult) -> dict[str, Any]:
    return {
        "number": step.number,
        "name": step.name,
        "question": step.question,
        "result": step.result,
        "detail": step.detail,
    }


def _hex(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {name: _hex(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_hex(inner) for inner in value]
        case _:
            return value


def offline_keyring(envelope: bytes) -> Keyring:
    """The keys of a trust document that a person brought: its own roots vouch for it, so the person
    must know where it comes from.

    Raises:
        DataError: ``trust-...``: it is damaged, or not signed as it says itself.
    """
    try:
        payload = envelopes.decode(
            envelope, kind=trust.TRUST_TYPE, max_bytes=LIMITS.trust_bytes
        ).payload
    except DataError as error:
        raise DataError(
            f"this is no trust document: {error.message}", code="trust-shape", where="trust"
        ) from error
    document: Trust = trust.decode(payload)
    roots = frozenset(key.key_id for key in document.roots.keys)
    return Keyring(trust.first(envelope, roots).document)


def _said(envelope: bytes) -> tuple[Manifest | None, bytes]:
    """What the manifest says, if it can be read; nothing is verified."""
    try:
        payload = envelopes.decode(
            envelope, kind=manifests.MANIFEST_TYPE, max_bytes=LIMITS.manifest_bytes
        ).payload
        return manifests.decode(payload, Manifest), hashlib.sha256(payload).digest()
    except DataError:
        return None, b""


def _steps(events: list[Event], refused: FrameRefused | None) -> tuple[StepResult, ...]:
    passed = {event.step for event in events if event.code == PASSED}
    stopped = STEP_OF[refused.code].number if refused is not None else len(STEPS) + 1
    found = []
    for step in STEPS:
        result, detail = NOT_REACHED, ""
        if refused is not None and step.number == stopped:
            result, detail = refused.code, refused.message
        elif step.number in passed and step.number < stopped:
            result = PASSED
        found.append(StepResult(step.number, step.name, step.question, result, detail))
    return tuple(found)
