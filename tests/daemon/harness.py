"""A whole daemon in the test's own loop: fake function processes, domains in memory, own paths."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelvisor.control import admin
from accelvisor.control.client import AdminClient
from accelvisor.daemon.config import Config, DaemonConfig, LibvirtConfig, MigrationConfig
from accelvisor.daemon.daemon import Daemon, Setup
from accelvisor.daemon.notify import Notifier
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.processes import from_record
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.errors import AccelvisorError, ConflictError, NotFoundError
from accelvisor.hypervisor.port import (
    Attachment,
    AttachRequest,
    Domain,
    DomainEvent,
    DomainEventKind,
    DomainOptions,
    DomainState,
    Job,
    MigrateRequest,
)
from accelvisor.hypervisor.xml import prepare

FAKE = Path(__file__).with_name("fake_function.py")


class FakeDomains:
    """The port, with domains as records; what a person does with virsh is done with :meth:`put`."""

    def __init__(self) -> None:
        self.domains: dict[str, Domain] = {}
        self.calls: list[str] = []
        #: The domains whose migration is in progress, and how it is to end (None: well).
        self.migrating: queue.Queue[str] = queue.Queue()
        self.end_migration: queue.Queue[AccelvisorError | None] = queue.Queue()
        self._callbacks: list[Callable[[DomainEvent], None]] = []
        self._lock = threading.Lock()

    def put(self, name: str, kind: DomainEventKind, **changes: Any) -> None:
        """Change (or add) a domain behind the daemon's back, and tell the event."""
        with self._lock:
            known = self.domains.get(name) or Domain(
                name,
                f"00000000-0000-0000-0000-{len(self.domains):012}",
                DomainState.SHUTOFF,
                True,
                1,
                1 << 28,
            )
            self.domains[name] = replace(known, **changes)
        self._tell(kind, self.domains[name])

    def _tell(self, kind: DomainEventKind, domain: Domain) -> None:
        for callback in self._callbacks:
            callback(DomainEvent(kind, domain.name, domain.uuid))

    def _change(self, name: str, kind: DomainEventKind, **changes: Any) -> Domain:
        found = self.get(name)
        self.put(found.name, kind, **changes)
        return self.domains[found.name]

    def version(self) -> str:
        return "libvirt 12.9.0, QEMU 11.1.3"

    def list(self) -> Sequence[Domain]:
        with self._lock:
            return sorted(self.domains.values(), key=lambda item: item.name)

    def get(self, domain: str) -> Domain:
        for item in self.domains.values():
            if domain in (item.name, item.uuid):
                return item
        raise NotFoundError(f'there is no domain "{domain}"', code="domain-not-found")

    def xml(self, domain: str, *, live: bool) -> str:
        return f"<domain><name>{self.get(domain).name}</name></domain>"

    def define(self, xml: str) -> Domain:
        name = xml.split("<name>")[1].split("</name>")[0]
        self.put(name, DomainEventKind.DEFINED)
        return self.domains[name]

    def domain_xml(self, options: DomainOptions) -> str:
        return f"<domain><name>{options.name}</name></domain>"

    def prepare(self, domain: str, *, hotplug_ports: int, dry_run: bool) -> tuple[Domain, str]:
        found = self.get(domain)
        return found, prepare(self.xml(domain, live=False), spare_ports=hotplug_ports)

    def undefine(self, domain: str) -> None:
        found = self.get(domain)
        del self.domains[found.name]
        self._tell(DomainEventKind.UNDEFINED, found)

    def start(self, domain: str) -> Domain:
        found = self.get(domain)
        if found.state.active:
            raise ConflictError("it runs", code="domain-state")
        return self._change(
            domain,
            DomainEventKind.STARTED,
            state=DomainState.RUNNING,
            live_functions=found.persistent_functions,
        )

    def shutdown(self, domain: str, *, deadline_s: float) -> Domain:
        return self.destroy(domain)

    def destroy(self, domain: str) -> Domain:
        return self._change(
            domain, DomainEventKind.STOPPED, state=DomainState.SHUTOFF, live_functions=()
        )

    def suspend(self, domain: str) -> Domain:
        return self._change(domain, DomainEventKind.SUSPENDED, state=DomainState.PAUSED)

    def resume(self, domain: str) -> Domain:
        return self._change(domain, DomainEventKind.RESUMED, state=DomainState.RUNNING)

    def reboot(self, domain: str) -> Domain:
        return self._change(domain, DomainEventKind.REBOOTED)

    def reset(self, domain: str) -> Domain:
        return self._change(domain, DomainEventKind.REBOOTED)

    def migrate(self, request: MigrateRequest) -> None:
        """Until the test says how it ends: with :attr:`end_migration`, or by a cancel."""
        self.calls.append(f"migrate {request.uri}")
        found = self.get(request.domain)
        self.migrating.put(found.name)
        error = self.end_migration.get(timeout=30)
        self.migrating.get()
        if error is not None:
            raise error
        del self.domains[found.name]
        self._tell(DomainEventKind.STOPPED, found)

    def migrate_cancel(self, domain: str) -> None:
        self.calls.append("migrate_cancel")
        if self.migrating.empty():
            raise ConflictError("no job is active", code="domain-state")
        self.end_migration.put(ConflictError("canceled", code="migration-cancelled"))

    def leaves(self, domain: str) -> bool:
        return not self.migrating.empty()

    def job(self, domain: str) -> Job | None:
        if self.migrating.empty():
            return None
        return Job(1.0, 100 << 20, 40 << 20, 60 << 20, 30e6, 1e6, 2, 0.3)

    def attach(self, request: AttachRequest) -> Attachment:
        self.calls.append(f"attach {request}")
        found = self.get(request.domain)
        live = (*found.live_functions, request.function) if request.live else found.live_functions
        stored = found.persistent_functions
        if request.persistent:
            stored = (*stored, request.function)
        self._change(
            found.name,
            DomainEventKind.DEFINED,
            live_functions=live,
            persistent_functions=stored,
        )
        return Attachment(
            found.name, found.uuid, request.function, request.live, request.persistent
        )

    def detach(self, request: AttachRequest, *, deadline_s: float) -> Attachment:
        found = self.get(request.domain)

        def without(items: Sequence[str], gone: bool) -> Sequence[str]:
            return tuple(item for item in items if not (gone and item == request.function))

        self._change(
            found.name,
            DomainEventKind.DEFINED,
            live_functions=without(found.live_functions, request.live),
            persistent_functions=without(found.persistent_functions, request.persistent),
        )
        return Attachment(
            found.name, found.uuid, request.function, request.live, request.persistent
        )

    def attachment_xml(self, function: str, socket: str) -> str:
        return f"<!-- {function} --><qemu:arg value='{socket}'/>"

    def subscribe(self, callback: Callable[[DomainEvent], None]) -> FakeDomains:
        self._callbacks.append(callback)
        return self

    def close(self) -> None:
        self._callbacks.clear()


class Harness:
    """Paths, a supervisor and domains that outlive the daemons started with them."""

    def __init__(self, root: Path) -> None:
        self.paths = Paths(root / "r", root / "state", root / "accelvisor.toml")
        self.domains = FakeDomains()
        # Not the loop's own threads: the daemon in the same loop needs those to answer.
        self._clients = ThreadPoolExecutor(64, thread_name_prefix="client")
        self.supervisor = SubprocessSupervisor(self.paths, (sys.executable, "-S", "-E", str(FAKE)))
        # The fake function is no spare; test_spares.py has real ones.
        self.config = Config(
            daemon=DaemonConfig(spares=0),
            libvirt=LibvirtConfig(uri="fake"),
            migration=MigrationConfig(listen="127.0.0.1:0"),
        )

    def setup(self, **changes: Any) -> Setup:
        made = Setup(
            self.config,
            self.paths,
            Notifier(),
            supervisor=self.supervisor,
            load_domains=lambda uri: self.domains,
            examine=lambda uri: [],
        )
        return replace(made, **changes)

    @asynccontextmanager
    async def daemon(self, **changes: Any):
        daemon = Daemon(self.setup(**changes))
        await daemon.start()
        try:
            yield daemon
        finally:
            await daemon.stop()

    async def call(self, member: str, **parameters: Any) -> dict[str, Any]:
        """One call through the real socket, from a thread. What comes back, be it an error, is
        checked against the interface's definition (A15: server sends broken JSON)."""

        def work() -> dict[str, Any]:
            with AdminClient(str(self.paths.admin_socket)) as client:
                try:
                    reply = client.call(member, parameters)
                except AccelvisorError as error:
                    name = admin.error_name(error).rsplit(".", 1)[1]
                    admin.interface().check_error(name, error.to_dict())
                    raise
                admin.interface().check_reply(member, reply)
                return reply

        return await asyncio.get_running_loop().run_in_executor(self._clients, work)

    async def stream(self, member: str, **parameters: Any) -> list[dict[str, Any]]:
        """All replies of a call with ``more``, checked as those of :meth:`call`."""

        def work() -> list[dict[str, Any]]:
            with AdminClient(str(self.paths.admin_socket)) as client:
                replies = list(client.stream(member, parameters))
            for reply in replies:
                admin.interface().check_reply(member, reply)
            return replies

        return await asyncio.get_running_loop().run_in_executor(self._clients, work)

    async def create(self, name: str, profile: str = "small") -> dict[str, Any]:
        return (await self.call("CreateFunction", profile=profile, name=name))["function"]

    async def state(self, name: str) -> str:
        return (await self.call("GetFunction", function=name))["function"]["state"]

    async def until(self, name: str, state: str) -> dict[str, Any]:
        """Wait for a function's state."""
        async with asyncio.timeout(10):
            while True:
                found = (await self.call("GetFunction", function=name))["function"]
                if found["state"] == state:
                    return found
                await asyncio.sleep(0.01)

    def kill(self, uuid: str) -> None:
        """The function process ends by itself."""
        process = from_record(self.paths.function(uuid).process)
        if process is None:
            raise LookupError(f"no process of {uuid}")
        process.signal(signal.SIGKILL)

    def gone(self, uuid: str) -> bool:
        """Whether it has ended altogether: its command line goes a moment before."""
        return from_record(self.paths.function(uuid).process) is None

    def processes(self) -> set[str]:
        """UUIDs of the fake processes of this harness that run, by looking at the machine."""
        found = set()
        marker = str(self.paths.specs)
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            if str(FAKE) in command and marker in command:
                found.add(Path(command.rstrip("\0").rsplit("\0", 1)[-1]).stem)
        return found

    def clean_up(self) -> None:
        """End all function processes of this harness."""
        for uuid in self.processes():
            self.kill(uuid)
        wait_until(lambda: not self.processes())


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition of the machine, with a deadline."""
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.005)
