"""What the hook does at the operations of a migration, a restore and an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accelvisor.hypervisor import xml
from accelvisor.hypervisor.companions import Companions
from tests.hypervisor.hooked import Daemon, run
from tests.hypervisor.samples import BARE, DOMAIN, OTHER, READY, SOCKET, UUID

WITH_FUNCTION = xml.add(READY, UUID, SOCKET)
MIGRATE, RESTORE = ("migrate", "begin"), ("restore", "begin")
PREPARE, STARTED = ("prepare", "begin"), ("started", "begin")
STOPPED, RELEASE = ("stopped", "end"), ("release", "end")
OPERATIONS = [MIGRATE, RESTORE, PREPARE, STARTED, STOPPED, RELEASE]

Start = Callable[[object], Daemon]


def says(**parameters: object) -> Callable[[dict[str, object]], bytes]:
    return lambda _: json.dumps({"parameters": parameters}).encode() + b"\0"


def refuses(message: str) -> Callable[[dict[str, object]], bytes]:
    told = {"code": "a-code", "message": message, "where": "", "hint": "wait a moment"}
    reply = {"error": "io.accelvisor.Admin.Capacity", "parameters": told}
    return lambda _: json.dumps(reply).encode() + b"\0"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("text", [BARE, READY, ""])
def test_a_domain_without_functions_is_none_of_its_business(
    tmp_path: Path, daemon: Start, operation: tuple[str, str], text: str
) -> None:
    served = daemon(refuses("no"))
    result = run(tmp_path, text, operation)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert served.calls == []


@pytest.mark.parametrize(
    ("operation", "method"), [(MIGRATE, "ReserveMigration"), (RESTORE, "PrepareRestore")]
)
def test_the_xml_of_this_host_is_printed(
    tmp_path: Path, daemon: Start, operation: tuple[str, str], method: str
) -> None:
    here = "<domain>" + "ü" * 100_000 + "</domain>"
    served = daemon(says(xml=here))
    result = run(tmp_path, WITH_FUNCTION, operation)
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, here, b"")
    assert served.calls == [(method, {"xml": WITH_FUNCTION})]


def test_a_domain_whose_functions_were_all_taken_out_is_put_right_as_well(
    tmp_path: Path, daemon: Start
) -> None:
    """Its live command line goes on naming them; the destination must not start with them."""
    text = WITH_FUNCTION.replace("/run/accelvisor", str(tmp_path))
    text = text[: text.index("<metadata>")] + text[text.index("</metadata>") + 11 :]
    served = daemon(says(xml="<domain/>"))
    assert run(tmp_path, text, MIGRATE).stdout == b"<domain/>"
    assert [method for method, _ in served.calls] == ["ReserveMigration"]


@pytest.mark.parametrize("operation", [MIGRATE, STARTED])
def test_a_refusal_keeps_the_domain_where_it_is_and_says_why(
    tmp_path: Path, daemon: Start, operation: tuple[str, str]
) -> None:
    daemon(refuses("no place for profile large"))
    result = run(tmp_path, WITH_FUNCTION, operation)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr == b"accelvisor: no place for profile large (wait a moment)\n"


@pytest.mark.parametrize("operation", [RESTORE, STOPPED, RELEASE])
def test_a_refusal_elsewhere_is_only_said(
    tmp_path: Path, daemon: Start, operation: tuple[str, str]
) -> None:
    daemon(refuses("no"))
    result = run(tmp_path, WITH_FUNCTION, operation)
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr == b"accelvisor: no (wait a moment)\n"


@pytest.mark.parametrize("operation", [MIGRATE, STARTED])
@pytest.mark.parametrize("text", [WITH_FUNCTION, WITH_FUNCTION[:-20]])
def test_without_a_daemon_or_with_a_broken_xml_it_is_refused(
    tmp_path: Path, operation: tuple[str, str], text: str
) -> None:
    result = run(tmp_path, text, operation)
    assert (result.returncode, result.stdout) == (1, b"")


@pytest.mark.parametrize("answer", [{}, {"xml": None}, {"xml": ""}, {"xml": 5}])
def test_an_answer_without_an_xml_is_no_answer(
    tmp_path: Path, daemon: Start, answer: dict[str, object]
) -> None:
    daemon(says(**answer))
    result = run(tmp_path, WITH_FUNCTION, MIGRATE)
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"no sense" in result.stderr


def test_a_started_qemu_is_told_of_with_name_and_uuid(tmp_path: Path, daemon: Start) -> None:
    served = daemon(says())
    assert run(tmp_path, WITH_FUNCTION, STARTED).returncode == 0
    assert served.calls == [("RestoreContext", {"domain": "db", "domain_uuid": DOMAIN})]


@pytest.mark.parametrize(
    ("operation", "extra", "reason"),
    [(STOPPED, "-", "stopped"), (RELEASE, "-", "release"), (RELEASE, "migrated", "migrated")],
)
def test_an_end_is_told_of_with_libvirts_reason(
    tmp_path: Path, daemon: Start, operation: tuple[str, str], extra: str, reason: str
) -> None:
    served = daemon(says())
    assert run(tmp_path, WITH_FUNCTION, operation, extra).returncode == 0
    assert served.calls == [("DomainGone", {"domain_uuid": DOMAIN, "reason": reason})]


@pytest.mark.parametrize("operation", [STOPPED, RELEASE])
def test_a_daemon_that_hangs_does_not_hold_up_an_end(
    tmp_path: Path, daemon: Start, operation: tuple[str, str]
) -> None:
    daemon(lambda _: None)
    result = run(tmp_path, WITH_FUNCTION, operation)
    assert result.returncode == 0
    assert b"no answer within 1 s" in result.stderr


# --- whose bus and monitor -----------------------------------------------------------------------


def prepared(directory: Path, daemon: Start, bus: str) -> tuple[int, str]:
    """The verdict on a domain with one function and this bus; RUN: the run directory."""
    socket = SOCKET.replace("/run/accelvisor", str(directory))
    daemon(says(function={"domain_uuid": DOMAIN, "domain_socket": socket}))
    text = WITH_FUNCTION.replace("/run/accelvisor", str(directory))
    own = Companions.of(directory, DOMAIN).bus
    assert text.count(own) == 1
    result = run(directory, text.replace(own, bus.replace("RUN", str(directory))), PREPARE)
    return result.returncode, result.stderr.decode()


def test_a_domain_has_its_own_bus_and_monitor(tmp_path: Path, daemon: Start) -> None:
    assert prepared(tmp_path, daemon, f"RUN/domain/libvirt-{DOMAIN}.bus") == (0, "")


@pytest.mark.parametrize(
    "bus",
    [
        f"RUN/domain/libvirt-{OTHER}.bus",
        f"RUN/domain//libvirt-{OTHER}.bus",
        f"RUN/domain%2flibvirt-{OTHER}.bus",
        f"RUN/dom%61in/libvirt-{OTHER}.monitor",
        f"RUN/domain/libvirt-{DOMAIN}.other",
    ],
)
def test_another_domains_bus_is_refused(tmp_path: Path, daemon: Start, bus: str) -> None:
    code, text = prepared(tmp_path, daemon, bus)
    assert code == 1
    assert "not its socket" in text
