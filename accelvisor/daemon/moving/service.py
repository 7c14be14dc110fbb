"""The methods of io.accelvisor.Admin that have to do with moves and with trust between hosts."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from accelvisor.daemon.moving.draining import Drain
from accelvisor.daemon.moving.facts import Wish
from accelvisor.daemon.moving.host import MovingHost
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.marking import WatermarkMethods
from accelvisor.daemon.moving.operator import Operator
from accelvisor.daemon.moving.resting import CheckpointMethods
from accelvisor.errors import DataError, UsageError
from accelvisor.frames.trust import Host

#: As [migration] downtime_ms.
MOST_DOWNTIME_MS = 60_000
_STEP: dict[str, Any] = {"plan": None, "progress": None, "report": None}


class MovingMethods(CheckpointMethods, WatermarkMethods):
    """A part of :class:`accelvisor.daemon.service.AdminService`."""

    _moving: MovingHost
    _operator: Operator

    # --- the hook ---------------------------------------------------------------------------------

    async def reserve_migration(self, xml: str) -> dict[str, Any]:
        return {"xml": await self._moving.reserve(xml)}

    async def prepare_restore(self, xml: str) -> dict[str, Any]:
        return {"xml": await self._moving.prepare_restore(xml)}

    async def restore_context(self, domain: str, domain_uuid: str) -> dict[str, Any]:
        await self._moving.restore_context(domain, domain_uuid)
        return {}

    async def domain_gone(self, domain_uuid: str, reason: str) -> dict[str, Any]:
        await self._moving.gone(domain_uuid, reason)
        return {}

    # --- operators --------------------------------------------------------------------------------

    async def migrate(
        self,
        domain: str,
        host: str,
        uri: str | None = None,
        dry_run: bool | None = None,
        downtime_ms: int | None = None,
        bandwidth: int | None = None,
        transient: bool | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        if downtime_ms is not None and not 1 <= downtime_ms <= MOST_DOWNTIME_MS:
            raise UsageError(f"downtime_ms is 1 to {MOST_DOWNTIME_MS}", where="admin")
        if (bandwidth or 0) < 0:
            raise UsageError("bandwidth is not negative", where="admin")
        wish = Wish(
            domain, host, uri or "", (downtime_ms or 0) / 1000, bandwidth or 0, not transient
        )
        async with aclosing(self._operator.migrate(wish, dry_run=bool(dry_run))) as steps:
            async for step in steps:
                yield _STEP | step

    async def cancel_migration(self, domain: str) -> dict[str, Any]:
        await self._operator.cancel(domain)
        return {}

    async def list_migrations(self) -> dict[str, Any]:
        return {"migrations": await self._operator.history()}

    async def get_migration(self, id: str) -> dict[str, Any]:
        return {"migration": await self._operator.find(id)}

    async def drain_host(
        self, to: list[str] | None = None, uri: str | None = None, dry_run: bool | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        drain = Drain(self._operator, self._moving, to or (), uri or "")
        async with aclosing(drain.run(dry_run=bool(dry_run))) as steps:
            async for step in steps:
                yield {"domain": None, "stay": None, **_STEP, **step}

    # --- trust ------------------------------------------------------------------------------------

    async def get_trust(self) -> dict[str, Any]:
        return {"trust": _trust(self._moving.keys)}

    async def invite_host(
        self, address: str | None = None, again: str | None = None
    ) -> dict[str, Any]:
        code, expires = self._moving.invite(address, again)
        return {"code": code, "expires": expires}

    async def join_host(self, code: str) -> dict[str, Any]:
        return {"host": _host(await self._moving.join(code))}

    async def remove_host(self, host: str) -> dict[str, Any]:
        return {"host": _host(await self._moving.forget(host))}

    async def revoke_key(self, key: str) -> dict[str, Any]:
        await self._moving.revoke(key)
        return {}

    async def rotate_keys(self) -> dict[str, Any]:
        told, missed = await self._moving.rotate()
        return {"key": self._moving.keys.identity.key_id, "told": told, "missed": missed}

    async def export_trust(self) -> dict[str, Any]:
        return {"document": base64.b64encode(self._moving.keys.envelope).decode()}

    async def import_trust(self, document: str, roots: list[str] | None = None) -> dict[str, Any]:
        try:
            envelope = base64.b64decode(document, validate=True)
        except ValueError as error:
            raise DataError(
                "the trust document is refused: it is not base64", code="trust-shape", where="admin"
            ) from error
        await self._moving.adopt(envelope, None if roots is None else frozenset(roots))
        return {"trust": _trust(self._moving.keys)}


def _trust(keys: Keys) -> dict[str, Any]:
    document = keys.document
    return {
        "host": str(keys.host),
        "key": keys.identity.key_id,
        "version": document.version,
        "roots": [key.key_id for key in document.roots.keys],
        "root_threshold": document.roots.threshold,
        "own_roots": keys.mine_to_sign,
        "manifest_threshold": document.manifest_threshold,
        "hosts": [_host(host) for host in keys.keyring.effective.hosts],
        "revoked": list(document.revoked),
    }


def _host(host: Host) -> dict[str, Any]:
    return {
        "uuid": host.uuid,
        "name": host.name,
        "address": host.address,
        "keys": [
            {
                "id": key.key_id,
                "version": key.version,
                "status": key.status,
                "not_after": key.not_after_ns / 1e9 if key.not_after_ns else None,
            }
            for key in host.keys
        ],
    }
