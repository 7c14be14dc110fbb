"""Changing the function's shape while its guest computes: more or fewer cores, more or less memory,
or none of either.

The daemon decides and asks; here it happens at an instruction boundary, all of it or nothing:
commands go on after it with addresses looked up anew, and the guest is told by an interrupt. Asked
again it changes nothing, so a daemon that died meanwhile can ask again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelvisor.abi.registers import Interrupt
from accelvisor.errors import ConflictError, DeadlineError, SystemFailure, UsageError
from accelvisor.function import shape as shapes
from accelvisor.function import state as s
from accelvisor.function.pauses import finish
from accelvisor.function.shape import Shape
from accelvisor.function.track import data_ranges
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState

if TYPE_CHECKING:
    from accelvisor.function.device import Device


class Reshaping:
    """The verb. Called by the control socket's thread alone."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def reshape(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Take another shape.

        Returns:
            The shape that the device has now, read back from it, with ``scrubbed``: bytes that
            were given back and read as zero.

        Raises:
            ConflictError: ``epoch-old``: a newer shape than this one was taken;
                ``memory-in-use``: the guest has objects where memory would go.
            Refusal: the function is being migrated, or does not come to a boundary.
            SystemFailure: the host has no more memory.
        """
        wanted = shapes.parse(fields)
        device = self._device
        with device.migration.lock:
            now = device.migration.machine.state
            if now is not MigState.RUNNING:
                raise Refusal(errno.EBUSY, f"the device is {now.name}", where="reshape")
            if wanted == device.shape:
                return {**self._told(), "scrubbed": 0}
            if wanted.epoch <= device.state.u32[s.R_EPOCH]:
                raise ConflictError(
                    f"epoch {wanted.epoch}, the function is at {device.state.u32[s.R_EPOCH]}",
                    code="epoch-old",
                    where="reshape",
                    hint="read the function's state anew",
                )
            try:
                device.engine.freeze(s.FREEZE_SHAPE, LIMITS.control_reply_s - 0.5)
            except DeadlineError as error:
                raise Refusal(errno.EBUSY, error.message, where="reshape") from error
            try:
                scrubbed = self._change(wanted)
            finally:
                device.engine.thaw(s.FREEZE_SHAPE)
        device.interrupts.set_cause(Interrupt.SHAPE)
        return {**self._told(), "scrubbed": scrubbed}

    def share(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Borrow so many cores beside one's own, until told otherwise; 0 gives all of them back. No
        tile runs on a core that was given back when this returns.

        Raises:
            UsageError: ``borrowed`` is no number of cores.
            Refusal: the function does not come to a boundary.
        """
        borrowed = fields.get("borrowed")
        if set(fields) != {"borrowed"} or type(borrowed) is not int or (
            not 0 <= borrowed <= LIMITS.cores
        ):
            raise UsageError(
                f"borrowed is 0 to {LIMITS.cores}, not {borrowed!r}", where="reshape"
            )
        device = self._device
        began = time.perf_counter()
        try:
            device.engine.freeze(s.FREEZE_SHAPE, LIMITS.control_reply_s - 0.5)
        except DeadlineError as error:
            raise Refusal(errno.EBUSY, error.message, where="reshape") from error
        try:
            device.pool.resize(max(1, device.shape.cores) + borrowed)
            device.engine.engines.resize(max(1, device.shape.cores) + borrowed)
        finally:
            device.engine.thaw(s.FREEZE_SHAPE)
        took = time.perf_counter() - began
        return {"pool_cores": device.pool.cores, "took_ms": round(took * 1000, 3)}

    def _change(self, wanted: Shape) -> int:
        """With the engine parked. What comes before the record is written may be repeated."""
        device = self._device
        before = device.memory.nbytes
        if wanted.revoked:
            device.frontend.revoke()
            device.objects.destroy_all()
        self._require_free(wanted.memory_bytes)
        scrubbed = 0
        if wanted.memory_bytes < before:
            scrubbed = self._scrub(wanted.memory_bytes, before)
        if os.fstat(device.memory_fd).st_size < wanted.memory_bytes:
            try:
                os.ftruncate(device.memory_fd, wanted.memory_bytes)
            except OSError as error:
                raise SystemFailure(
                    f"the device's memory cannot grow: {error.strerror}",
                    code="memory-refused",
                    where="reshape",
                ) from error
        shapes.install(device.state.u8, wanted)
        device.take_shape(wanted)
        return scrubbed

    def _require_free(self, nbytes: int) -> None:
        top = max((address + size for address, size in self._device.memory.extents()), default=0)
        if top > nbytes:
            raise ConflictError(
                f"the guest uses memory up to {top} bytes, {nbytes} would be left",
                code="memory-in-use",
                where="reshape",
                hint="let the guest free tensors, or reset the function first",
            )

    def _scrub(self, low: int, high: int) -> int:
        """Zero what goes, and look whether it is."""
        device = self._device
        finish(device.memory.scrub(low, high - low))
        if any(device.memory.view[a:b].tobytes().strip(b"\0") for a, b in
               data_ranges(device.memory_fd, low, high)):  # fmt: skip
            raise SystemFailure(
                "memory that was scrubbed does not read as zero", code="scrub-failed",
                where="reshape",
            )  # fmt: skip
        return high - low

    def _told(self) -> dict[str, Any]:
        """What the device says, not what was asked of it."""
        device = self._device
        table = device.memory.table
        return {
            **shapes.load(device.state.u8).to_dict(),
            "table_epoch": table.epoch,
            "table_bytes": table.nbytes,
            "pool_cores": device.pool.cores,
            "register_epoch": device.state.u32[s.R_EPOCH],
        }
