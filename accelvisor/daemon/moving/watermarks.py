"""The watermark unit: looks for owners' marks in functions' memory, and signs what it found.

An owner marks a layer before it is uploaded (accelvisor/kernels/modelfile.py); a function's memory
is only read here. The key is known to the hosts that the owner gave it to and never travels with a
function. A host without it can still say which tensor is meant, and passes that on, but not what
is in it: what it does then is the operator's choice (:data:`Policy`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from accelvisor.daemon.moving.marks import Marks, require_key
from accelvisor.daemon.moving.tensors import Reach, require_size
from accelvisor.errors import AccelvisorError, DataError, NotFoundError, NumericError, StateError
from accelvisor.frames import watermark
from accelvisor.frames.audit import Event, Sink
from accelvisor.frames.identity import Signer
from accelvisor.frames.manifest import NONCE_BYTES, Model
from accelvisor.frames.watermark import BITS, THRESHOLD, Key, Place, Registration, Verdict
from accelvisor.kernels import watermark as kernel

#: What happens to a model that comes with a key which is not here: ``require`` refuses the
#: function, ``if-known`` takes it unchecked and records so.
Policy: TypeAlias = Literal["require", "if-known"]

_STEP = "status:V8"


class Signed(NamedTuple):
    """A verdict, and the envelope for others."""

    verdict: Verdict
    envelope: bytes


class Watermarks:
    """Of one daemon. Acts on functions of this host; everything may raise SystemFailure.

    Args:
        marks: keys and registrations.
        reach: how functions are asked for their tensors.
        host: this host's UUID.
        signer: this host's key of now.
        audit: where checks after a load are recorded.
        record: (kind, function UUID, message): an event for operators.
        policy: of now.
    """

    def __init__(
        self,
        marks: Marks,
        reach: Reach,
        host: str,
        signer: Callable[[], Signer],
        audit: Sink,
        record: Callable[[str, str, str], Awaitable[Any]],
        policy: Callable[[], Policy] = lambda: "if-known",
        clock_ns: Callable[[], int] = time.time_ns,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.marks = marks
        self._reach = reach
        self._host = host
        self._signer = signer
        self._audit = audit
        self._record = record
        self._policy = policy
        self._clock_ns = clock_ns
        self._entropy = entropy
        # One at a time: each may take the memory of a whole layer, and of a matrix.
        self._looking = asyncio.Semaphore(1)

    # --- keys -------------------------------------------------------------------------------------

    def create_key(self) -> str:
        """A new key, kept here. Returns its id. CapacityError ``watermark-keys``."""
        return self.marks.add_key(Key.generate(self._entropy))

    def import_key(self, text: str) -> str:
        """Keep a key that its owner gives. Returns its id.

        Raises:
            DataError: ``watermark-key``. CapacityError: ``watermark-keys``.
        """
        return self.marks.add_key(Key.from_text(text.encode()))

    def export_key(self, key_id: str) -> str:
        """The secret, for another host. NotFoundError ``watermark-key-unknown``."""
        return require_key(self.marks.key(key_id), key_id).to_text()

    # --- registrations ----------------------------------------------------------------------------

    async def register(self, function: str, model: str, handle: int, key_id: str) -> Signed:
        """A tensor of a function is a marked layer of ``model``; it is looked at first.

        Args:
            handle: what the guest calls the tensor.

        Raises:
            NotFoundError: ``watermark-key-unknown``, ``watermark-tensor``.
            DataError: ``watermark-missing``: the tensor does not carry the mark;
                ``watermark-registration``; NumericError ``watermark-...``: it cannot.
            CapacityError: ``watermark-size``, ``watermark-models``.
        """
        key = require_key(self.marks.key(key_id), key_id)
        place = _by_handle(await self._reach.places(function), handle)
        require_size(place)
        registration = watermark.register(function, model, key_id, place)
        wrong = await self._wrong_bits(registration, key)
        if wrong > THRESHOLD:
            raise DataError(
                f"{wrong} of {BITS} bits of the tensor are not those of model {model}",
                code="watermark-missing",
                where="watermark",
                hint=f"mark it under this name before it is uploaded; {THRESHOLD} may be wrong",
            )
        await asyncio.to_thread(self.marks.put, registration)
        await self._record(
            "watermark-registered", function, f"model {model}: {wrong} of {BITS} bits wrong"
        )
        return self._signed(registration, wrong, self._entropy(NONCE_BYTES), b"")

    def unregister(self, function: str, model: str) -> None:
        """Look for it no more. NotFoundError ``watermark-model``."""
        if not self.marks.drop(function, model):
            raise NotFoundError(
                f"function {function} has no model {model} here",
                code="watermark-model",
                where="watermark",
            )

    def forget(self, function: str) -> None:
        """The function is no longer this host's."""
        self.marks.drop(function)

    async def tensors(self, function: str) -> list[Place]:
        """What of a function could be registered: its tensors of a readable type."""
        return await self._reach.places(function)

    # --- looking ----------------------------------------------------------------------------------

    async def check(self, function: str, nonce: bytes | None = None) -> list[Signed]:
        """Look at all models of a function whose keys are here, as their memory is now.

        Args:
            nonce: of whoever asks, 16 bytes: makes the answer one to this question.

        Raises:
            as :meth:`accelvisor.daemon.moving.tensors.Reach.places`.
        """
        nonce = self._entropy(NONCE_BYTES) if nonce is None else nonce
        places = await self._reach.places(function)
        found = []
        for registration in self.marks.models(function):
            key = self.marks.key(registration.key)
            if key is not None:
                wrong = await self._look(registration, key, places)
                found.append(self._signed(registration, wrong, nonce, b""))
        return found

    async def expected(self, function: str) -> list[Model]:
        """What this host's manifest says of a function that stands still: the models that are in
        place and carry their marks now, or whose keys are not here. What lost its mark here is
        recorded as an event: the destination shall compare with what leaves, not with what was.
        """
        places = await self._reach.places(function)
        found = []
        for registration in self.marks.models(function):
            if registration.place not in places:
                continue
            key = self.marks.key(registration.key)
            wrong = 0 if key is None else await self._look(registration, key, places)
            if wrong is not None and wrong <= THRESHOLD:
                found.append(registration.as_model())
            else:
                text = f"model {registration.model} no longer carries its mark"
                await self._record("watermark-lost", function, text)
        return found

    async def require(
        self, function: str, models: Sequence[Model], *, nonce: bytes, manifest: bytes
    ) -> list[Signed]:
        """V8: a function that was loaded and does not run yet has the models of its manifest. They
        are registered here from then on.

        Args:
            nonce: of the migration. manifest: the digest of the manifest that was verified.

        Raises:
            StateError: ``status-watermark``: a model is not where it was, or without its mark;
                ``status-watermark-key``: its key is not here and the policy requires it.
            as :meth:`accelvisor.daemon.moving.tensors.Reach.places`.
        """
        if not models:
            return []
        places = await self._reach.places(function)
        verdicts, registrations = [], []
        for model in models:
            registration = watermark.locate(function, model, places)
            if registration is None:
                text = f"model {model.model} is not where it was at the source"
                raise await self._refuse("status-watermark", manifest, text)
            key = self.marks.key(model.key)
            if key is None:
                await self._unchecked(registration, manifest)
            else:
                wrong = await self._look(registration, key, places)
                signed = self._signed(registration, wrong, nonce, manifest)
                if not signed.verdict.accepted:
                    raise await self._refuse("status-watermark", manifest, _words(signed.verdict))
                await self._note("passed", manifest, _words(signed.verdict))
                verdicts.append(signed)
            registrations.append(registration)
        await asyncio.to_thread(self.marks.put, *registrations)
        return verdicts

    # --- inside -----------------------------------------------------------------------------------

    async def _look(
        self, registration: Registration, key: Key, places: Sequence[Place]
    ) -> int | None:
        """Wrong bits; None when the tensor is gone, or holds nothing that could be a mark."""
        if registration.place not in places:
            return None
        try:
            return await self._wrong_bits(registration, key)
        except NumericError:
            return None

    async def _wrong_bits(self, registration: Registration, key: Key) -> int:
        async with self._looking:
            weights = await self._reach.read(registration.function, registration.place)
            wanted = kernel.unpack(key.message(registration.model))
            found = await asyncio.to_thread(kernel.extract, weights, key.secret, BITS)
        return kernel.errors(found, wanted)

    def _signed(
        self, registration: Registration, wrong: int | None, nonce: bytes, manifest: bytes
    ) -> Signed:
        verdict = watermark.judge(
            registration,
            wrong,
            host=self._host,
            nonce=nonce,
            created_ns=self._clock_ns(),
            manifest=manifest,
        )
        return Signed(verdict, watermark.sign(verdict, self._signer()))

    async def _unchecked(self, registration: Registration, manifest: bytes) -> None:
        text = f"model {registration.model}: its key {registration.key} is not on this host"
        if self._policy() == "require":
            raise await self._refuse("status-watermark-key", manifest, text)
        await self._note("unchecked", manifest, text)
        await self._record("watermark-unchecked", registration.function, text)

    async def _refuse(self, code: str, manifest: bytes, text: str) -> AccelvisorError:
        await self._note(code, manifest, text)
        hint = {
            "status-watermark": "what was loaded is not the model that the source had; "
            "it goes on there",
            "status-watermark-key": 'import the key, or set [migration] watermark = "if-known"',
        }[code]
        return StateError(text, code=code, where=_STEP, hint=hint)

    async def _note(self, code: str, manifest: bytes, text: str) -> None:
        event = Event(self._clock_ns(), 0, code, manifest.hex(), f"{_STEP}: {text}")
        await asyncio.to_thread(self._audit.record, event)


def _by_handle(places: Sequence[Place], handle: int) -> Place:
    for place in places:
        if place.handle == handle:
            return place
    raise NotFoundError(
        f"the function has no tensor {handle:#x} that could hold a mark",
        code="watermark-tensor",
        where="watermark",
        hint="accelctl watermark tensors lists those that could",
    )


def _words(verdict: Verdict) -> str:
    if verdict.errors is None:
        return f"model {verdict.model}: nothing in its place could be a mark"
    return f"model {verdict.model}: {verdict.errors} of {BITS} bits wrong"
