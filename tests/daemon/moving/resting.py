"""A host for checkpoints at rest: real keys, audit file, nonces and shelf; real function processes;
a ledger, a registry and domains that say what a test wants.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.checkpoints import Checkpoints, Settings
from accelvisor.daemon.moving.evidence import AuditFile, Nonces
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.numbers import Numbers
from accelvisor.daemon.moving.services import Services
from accelvisor.daemon.moving.shelf import Shelf
from accelvisor.daemon.paths import FunctionPaths
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, NotFoundError
from accelvisor.frames import audit
from accelvisor.frames.manifest import Model
from accelvisor.frames.store import Entry
from accelvisor.isolation.resources import Placement, Profile
from tests.function.harness import Guest, Process, Ring, call, operation, running

SECOND = 10**9
N = 150_000


class Registry:
    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}

    def all(self) -> list[Function]:
        return list(self.functions.values())

    def get(self, uuid: str) -> Function | None:
        return self.functions.get(uuid)

    def find(self, key: str) -> Function:
        for item in self.functions.values():
            if key in (item.uuid, item.name):
                return item
        raise NotFoundError("none", code="function-not-found")


class World:
    """Where the processes of the test keep their sockets."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.paths = self

    def function(self, uuid: str) -> FunctionPaths:
        folder = Path(self.processes[uuid].spec.holder_socket).parent
        return FunctionPaths(folder, folder / "spec.json")


class Functions:
    def __init__(self) -> None:
        self.registry = Registry()
        self.world = World()
        self.held: set[str] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.coming: Callable[[str, Profile], Process] | None = None

    def lock(self, uuid: str) -> asyncio.Lock:
        return self._locks[uuid]

    def require_free(self, function: Function) -> None:
        if function.uuid in self.held:
            raise ConflictError("it is being moved", code="function-moving")

    async def carry(self, verb: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.shield(asyncio.ensure_future(verb))

    async def bring(self, uuid: str, profile: Profile) -> Function:
        assert self.coming is not None
        return self.add(self.coming(uuid, profile))

    async def drop(self, uuid: str, words: str) -> None:
        del self.registry.functions[uuid]

    def add(self, process: Process, domain: str | None = None) -> Function:
        spec = process.spec
        function = Function(
            spec.uuid, spec.uuid, spec.profile, Placement("card0", {}), spec.cores, spec.chips,
            spec.memory_bytes, spec.window_bytes, spec.queues, spec.ring_entries, State.READY, 0.0,
            domain=domain, domain_uuid=domain,
        )  # fmt: skip
        self.registry.functions[spec.uuid] = function
        self.world.processes[spec.uuid] = process
        return function


class Owners:
    """This host owns everything, at epoch 1 unless a test says otherwise."""

    def __init__(self) -> None:
        self.epochs: defaultdict[str, int] = defaultdict(lambda: 1)
        self.foreign: set[str] = set()
        self.ledger = self

    async def next_epoch(self, function: str) -> int:
        if function in self.foreign:
            raise ConflictError("it is another host's", code="ledger-not-owner")
        return self.epochs[function] + 1

    async def give_up(self, function: str) -> None:
        self.epochs.pop(function, None)

    async def floor(self, function: str) -> int:
        return self.epochs.get(function, 0)


class Watermarks:
    """The functions of these tests have the models that a test says."""

    def __init__(self) -> None:
        self.models: list[Model] = []
        self.refusal: AccelvisorError | None = None

    async def expected(self, function: str) -> list[Model]:
        return self.models

    async def require(
        self, function: str, models: Sequence[Model], *, nonce: bytes, manifest: bytes
    ) -> None:
        assert list(models) == self.models
        if self.refusal is not None:
            raise self.refusal


class KilledError(BaseException):
    """In the place of a kill: nothing that comes after it happens."""


class Host:
    """One host with its state directory; :meth:`restart` is what a daemon's restart is."""

    def __init__(self, root: Path, name: str = "alpha", settings: Settings | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.uuid = uuid4()
        self.name = name
        self.now = 1_900_000_000 * SECOND
        self.events: list[tuple[str, str, str]] = []
        self.steps: list[str] = []
        self.kill_at = ""
        self.on_step: Callable[[str], None] = lambda step: None
        self.domains: dict[str, str] = {}
        self.functions = Functions()
        self.owners = Owners()
        self.watermarks = Watermarks()
        self.settings = settings
        self.start()

    def start(self) -> None:
        self.keys = Keys(self.root / "trust", self.uuid, self.name, "h:1", self.clock)
        self.audit = AuditFile(self.root / "audit")
        self.nonces = Nonces(self.root / "nonces.db", self.clock)
        self.numbers = Numbers(self.root / "checkpoints.db")
        self.shelf = Shelf(self.root / "checkpoints")
        services: Any = Services(
            keys=self.keys, owners=self.owners, functions=self.functions,  # type: ignore[arg-type]
            journal=None, tickets=None, audit=self.audit, nonces=self.nonces,  # type: ignore[arg-type]
            watermarks=self.watermarks,  # type: ignore[arg-type]
            boot=1, record=self.record, context=None, arrived=None, leaves=None,  # type: ignore[arg-type]
            clock_ns=self.clock, fault=self.fault,
        )  # fmt: skip
        self.services: Services = services
        self.points = Checkpoints(
            services, self.shelf, self.numbers, self.domain_state, self.settings
        )

    def stop(self) -> None:
        self.points.close()
        self.numbers.close()
        self.nonces.close()
        self.audit.close()

    def restart(self) -> None:
        self.stop()
        self.functions.held.clear()
        self.start()

    def clock(self) -> int:
        self.now += SECOND // 1000
        return self.now

    async def record(self, kind: str, subject: str, message: str) -> None:
        self.events.append((kind, subject, message))

    async def domain_state(self, domain: str) -> str:
        return self.domains.get(domain, "paused")

    def fault(self, step: str) -> None:
        self.steps.append(step)
        if step == self.kill_at:
            raise KilledError(step)
        self.on_step(step)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def audited(self) -> list[str]:
        """Codes of the audit records but those of passed steps; the chain is verified."""
        records, _ = audit.verify(audit.unpack((self.root / "audit").read_bytes()))
        return [record.code for record in records if record.code != "passed"]

    def trust(self, other: Host) -> None:
        """This host trusts the other."""
        self.keys.learn(other.uuid, other.keys.identity.public_identity, other.name, "h:2")

    def files(self) -> list[str]:
        root = self.root / "checkpoints"
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@contextmanager
def host(root: Path, **options: Any) -> Iterator[Host]:
    made = Host(root, **options)
    try:
        yield made
    finally:
        made.stop()


DOMAIN = str(UUID(int=77))


@contextmanager
def function(
    on: Host, domain: str | None = DOMAIN, **changes: Any
) -> Iterator[tuple[Process, Function]]:
    """A function process that the host knows, of a domain that is paused unless a test says so."""
    with running(**changes) as process:
        yield process, on.functions.add(process, domain)


def accumulate() -> Program:
    slots = (Slot(DType.FLOAT32, (N,), Role.INPUT), Slot(DType.FLOAT32, (N,), Role.OUTPUT))
    return Program(slots, (operation("add", 1, 0, 1),))


class Vm:
    """A guest whose memory can be rolled back with its function, as libvirt does it."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.ring = guest.ring()
        self.ring.open("t")

    def remember(self) -> dict[str, Any]:
        """What of the VM belongs to a checkpoint."""
        ring = self.ring
        return {"tail": ring.tail, "head": ring.head, "cookie": ring.cookie,
                "ram": bytes(self.guest.transport.ram[:])}  # fmt: skip

    def back(self, memory: dict[str, Any]) -> None:
        """The VM's memory as it was."""
        self.ring.tail, self.ring.head = memory["tail"], memory["head"]
        self.ring.cookie = memory["cookie"]
        self.guest.transport.ram[:] = memory["ram"]

    def busy(self, repeat: int) -> tuple[int, bytes]:
        """A long program is under way; (its output's handle, what it will be)."""
        ring = self.ring
        x = np.random.default_rng(5).standard_normal(N).astype(np.float32)
        a, y = ring.tensor(x), ring.tensor(np.zeros(N, np.float32))
        program = ring.load(accumulate())
        pairs = abi.BINDING.pack(a, 0) + abi.BINDING.pack(y, 0)
        buffer = self.guest.buffer(pairs)
        want = np.zeros(N, np.float32)
        for _ in range(repeat):
            want = want + x
        ring.post(abi.launch(99, program, 2, buffer.whole(32), repeat=repeat))
        ring.submit()
        return y, want.tobytes()

    def result(self, handle: int) -> bytes:
        self.guest.wait(self.ring.ready)
        assert self.ring.take().status == 0
        return bytes(self.ring.read(handle, "float32", (N,)).tobytes())


def describe(process: Process) -> documents.Described:
    return documents.described(call(process.spec.control_socket, "describe"))


def computes(process: Process) -> bool:
    said = describe(process)
    return said.migration_state == "RUNNING" and not said.fenced


def moved_ring(ring: Ring, guest: Guest) -> Ring:
    """The ring of a VM that is in another QEMU now."""
    moved = Ring.__new__(Ring)
    moved.__dict__.update(ring.__dict__)
    moved.guest, moved.words = guest, guest.window.cast("I")
    guest._rings.append(moved)
    return moved


def create(here: Host, found: Function, **options: Any) -> Entry:
    """A checkpoint, as an operator asks for it."""
    return asyncio.run(here.points.create(found.uuid, **options))
