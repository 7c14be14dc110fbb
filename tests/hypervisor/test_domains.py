"""Domains against libvirt's own test driver, which keeps everything in this process."""

from __future__ import annotations

import queue
import threading

import libvirt
import pytest

from accelvisor.errors import (
    AccelvisorError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from accelvisor.hypervisor import xml
from accelvisor.hypervisor.domains import Domains
from accelvisor.hypervisor.events import _LIFECYCLE, lifecycle
from accelvisor.hypervisor.port import (
    DomainEvent,
    DomainEventKind,
    DomainOptions,
    DomainsPort,
    DomainState,
)
from accelvisor.limits import MIB
from tests.hypervisor.conftest import GUEST, URI, code, request
from tests.hypervisor.fake_qemu import FakeQemu
from tests.hypervisor.samples import OTHER, OTHER_SOCKET, SOCKET, UUID


def test_it_is_the_port(domains: Domains) -> None:
    port: DomainsPort = domains
    assert port.version().startswith("libvirt ")


def test_domains_are_listed_by_name(domains: Domains) -> None:
    domains.define(GUEST.format(name="another"))
    assert [domain.name for domain in domains.list()] == ["another", "guest", "test"]


def test_a_domain_is_found_by_name_and_by_uuid(domains: Domains) -> None:
    found = domains.get("guest")
    assert domains.get(found.uuid) == found
    assert (found.state, found.persistent) == (DomainState.SHUTOFF, True)
    assert (found.vcpus, found.memory_bytes) == (1, 64 * MIB)


@pytest.mark.parametrize("name", ["", "nobody", OTHER, "../x", "a" * 1000])
def test_an_unknown_domain_is_not_found(domains: Domains, name: str) -> None:
    for call in (
        lambda: domains.get(name),
        lambda: domains.start(name),
        lambda: domains.xml(name, live=False),
        lambda: domains.attach(request(persistent=True, domain=name)),
    ):
        assert code(call, NotFoundError) == "domain-not-found"


def test_a_life(domains: Domains) -> None:
    assert domains.start("guest").state is DomainState.RUNNING
    assert domains.suspend("guest").state is DomainState.PAUSED
    assert domains.resume("guest").state is DomainState.RUNNING
    assert domains.reboot("guest").state is DomainState.RUNNING
    assert domains.destroy("guest").state is DomainState.SHUTOFF
    assert domains.start("guest").state is DomainState.RUNNING
    assert domains.shutdown("guest", deadline_s=5).state is DomainState.SHUTOFF
    domains.undefine("guest")
    assert code(lambda: domains.get("guest"), NotFoundError) == "domain-not-found"


def test_verbs_that_the_state_forbids_are_conflicts(domains: Domains) -> None:
    for verb in (domains.destroy, domains.suspend, domains.resume, domains.reboot):
        assert code(lambda verb=verb: verb("guest"), ConflictError) == "domain-state"  # type: ignore[misc]
    domains.start("guest")
    assert code(lambda: domains.start("guest"), ConflictError) == "domain-state"


def test_a_guest_that_ignores_the_power_button_meets_the_deadline() -> None:
    class Stubborn:
        def shutdown(self) -> None:
            pass  # the button was pressed, nothing happens

        def __getattr__(self, name: str) -> object:
            return getattr(handle, name)

    domains = Domains(URI)
    try:
        handle = domains._find("test")
        domains._find = lambda _name: Stubborn()  # type: ignore[method-assign]
        call = lambda: domains.shutdown("test", deadline_s=0.1)  # noqa: E731
        assert code(call, DeadlineError) == "domain-shutdown-deadline"
    finally:
        domains.close()


def test_a_transient_domain_that_ends_is_described_as_shut_off(domains: Domains) -> None:
    connection = domains._connect()
    connection.createXML(GUEST.format(name="fleeting"), 0)
    assert not domains.get("fleeting").persistent
    assert domains.destroy("fleeting").state is DomainState.SHUTOFF
    assert code(lambda: domains.get("fleeting"), NotFoundError) == "domain-not-found"


@pytest.mark.parametrize("text", ["", "x", "<domain/>", "<domain type='test'/>", "<pool/>"])
def test_a_wrong_xml_is_a_config_error(domains: Domains, text: str) -> None:
    assert code(lambda: domains.define(text), ConfigError) == "domain-xml"


def test_xml_of_the_stored_and_of_the_running_domain(domains: Domains) -> None:
    assert "<name>guest</name>" in domains.xml("guest", live=False)
    assert code(lambda: domains.xml("guest", live=True), ConflictError) == "domain-state"
    domains.start("guest")
    assert "id=" in domains.xml("guest", live=True).splitlines()[0]


def test_options_become_an_xml_without_asking_libvirt() -> None:
    options = DomainOptions("vm", 64 * MIB, disk="/a.qcow2", accelerator="tcg")
    assert "vfio" not in Domains("test:///nowhere").domain_xml(options)
    with pytest.raises(UsageError):
        Domains().domain_xml(DomainOptions("vm", 1))


def test_a_prepared_domain_takes_functions_and_keeps_its_password(domains: Domains) -> None:
    private = GUEST.format(name="private").replace("mode='shared'", "mode='private'")
    graphics = "<graphics type='vnc' passwd='secret'/></devices>"
    domains.define(private.replace("</devices>", graphics))
    shown = domains.prepare("private", hotplug_ports=2, dry_run=True)[1]
    assert xml.memory_problem(shown) is None
    assert xml.memory_problem(domains.xml("private", live=False)) is not None
    domains.prepare("private", hotplug_ports=2, dry_run=False)
    handle = domains._find("private")
    assert "secret" in handle.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE)
    assert "secret" not in shown
    domains.attach(request(persistent=True, domain="private"))


def test_pieces_to_paste_need_no_libvirt() -> None:
    assert UUID in Domains("test:///nowhere").attachment_xml(UUID, SOCKET)


# --- functions -----------------------------------------------------------------------------------


def test_a_persistent_attachment_is_in_the_stored_definition(domains: Domains) -> None:
    done = domains.attach(request(persistent=True))
    assert (done.domain, done.live, done.persistent) == ("guest", False, True)
    assert domains.get("guest").persistent_functions == (UUID,)
    again = lambda: domains.attach(request(persistent=True))  # noqa: E731
    assert code(again, ConflictError) == "function-attached"
    domains.detach(request(persistent=True), deadline_s=1)
    assert domains.get("guest").persistent_functions == ()
    missing = lambda: domains.detach(request(persistent=True), deadline_s=1)  # noqa: E731
    assert code(missing, NotFoundError) == "function-not-attached"


def test_a_live_attachment_is_in_the_running_domain_only(
    domains: Domains, machine: FakeQemu
) -> None:
    domains.start("guest")
    done = domains.attach(request(live=True))
    assert (done.bus, done.address) == ("pci.2", "02:00.0")
    found = domains.get("guest")
    assert (found.live_functions, found.persistent_functions) == ((UUID,), ())
    domains.detach(request(live=True), deadline_s=1)
    assert domains.get("guest").live_functions == ()
    assert machine.devices == {}


def test_both_at_once_and_two_functions(domains: Domains) -> None:
    domains.start("guest")
    domains.attach(request(live=True, persistent=True))
    domains.attach(request(True, True, function=OTHER, socket=OTHER_SOCKET))
    found = domains.get("guest")
    assert found.live_functions == found.persistent_functions == (UUID, OTHER)
    domains.detach(request(live=True, persistent=True), deadline_s=1)
    found = domains.get("guest")
    assert found.live_functions == found.persistent_functions == (OTHER,)


def test_a_live_half_that_fails_leaves_the_stored_definition_as_it_was(
    domains: Domains, machine: FakeQemu
) -> None:
    domains.start("guest")
    machine.refuse = "no"
    with pytest.raises(AccelvisorError):
        domains.attach(request(live=True, persistent=True))
    found = domains.get("guest")
    assert (found.live_functions, found.persistent_functions) == ((), ())


def test_a_guest_that_does_not_let_go_keeps_both_halves(
    domains: Domains, machine: FakeQemu
) -> None:
    domains.start("guest")
    domains.attach(request(live=True, persistent=True))
    machine.lets_go_after = None
    both = lambda: domains.detach(request(True, True), deadline_s=0.1)  # noqa: E731
    assert code(both, DeadlineError) == "detach-deadline"
    found = domains.get("guest")
    assert found.live_functions == found.persistent_functions == (UUID,)


def test_a_stopped_domain_takes_no_live_attachment(domains: Domains) -> None:
    for verb in (
        lambda: domains.attach(request(live=True)),
        lambda: domains.detach(request(live=True), deadline_s=1),
        lambda: domains.attach(request()),
    ):
        assert code(verb, ConflictError) == "domain-state"


def test_a_transient_domain_takes_no_persistent_attachment(domains: Domains) -> None:
    domains._connect().createXML(GUEST.format(name="fleeting"), 0)
    call = lambda: domains.attach(request(persistent=True, domain="fleeting"))  # noqa: E731
    assert code(call, ConflictError) == "domain-state"
    domains.destroy("fleeting")


def test_private_memory_is_refused(domains: Domains) -> None:
    domains.define(GUEST.format(name="private").replace("mode='shared'", "mode='private'"))
    call = lambda: domains.attach(request(persistent=True, domain="private"))  # noqa: E731
    assert code(call, ConflictError) == "domain-memory"


# --- connection ----------------------------------------------------------------------------------


def test_an_unreachable_libvirt_is_unavailable() -> None:
    domains = Domains("qemu+unix:///system?socket=/nowhere/libvirt-sock")
    for call in (domains.version, domains.list, lambda: domains.get("x")):
        assert code(call, UnavailableError) == "libvirt-unavailable"
    domains.close()


def test_a_connection_that_broke_is_made_anew(domains: Domains) -> None:
    domains.list()

    class Broken:
        def getLibVersion(self) -> int:
            raise libvirt.libvirtError("client socket is closed")

        def close(self) -> None:
            raise libvirt.libvirtError("it is closed")

    domains._connection.close()
    domains._connection = Broken()
    assert "test" in [domain.name for domain in domains.list()]


def test_closing_twice_and_going_on_after_it(domains: Domains) -> None:
    domains.close()
    domains.close()
    assert domains.version()


# --- events --------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[DomainEvent] = queue.SimpleQueue()

    def __call__(self, event: DomainEvent) -> None:
        self._queue.put(event)

    def next(self) -> DomainEvent:
        return self._queue.get(timeout=10)


def test_events_come_in_order_with_their_details(domains: Domains) -> None:
    seen = Recorder()
    subscription = domains.subscribe(seen)
    try:
        assert seen.next().kind is DomainEventKind.CONNECTED
        uuid = domains.start("guest").uuid
        domains.suspend("guest")
        domains.resume("guest")
        domains.destroy("guest")
        domains.undefine("guest")
        kinds = DomainEventKind
        for kind, detail in (
            (kinds.STARTED, "booted"),
            (kinds.SUSPENDED, "paused"),
            (kinds.RESUMED, "unpaused"),
            (kinds.STOPPED, "destroyed"),
            (kinds.UNDEFINED, "removed"),
        ):
            assert seen.next() == DomainEvent(kind, "guest", uuid, detail)
    finally:
        subscription.close()


def test_a_closed_subscription_is_silent_and_gone(domains: Domains) -> None:
    seen = Recorder()
    subscription = domains.subscribe(seen)
    seen.next()
    subscription.close()
    subscription.close()
    domains.start("guest")
    assert seen._queue.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "domain-events"]


def test_a_subscriber_that_fails_does_not_end_the_flow(
    domains: Domains, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Recorder()

    def moody(event: DomainEvent) -> None:
        seen(event)
        if event.kind is DomainEventKind.STARTED:
            raise ValueError("not today")

    subscription = domains.subscribe(moody)
    try:
        seen.next()
        domains.start("guest")
        domains.destroy("guest")
        assert [seen.next().kind, seen.next().kind] == [
            DomainEventKind.STARTED,
            DomainEventKind.STOPPED,
        ]
    finally:
        subscription.close()
    assert "not today" in caplog.text


def test_a_subscription_outlives_a_libvirt_that_is_away(
    domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelvisor.hypervisor.events.RETRY_S", (0.01, 0.02))
    tries = []
    real_open = domains._open

    def away_at_first() -> object:
        tries.append(1)
        if len(tries) < 4:
            raise UnavailableError("away")
        return real_open()

    monkeypatch.setattr(domains, "_open", away_at_first)
    seen = Recorder()
    subscription = domains.subscribe(seen)
    try:
        assert seen.next().kind is DomainEventKind.CONNECTED
        assert len(tries) == 4
        held = subscription
        held._queue.put(DomainEvent(DomainEventKind.DISCONNECTED))  # type: ignore[attr-defined]
        assert seen.next().kind is DomainEventKind.DISCONNECTED
        assert seen.next().kind is DomainEventKind.CONNECTED
        domains.start("guest")
        assert seen.next().kind is DomainEventKind.STARTED
    finally:
        subscription.close()


def test_closing_while_libvirt_is_away_does_not_wait(
    domains: Domains, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def away() -> object:
        tried.set()
        raise UnavailableError("away")

    monkeypatch.setattr("accelvisor.hypervisor.events.RETRY_S", (60.0, 60.0))
    monkeypatch.setattr(domains, "_open", away)
    subscription = domains.subscribe(lambda _: None)
    assert tried.wait(5)
    closing = threading.Thread(target=subscription.close)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


def test_lifecycle_numbers_are_those_of_libvirts_header() -> None:
    kinds = DomainEventKind
    for number, kind in (
        (libvirt.VIR_DOMAIN_EVENT_DEFINED, kinds.DEFINED),
        (libvirt.VIR_DOMAIN_EVENT_UNDEFINED, kinds.UNDEFINED),
        (libvirt.VIR_DOMAIN_EVENT_STARTED, kinds.STARTED),
        (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, kinds.SUSPENDED),
        (libvirt.VIR_DOMAIN_EVENT_RESUMED, kinds.RESUMED),
        (libvirt.VIR_DOMAIN_EVENT_STOPPED, kinds.STOPPED),
        (libvirt.VIR_DOMAIN_EVENT_PMSUSPENDED, kinds.SUSPENDED),
        (libvirt.VIR_DOMAIN_EVENT_CRASHED, kinds.CRASHED),
    ):
        assert (found := lifecycle(number, 0)) is not None
        assert found[0] is kind
    assert lifecycle(libvirt.VIR_DOMAIN_EVENT_SHUTDOWN, 0) is None
    stopped = {
        name.removeprefix("VIR_DOMAIN_EVENT_STOPPED_").lower().replace("_", "-"): value
        for name, value in vars(libvirt).items()
        if name.startswith("VIR_DOMAIN_EVENT_STOPPED_") and not name.endswith("LAST")
    }
    for word, value in stopped.items():
        assert lifecycle(libvirt.VIR_DOMAIN_EVENT_STOPPED, value) == (kinds.STOPPED, word)


@pytest.mark.parametrize("event", [-1, len(_LIFECYCLE), 1000])
def test_an_event_of_a_newer_libvirt_is_passed_over(event: int) -> None:
    assert lifecycle(event, 0) is None


def test_a_detail_of_a_newer_libvirt_is_named_unknown() -> None:
    assert lifecycle(libvirt.VIR_DOMAIN_EVENT_STOPPED, 77) == (
        DomainEventKind.STOPPED,
        "unknown-77",
    )


def test_device_ids_fit_what_qemu_takes_for_an_id() -> None:
    for identifier in (xml.device_id(UUID), xml.port_id(UUID), xml.spare_id(15)):
        assert identifier[0].isalpha()
        assert all(c.isalnum() or c in "-._" for c in identifier)
