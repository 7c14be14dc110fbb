"""Definitions that several change at once, and odd domains, on libvirt's test driver."""

from __future__ import annotations

import queue
import threading
from typing import Any

import libvirt
import pytest

from accelvisor.errors import AccelvisorError, NotFoundError, UnavailableError
from accelvisor.hypervisor import domains as room
from accelvisor.hypervisor import xml
from accelvisor.hypervisor.domains import Domains
from accelvisor.hypervisor.events import _Held
from accelvisor.hypervisor.port import DomainEvent, DomainEventKind, DomainState
from tests.hypervisor.conftest import GUEST, code, request
from tests.hypervisor.fake_qemu import FakeQemu
from tests.hypervisor.samples import OTHER, OTHER_SOCKET, UUID


class Interrupted:
    """A monitor that lets somebody else go first at the given command."""

    def __init__(self, machine: FakeQemu, command: str, other: Any) -> None:
        self._machine, self._command, self._other = machine, command, other

    def __call__(self, _handle: object, text: str) -> str:
        if self._command in text and self._other is not None:
            other, self._other = self._other, None
            other()
        return self._machine.monitor(text)


def second(domains: Domains) -> None:
    """Another client of the daemon gives the domain another function."""
    domains.attach(request(persistent=True, function=OTHER, socket=OTHER_SOCKET))


def test_what_is_attached_while_a_guest_lets_go_stays(domains: Domains, machine: FakeQemu) -> None:
    domains.start("guest")
    domains.attach(request(live=True, persistent=True))
    domains._monitor = Interrupted(machine, "device_del", lambda: second(domains))
    domains.detach(request(live=True, persistent=True), deadline_s=5)
    found = domains.get("guest")
    assert (found.live_functions, found.persistent_functions) == ((), (OTHER,))


def test_what_others_store_during_an_attach_survives_its_roll_back(
    domains: Domains, machine: FakeQemu
) -> None:
    domains.start("guest")
    machine.refuse = "no"

    def edit() -> None:  # virsh edit knows nothing of our locks
        stored = domains.xml("guest", live=False)
        domains.define(stored.replace("</name>", "</name><title>edited</title>"))

    domains._monitor = Interrupted(machine, "device_add", edit)
    with pytest.raises(AccelvisorError):
        domains.attach(request(live=True, persistent=True))
    assert "<title>edited</title>" in domains.xml("guest", live=False)
    assert domains.get("guest").persistent_functions == ()


def test_two_plugs_at_once_are_both_remembered(domains: Domains, machine: FakeQemu) -> None:
    domains.start("guest")
    threads = []

    def other() -> None:
        both = {"function": OTHER, "socket": OTHER_SOCKET}
        threads.append(threading.Thread(target=lambda: domains.attach(request(True, True, **both))))
        threads[0].start()

    domains._monitor = Interrupted(machine, "query-pci", other)
    domains.attach(request(live=True, persistent=True))
    threads[0].join(10)
    found = domains.get("guest")
    assert found.live_functions == found.persistent_functions == (UUID, OTHER)
    assert len(machine.devices) == 2


def test_locks_of_domains_are_not_kept(domains: Domains) -> None:
    domains.attach(request(persistent=True))
    domains.detach(request(persistent=True), deadline_s=1)
    assert len(domains._changing) == 0


# --- names ---------------------------------------------------------------------------------------


def test_a_domain_that_is_named_like_anothers_uuid_does_not_stand_in_for_it(
    domains: Domains,
) -> None:
    victim = domains.get("guest").uuid
    domains.define(GUEST.format(name=victim))
    for spelled in (victim, victim.upper(), victim.replace("-", "")):
        assert domains.get(spelled).name == "guest"
    domains.attach(request(persistent=True, domain=victim))
    assert domains.get("guest").persistent_functions == (UUID,)


def test_a_name_in_the_form_of_a_uuid_that_nobody_has_is_a_name(domains: Domains) -> None:
    domains.define(GUEST.format(name=OTHER))
    assert domains.get(OTHER).name == OTHER


# --- odd domains ---------------------------------------------------------------------------------


def test_a_domain_whose_metadata_is_too_deep_hides_no_other(
    domains: Domains, caplog: pytest.LogCaptureFixture
) -> None:
    deep = f"<o:x xmlns:o='{xml.NAMESPACE}'>{'<a>' * 200}{'</a>' * 200}</o:x>"
    odd = GUEST.format(name="odd").replace("</name>", f"</name><metadata>{deep}</metadata>")
    domains.define(odd)
    found = {domain.name: domain for domain in domains.list()}
    assert sorted(found) == ["guest", "odd", "test"]
    assert not found["odd"].functions_known
    assert found["guest"].functions_known
    assert "odd" in caplog.text
    assert domains.start("odd").state is DomainState.RUNNING


def test_a_domain_that_libvirt_does_not_describe_is_there_all_the_same(
    domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = room._describe

    def stuck(handle: Any) -> Any:
        if handle.name() == "guest":
            raise libvirt.libvirtError("cannot acquire state change lock")
        return real(handle)

    monkeypatch.setattr(room, "_describe", stuck)
    found = {domain.name: domain for domain in domains.list()}
    assert not found["guest"].functions_known
    assert found["test"].functions_known


def test_a_libvirt_that_goes_away_while_listing_is_not_an_empty_list(
    domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_handle: Any) -> Any:
        raise UnavailableError("gone", code="libvirt-unavailable")

    monkeypatch.setattr(room, "_describe", gone)
    assert code(domains.list, UnavailableError) == "libvirt-unavailable"


# --- a guest that lets go later ------------------------------------------------------------------


def test_a_function_that_the_guest_ejects_after_the_deadline_is_forgotten(
    domains: Domains, machine: FakeQemu
) -> None:
    seen: queue.SimpleQueue[tuple[DomainEvent, tuple[str, ...]]] = queue.SimpleQueue()
    domains.start("guest")
    domains.attach(request(live=True))
    uuid = domains.get("guest").uuid

    def note(event: DomainEvent) -> None:
        seen.put((event, tuple(domains.get("guest").live_functions)))

    subscription = domains.subscribe(note)
    try:
        assert seen.get(timeout=10)[0].kind is DomainEventKind.CONNECTED
        kind = DomainEventKind.DEVICE_REMOVED
        others = (xml.device_id(OTHER), "net0", "accel-spare-0", xml.device_id(UUID))
        for detail in others:  # the last one still is in QEMU: an event of an earlier plug
            subscription._queue.put(DomainEvent(kind, "guest", uuid, detail))  # type: ignore[attr-defined]
            assert seen.get(timeout=10)[1] == (UUID,)
        machine.devices.clear()
        event = DomainEvent(kind, "guest", uuid, xml.device_id(UUID))
        subscription._queue.put(event)  # type: ignore[attr-defined]
        assert seen.get(timeout=10) == (event, ())
    finally:
        subscription.close()


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (f'{{"device": "accel-{UUID}", "path": "/machine/peripheral/x"}}', [f"accel-{UUID}"]),
        ('{"device": "net0"}', []),
        ('{"path": "/machine/unattached"}', []),
        ("nonsense", []),
        ("[]", []),
    ],
)
def test_qemus_own_event_tells_of_functions_only(details: str, told: list[str]) -> None:
    class Named:
        def name(self) -> str:
            return "guest"

        def UUIDString(self) -> str:
            return OTHER

    held = _Held.__new__(_Held)
    events: list[DomainEvent] = []
    held._open, held._put = True, events.append
    held._on_device_deleted(None, Named(), "DEVICE_DELETED", 0, 0, details, None)
    assert [event.detail for event in events] == told


def test_a_function_that_vanished_from_the_stored_definition_meanwhile_is_no_error(
    domains: Domains, machine: FakeQemu
) -> None:
    domains.start("guest")
    domains.attach(request(live=True, persistent=True))

    def remove() -> None:
        domains.define(xml.remove(domains.xml("guest", live=False), UUID))

    domains._monitor = Interrupted(machine, "device_del", remove)
    domains.detach(request(live=True, persistent=True), deadline_s=5)
    assert domains.get("guest").persistent_functions == ()
    again = lambda: domains.detach(request(live=True), deadline_s=1)  # noqa: E731
    assert code(again, NotFoundError) == "function-not-attached"
