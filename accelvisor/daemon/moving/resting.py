"""The methods of io.accelvisor.Admin that have to do with checkpoints at rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from accelvisor.daemon import wire
from accelvisor.daemon.moving.uploads import failed, parts
from accelvisor.errors import UsageError
from accelvisor.frames.report import as_object, plain
from accelvisor.frames.store import Entry

if TYPE_CHECKING:
    from accelvisor.daemon.moving.host import MovingHost

#: As [checkpoints] keep.
MOST_KEPT = 1000


class CheckpointMethods:
    """A part of :class:`accelvisor.daemon.service.AdminService`."""

    _moving: MovingHost

    async def create_checkpoint(
        self,
        function: str,
        label: str | None = None,
        parent: str | None = None,
        follow: bool | None = None,
        compress: bool | None = None,
        seal_for: str | None = None,
        keep: int | None = None,
    ) -> dict[str, Any]:
        if keep is not None and not 1 <= keep <= MOST_KEPT:
            raise UsageError(f"keep is 1 to {MOST_KEPT}", where="admin")
        points = self._moving.checkpoints
        entry = await points.create(
            function,
            label=label,
            parent=None if parent is None else await points.digest(parent, function),
            follow=bool(follow),
            zstd=compress,
            seal_for=seal_for,
            keep=keep,
        )
        return {"checkpoint": _entry(entry)}

    async def list_checkpoints(self, function: str | None = None) -> dict[str, Any]:
        entries = await self._moving.checkpoints.list(function)
        return {"checkpoints": [_entry(entry) for entry in entries]}

    async def get_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        shown = await self._moving.checkpoints.show(checkpoint)
        return {
            "name": shown.name,
            "report": as_object(shown.report),
            "frame": None if shown.frame is None else plain(shown.frame),
            "status": None if shown.status is None else plain(shown.status),
        }

    async def verify_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        return {"report": as_object(await self._moving.checkpoints.verify(checkpoint))}

    async def restore_checkpoint(
        self, checkpoint: str, function: str | None = None, rollback: bool | None = None
    ) -> dict[str, Any]:
        points = self._moving.checkpoints
        restored = await points.restore(checkpoint, function, rollback=bool(rollback))
        return {"function": wire.function(restored, self._moving.paths)}

    async def delete_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        await self._moving.checkpoints.delete(checkpoint)
        return {}

    # --- to and from files of the caller ----------------------------------------------------------

    async def export_checkpoint(
        self, checkpoint: str, host: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        file = await asyncio.to_thread(self._moving.uploads.nameless)
        try:
            try:
                digest = await self._moving.checkpoints.export(checkpoint, file, host)
                size = await asyncio.to_thread(file.seek, 0, os.SEEK_END)
            except OSError as error:
                raise failed(error) from error
            yield {"bytes": size, "digest": digest.hex(), "part": ""}
            pieces = parts(file)
            while (part := await asyncio.to_thread(next, pieces, None)) is not None:
                yield {"bytes": size, "digest": digest.hex(), "part": part}
        finally:
            file.close()

    async def begin_upload(self, bytes: int) -> dict[str, Any]:
        return {"upload": await asyncio.to_thread(self._moving.uploads.begin, bytes)}

    async def send_upload(self, upload: str, part: str) -> dict[str, Any]:
        return {"left": await asyncio.to_thread(self._moving.uploads.add, upload, part)}

    async def import_checkpoint(self, upload: str, label: str | None = None) -> dict[str, Any]:
        with self._moving.uploads.whole(upload) as file:
            entry = await self._moving.checkpoints.import_(file, label)
        return {"checkpoint": _entry(entry)}


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "function": entry.function,
        "digest": entry.digest.hex(),
        "parent": entry.parent.hex(),
        "created": entry.created_ns / 1e9,
        "bytes": entry.size,
        "pinned": entry.pinned,
    }
