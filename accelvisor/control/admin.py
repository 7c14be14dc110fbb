"""The Admin interface as objects: its definition, which level each method needs, its errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from accelvisor import errors

if TYPE_CHECKING:
    from accelvisor.control import idl

INTERFACE = "io.accelvisor.Admin"


class Level(IntEnum):
    """What a caller may do; each level includes the ones below."""

    NONE = 0
    READ = 1
    OPERATE = 2
    ADMIN = 3


LEVELS: Mapping[str, Level] = {
    "GetHost": Level.READ,
    "ListCards": Level.READ,
    "GetCard": Level.READ,
    "GetCardConfigSpace": Level.READ,
    "SetCardFunctions": Level.ADMIN,
    "SetChip": Level.ADMIN,
    "Topology": Level.READ,
    "ListProfiles": Level.READ,
    "CreateFunction": Level.ADMIN,
    "ListFunctions": Level.READ,
    "GetFunction": Level.READ,
    "DeleteFunction": Level.ADMIN,
    "FunctionStatistics": Level.READ,
    "Trace": Level.READ,
    "ResetFunction": Level.OPERATE,
    "PlanFunction": Level.READ,
    "ResizeFunction": Level.ADMIN,
    "RevokeFunction": Level.ADMIN,
    "AttachFunction": Level.OPERATE,
    "AttachPartition": Level.OPERATE,
    "DetachFunction": Level.OPERATE,
    "AdmitDomain": Level.ADMIN,
    "ReserveMigration": Level.ADMIN,
    "PrepareRestore": Level.ADMIN,
    "RestoreContext": Level.ADMIN,
    "DomainGone": Level.ADMIN,
    "GetTrust": Level.READ,
    "InviteHost": Level.ADMIN,
    "JoinHost": Level.ADMIN,
    "RemoveHost": Level.ADMIN,
    "RevokeKey": Level.ADMIN,
    "RotateKeys": Level.ADMIN,
    "ExportTrust": Level.READ,
    "ImportTrust": Level.ADMIN,
    "Migrate": Level.ADMIN,
    "CancelMigration": Level.ADMIN,
    "ListMigrations": Level.READ,
    "GetMigration": Level.READ,
    "DrainHost": Level.ADMIN,
    "CreateCheckpoint": Level.ADMIN,
    "ListCheckpoints": Level.READ,
    "GetCheckpoint": Level.READ,
    "VerifyCheckpoint": Level.READ,
    "RestoreCheckpoint": Level.ADMIN,
    "DeleteCheckpoint": Level.ADMIN,
    "ExportCheckpoint": Level.ADMIN,
    "BeginUpload": Level.ADMIN,
    "SendUpload": Level.ADMIN,
    "ImportCheckpoint": Level.ADMIN,
    "CreateWatermarkKey": Level.ADMIN,
    "ImportWatermarkKey": Level.ADMIN,
    "ExportWatermarkKey": Level.ADMIN,
    "ListWatermarkKeys": Level.READ,
    "RemoveWatermarkKey": Level.ADMIN,
    "ListTensors": Level.READ,
    "RegisterModel": Level.ADMIN,
    "UnregisterModel": Level.ADMIN,
    "ListModels": Level.READ,
    "CheckModels": Level.READ,
    "PrintAttachment": Level.READ,
    "ListDomains": Level.READ,
    "GetDomain": Level.READ,
    "DomainXml": Level.READ,
    "DefineDomain": Level.ADMIN,
    "PrepareDomain": Level.ADMIN,
    "UndefineDomain": Level.ADMIN,
    "StartDomain": Level.OPERATE,
    "StopDomain": Level.OPERATE,
    "DestroyDomain": Level.OPERATE,
    "SuspendDomain": Level.OPERATE,
    "ResumeDomain": Level.OPERATE,
    "RebootDomain": Level.OPERATE,
    "ResetDomain": Level.OPERATE,
    "ListEvents": Level.READ,
    "WatchEvents": Level.READ,
    "Doctor": Level.READ,
}

#: Parameters that need more than their method does: (method, parameter, value).
RAISED: Mapping[tuple[str, str, object], Level] = {
    ("AttachPartition", "on_exhaustion", "migrate"): Level.ADMIN,  # as Migrate
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who called, as the kernel says. ``pid`` is for display only: pids are used again."""

    uid: int
    gids: Collection[int]
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Group ids of each level, and the uids that may do everything (root and the daemon's own)."""

    read: Collection[int] = ()
    operate: Collection[int] = ()
    admin: Collection[int] = ()
    uids: Collection[int] = (0,)

    def level(self, peer: Peer) -> Level:
        if peer.uid in self.uids or not set(self.admin).isdisjoint(peer.gids):
            return Level.ADMIN
        if not set(self.operate).isdisjoint(peer.gids):
            return Level.OPERATE
        if not set(self.read).isdisjoint(peer.gids):
            return Level.READ
        return Level.NONE


def authorise(
    policy: Policy, peer: Peer, method: str, parameters: Mapping[str, object] | None = None
) -> None:
    """Raises PermissionDenied (``permission-denied``) when the peer's level does not suffice.

    Args:
        parameters: of the call, once they are known to be what the method takes.
    """
    have, need, what = policy.level(peer), LEVELS[method], method
    for (name, parameter, value), level in RAISED.items():
        if name == method and (parameters or {}).get(parameter) == value:
            need, what = max(need, level), f"{method} with {parameter} {value}"
    if have < need:
        raise errors.PermissionDenied(
            f"{what} needs the level {need.name.lower()}, uid {peer.uid} has {have.name.lower()}",
            where="admin",
            hint="accelvisor.toml(5), section [admin], says which groups have which level",
        )


#: Which Varlink error carries which class, most special first.
ERRORS: Mapping[str, type[errors.AccelvisorError]] = {
    "Usage": errors.UsageError,
    "Config": errors.ConfigError,
    "NotFound": errors.NotFoundError,
    "Conflict": errors.ConflictError,
    "PermissionDenied": errors.PermissionDenied,
    "Data": errors.DataError,
    "Capacity": errors.CapacityError,
    "Unavailable": errors.UnavailableError,
    "Deadline": errors.DeadlineError,
    "System": errors.SystemFailure,
}


def error_name(error: errors.AccelvisorError) -> str:
    """The fully qualified Varlink name of an error; one of no declared class is ``System``."""
    for name, kind in ERRORS.items():
        if isinstance(error, kind):
            return f"{INTERFACE}.{name}"
    return f"{INTERFACE}.System"


@lru_cache(maxsize=1)
def interface() -> idl.Interface:
    """The parsed ``io.accelvisor.Admin.varlink``. Clients do not need it, nor the parser."""
    from pathlib import Path

    from accelvisor.control import idl

    return idl.parse(Path(__file__).with_name(f"{INTERFACE}.varlink").read_text())
