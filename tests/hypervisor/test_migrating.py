"""What libvirt is asked for a migration, and what is read of its job."""

from __future__ import annotations

from typing import Any

import pytest

from accelvisor.errors import ConflictError
from accelvisor.hypervisor import binding, migrating, xml
from accelvisor.hypervisor.entries import Ownership, ownership
from accelvisor.hypervisor.port import MigrateRequest
from accelvisor.limits import MIB
from tests.hypervisor import samples

lv = binding.libvirt()
HOST = "d806d54d-79b2-442f-ad56-e064c13fa176"
FUNCTION, SOCKET = samples.UUID, samples.SOCKET


class Handle:
    """A libvirt domain that writes down what it is asked."""

    def __init__(self, *, persistent: bool = True, job: dict[str, Any] | None = None) -> None:
        self.persistent = persistent
        self.asked: tuple[str, dict[str, Any], int] = ("", {}, 0)
        self.downtime = 0
        self.job = job or {"type": lv.VIR_DOMAIN_JOB_NONE}

    def isPersistent(self) -> bool:
        return self.persistent

    def XMLDesc(self, flags: int) -> str:
        assert flags & lv.VIR_DOMAIN_XML_SECURE
        assert flags & lv.VIR_DOMAIN_XML_INACTIVE
        return xml.add(xml.prepare(samples.INSTALLER), FUNCTION, SOCKET, Ownership("another"))

    def migrateSetMaxDowntime(self, milliseconds: int, flags: int) -> None:
        self.downtime = milliseconds

    def migrateToURI3(self, uri: str, given: dict[str, Any], flags: int) -> None:
        self.asked = (uri, given, flags)

    def jobStats(self, flags: int) -> dict[str, Any]:
        return self.job


def test_it_is_live_and_peer_to_peer_and_the_definition_moves_along() -> None:
    handle = Handle()
    migrating.migrate(handle, MigrateRequest("web", "qemu+tls://b/system", HOST))
    uri, given, flags = handle.asked
    assert uri == "qemu+tls://b/system"
    assert flags == (
        lv.VIR_MIGRATE_LIVE | lv.VIR_MIGRATE_PEER2PEER
        | lv.VIR_MIGRATE_PERSIST_DEST | lv.VIR_MIGRATE_UNDEFINE_SOURCE
    )  # fmt: skip
    stored = given[lv.VIR_MIGRATE_PARAM_PERSIST_XML]
    assert ownership(stored).host == HOST
    assert [entry.uuid for entry in xml.functions(stored)] == [FUNCTION]
    assert lv.VIR_MIGRATE_PARAM_BANDWIDTH not in given
    assert handle.downtime == 0


@pytest.mark.parametrize(
    ("handle", "request_"),
    [
        (Handle(persistent=False), MigrateRequest("web", "u", HOST)),
        (Handle(), MigrateRequest("web", "u", HOST, stored=False)),
    ],
)
def test_a_definition_that_is_not_there_or_is_to_stay_is_left_alone(
    handle: Handle, request_: MigrateRequest
) -> None:
    migrating.migrate(handle, request_)
    assert handle.asked == ("u", {}, lv.VIR_MIGRATE_LIVE | lv.VIR_MIGRATE_PEER2PEER)


@pytest.mark.parametrize(("asked", "mib"), [(1, 1), (MIB, 1), (10 * MIB + 5, 10)])
def test_limits_are_in_libvirts_units(asked: int, mib: int) -> None:
    handle = Handle()
    migrating.migrate(handle, MigrateRequest("web", "u", HOST, False, asked, 300))
    assert handle.asked[1] == {lv.VIR_MIGRATE_PARAM_BANDWIDTH: mib}
    assert handle.downtime == 300


def test_a_job_in_progress_is_read_in_bytes_and_seconds() -> None:
    said = {
        "type": lv.VIR_DOMAIN_JOB_UNBOUNDED, "time_elapsed": 1500, "downtime": 300,
        "memory_total": 400, "memory_processed": 300, "memory_remaining": 100, "memory_bps": 50,
        "memory_dirty_rate": 3, "memory_page_size": 4096, "memory_iteration": 2,
    }  # fmt: skip
    job = migrating.job(Handle(job=said))
    assert job is not None
    assert (job.elapsed_s, job.downtime_s, job.iteration) == (1.5, 0.3, 2)
    assert (job.memory_total, job.memory_left, job.rate) == (400, 100, 50)
    assert job.dirty_rate == 3 * 4096


@pytest.mark.parametrize("kind", [lv.VIR_DOMAIN_JOB_NONE, lv.VIR_DOMAIN_JOB_COMPLETED])
def test_there_is_no_job_when_none_is_in_progress(kind: int) -> None:
    assert migrating.job(Handle(job={"type": kind})) is None


def test_a_job_that_says_little_is_one_all_the_same() -> None:
    job = migrating.job(Handle(job={"type": lv.VIR_DOMAIN_JOB_UNBOUNDED}))
    assert job is not None
    assert job.memory_total == 0


def test_a_cancel_is_told_as_one() -> None:
    class Aborted(lv.libvirtError):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            Exception.__init__(self, "canceled")

        def get_error_code(self) -> int:
            return int(lv.VIR_ERR_OPERATION_ABORTED)

        def get_error_domain(self) -> int:
            return int(lv.VIR_FROM_QEMU)

        def get_error_message(self) -> str:
            return "operation aborted: canceled by client"

    found = binding.translate(Aborted(), "web")
    assert isinstance(found, ConflictError)
    assert found.code == "migration-cancelled"
