"""The methods of io.accelvisor.Admin that have to do with watermarks."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

from accelvisor.daemon.moving.watermarks import Signed, Watermarks
from accelvisor.errors import UsageError
from accelvisor.frames.manifest import NONCE_BYTES
from accelvisor.frames.watermark import Place, Registration

if TYPE_CHECKING:
    from accelvisor.daemon.moving.host import MovingHost


class WatermarkMethods:
    """A part of :class:`accelvisor.daemon.service.AdminService`."""

    _moving: MovingHost

    # --- keys -------------------------------------------------------------------------------------

    async def create_watermark_key(self) -> dict[str, Any]:
        return {"key": await asyncio.to_thread(self._watermarks.create_key)}

    async def import_watermark_key(self, secret: str) -> dict[str, Any]:
        return {"key": await asyncio.to_thread(self._watermarks.import_key, secret)}

    async def export_watermark_key(self, key: str) -> dict[str, Any]:
        return {"secret": await asyncio.to_thread(self._watermarks.export_key, key)}

    async def list_watermark_keys(self) -> dict[str, Any]:
        return {"keys": await asyncio.to_thread(self._watermarks.marks.keys)}

    async def remove_watermark_key(self, key: str) -> dict[str, Any]:
        await asyncio.to_thread(self._watermarks.marks.remove_key, key)
        return {}

    # --- models -----------------------------------------------------------------------------------

    async def list_tensors(self, function: str) -> dict[str, Any]:
        places = await self._watermarks.tensors(self._uuid(function))
        return {"tensors": [_place(place) for place in places]}

    async def register_model(
        self, function: str, model: str, handle: str, key: str
    ) -> dict[str, Any]:
        signed = await self._watermarks.register(
            self._uuid(function), model, _handle(handle), key
        )
        return {"verdict": _verdict(signed)}

    async def unregister_model(self, function: str, model: str) -> dict[str, Any]:
        await asyncio.to_thread(self._watermarks.unregister, self._uuid(function), model)
        return {}

    async def list_models(self, function: str | None = None) -> dict[str, Any]:
        uuid = None if function is None else self._uuid(function)
        known = await asyncio.to_thread(self._watermarks.marks.keys)
        models = await asyncio.to_thread(self._watermarks.marks.models, uuid)
        return {"models": [_model(item, item.key in known) for item in models]}

    async def check_models(self, function: str, nonce: str | None = None) -> dict[str, Any]:
        asked = None if nonce is None else _nonce(nonce)
        found = await self._watermarks.check(self._uuid(function), asked)
        return {"verdicts": [_verdict(signed) for signed in found]}

    @property
    def _watermarks(self) -> Watermarks:
        return self._moving.services.watermarks

    def _uuid(self, function: str) -> str:
        return self._moving.services.functions.registry.find(function).uuid


def _handle(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise UsageError(f'"{text[:40]}" is no handle of a tensor', where="admin") from None


def _nonce(text: str) -> bytes:
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise UsageError(f"a nonce has {2 * NONCE_BYTES} hexadecimal digits", where="admin")
    return nonce


def _place(place: Place) -> dict[str, Any]:
    return {
        "handle": f"{place.handle:#x}",
        "address": place.address,
        "dtype": place.dtype,
        "shape": list(place.shape),
    }


def _model(item: Registration, known: bool) -> dict[str, Any]:
    return {
        "function": item.function,
        "model": item.model,
        "key": item.key,
        "key_here": known,
        "tensor": _place(item.place),
    }


def _verdict(signed: Signed) -> dict[str, Any]:
    verdict = signed.verdict
    return {
        "model": verdict.model,
        "key": verdict.key,
        "errors": verdict.errors,
        "threshold": verdict.threshold,
        "accepted": verdict.accepted,
        "nonce": verdict.nonce.hex(),
        "created": verdict.created_ns / 1e9,
        "envelope": base64.b64encode(signed.envelope).decode(),
    }
