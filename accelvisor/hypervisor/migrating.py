"""A domain's live migration, as libvirt is asked for it and as it tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelvisor.hypervisor import binding, rewrite
from accelvisor.hypervisor.port import Job, MigrateRequest
from accelvisor.limits import MIB

#: QEMU's pages are of this size where libvirt does not say it.
_PAGE = 4096


def migrate(handle: Any, request: MigrateRequest) -> None:
    """Peer to peer, so that it goes on when we end: libvirtd has it. Blocks until it is over.

    libvirt shows the running domain's XML to the other host's hook, which makes it that host's; the
    stored one it would copy as it is.
    """
    lv = binding.libvirt()
    flags = lv.VIR_MIGRATE_LIVE | lv.VIR_MIGRATE_PEER2PEER
    given: dict[str, object] = {}
    if request.stored and handle.isPersistent():
        flags |= lv.VIR_MIGRATE_PERSIST_DEST | lv.VIR_MIGRATE_UNDEFINE_SOURCE
        # Without SECURE the passwords would be lost.
        stored = handle.XMLDesc(lv.VIR_DOMAIN_XML_INACTIVE | lv.VIR_DOMAIN_XML_SECURE)
        given[lv.VIR_MIGRATE_PARAM_PERSIST_XML] = rewrite.rewrite(stored, host=request.host)
    if request.bandwidth:
        given[lv.VIR_MIGRATE_PARAM_BANDWIDTH] = max(1, request.bandwidth // MIB)
    if request.downtime_ms:
        handle.migrateSetMaxDowntime(request.downtime_ms, 0)
    handle.migrateToURI3(request.uri, given, flags)


def _running() -> tuple[int, ...]:
    lv = binding.libvirt()
    return (lv.VIR_DOMAIN_JOB_BOUNDED, lv.VIR_DOMAIN_JOB_UNBOUNDED)


def leaves(handle: Any) -> bool:
    """Whether libvirt has a job that migrates the domain away: it begins one before it asks the
    other host to prepare (VIR_MIGRATE_CHANGE_PROTECTION, which clients set by themselves).
    """
    lv = binding.libvirt()
    said: Mapping[str, Any] = handle.jobStats(0)
    away = said.get("operation") == lv.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
    return away and said.get("type") in _running()


def job(handle: Any) -> Job | None:
    """The migration in progress; None when there is none."""
    said: Mapping[str, Any] = handle.jobStats(0)
    if said.get("type") not in _running():
        return None
    page = int(said.get("memory_page_size", _PAGE))
    return Job(
        elapsed_s=said.get("time_elapsed", 0) / 1000,
        memory_total=int(said.get("memory_total", 0)),
        memory_done=int(said.get("memory_processed", 0)),
        memory_left=int(said.get("memory_remaining", 0)),
        rate=float(said.get("memory_bps", 0)),
        dirty_rate=float(said.get("memory_dirty_rate", 0)) * page,
        iteration=int(said.get("memory_iteration", 0)),
        downtime_s=said.get("downtime", 0) / 1000,
    )
