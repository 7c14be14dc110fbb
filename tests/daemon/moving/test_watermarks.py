"""The watermark unit: over made-up functions, and over a real function process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from accelvisor.daemon.moving.marks import Marks
from accelvisor.daemon.moving.tensors import Processes
from accelvisor.daemon.moving.watermarks import Signed, Watermarks
from accelvisor.daemon.paths import Paths
from accelvisor.errors import AccelvisorError, NotFoundError, StateError
from accelvisor.frames import watermark
from accelvisor.frames.chunks import Kind
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import Model
from accelvisor.frames.watermark import Key, Place
from accelvisor.function import digest
from accelvisor.kernels import watermark as kernel
from tests.daemon.moving.test_lent import Move
from tests.frames import building
from tests.frames.building import FUNCTION, HOST_A, HOST_B, KEY_A, KEY_B, NONCE, NOW, Records
from tests.function.harness import Guest, Process, running

T = TypeVar("T")
KEY = Key(bytes(range(32)))
MANIFEST = bytes(range(32))
PLACE = Place(handle=1 << 32, address=4096, dtype="float32", shape=(64, 64))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def plain(seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.RandomState(seed).standard_normal((64, 64)).astype(np.float32)


def marked(model: str = "digits", key: Key = KEY) -> npt.NDArray[np.float32]:
    return kernel.embed(plain(), key.secret, kernel.unpack(key.message(model)))


class Memory:
    """Functions without processes."""

    def __init__(self, **tensors: npt.NDArray[Any]) -> None:
        self.tensors = {PLACE: tensors["digits"]} if tensors else {}

    async def places(self, function: str) -> list[Place]:
        return list(self.tensors)

    async def read(self, function: str, place: Place) -> npt.NDArray[Any]:
        return self.tensors[place]


class Host:
    """A daemon's watermark unit, and what it told."""

    def __init__(self, folder: Path, memory: Memory, name: str = HOST_A, *,
                 knows: bool = True, policy: str = "if-known") -> None:
        self.memory = memory
        self.audit = Records()
        self.told: list[str] = []
        self.policy = policy
        self.marks = Marks(folder / name)
        if knows:
            self.marks.add_key(KEY)
        self.unit = Watermarks(
            self.marks, memory, name, lambda: KEY_A if name == HOST_A else KEY_B, self.audit,
            self._record, lambda: self.policy, lambda: NOW, lambda n: NONCE[:n] * (n // 16 or 1),
        )  # fmt: skip

    async def _record(self, kind: str, subject: str, message: str) -> None:
        assert subject == FUNCTION
        self.told.append(kind)

    def register(self) -> Signed:
        return run(self.unit.register(FUNCTION, "digits", PLACE.handle, KEY.key_id))

    def require(self, models: list[Model]) -> list[Signed]:
        work = self.unit.require(FUNCTION, models, nonce=NONCE, manifest=MANIFEST)
        return run(work)

    @property
    def audited(self) -> list[str]:
        return [event.code for event in self.audit.events]


@pytest.fixture
def source(tmp_path: Path) -> Host:
    host = Host(tmp_path, Memory(digits=marked()))
    host.register()
    return host


def refused(action: Any) -> AccelvisorError:
    with pytest.raises(AccelvisorError) as caught:
        action()
    return caught.value


# --- registering and checking ---------------------------------------------------------------------


def test_a_marked_tensor_is_registered_and_its_verdict_is_signed(source: Host) -> None:
    [signed] = run(source.unit.check(FUNCTION, NONCE))
    ring = Keyring(building.document())
    found = watermark.verify(signed.envelope, ring, nonce=NONCE, now_ns=NOW)
    assert found == signed.verdict
    assert (found.errors, found.accepted, found.host, found.manifest) == (0, True, HOST_A, b"")
    assert source.told == ["watermark-registered"]


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        (plain(), "watermark-missing"),
        (marked("other"), "watermark-missing"),
        (marked(key=Key(bytes(32))), "watermark-missing"),
        (np.full((64, 64), np.nan, np.float32), "watermark-values"),
    ],
)
def test_what_is_not_marked_is_not_registered(
    tmp_path: Path, weights: npt.NDArray[Any], code: str
) -> None:
    host = Host(tmp_path, Memory(digits=weights))
    assert refused(host.register).code == code
    assert host.marks.models() == []


def test_nothing_is_registered_without_its_key_or_its_tensor(tmp_path: Path) -> None:
    stranger = Host(tmp_path, Memory(digits=marked()), knows=False)
    assert refused(stranger.register).code == "watermark-key-unknown"
    empty = Host(tmp_path, Memory(), HOST_B)
    assert refused(empty.register).code == "watermark-tensor"


@pytest.mark.parametrize("lost", ["weights", "tensor", "numbers"])
def test_a_check_tells_what_is_lost(source: Host, lost: str) -> None:
    tensors = source.memory.tensors
    if lost == "tensor":
        tensors[msgspec.structs.replace(PLACE, address=8192)] = tensors.pop(PLACE)
    else:
        tensors[PLACE] = plain() if lost == "weights" else plain() * np.float32(np.inf)
    [signed] = run(source.unit.check(FUNCTION))
    assert not signed.verdict.accepted
    assert (signed.verdict.errors is None) == (lost != "weights")


def test_keys_are_made_given_and_taken(tmp_path: Path) -> None:
    here, there = Host(tmp_path, Memory(), knows=False), Host(tmp_path, Memory(), HOST_B)
    name = here.unit.create_key()
    assert there.unit.import_key(here.unit.export_key(name)) == name
    assert there.marks.key(name) == here.marks.key(name)
    with pytest.raises(NotFoundError):
        here.unit.export_key("0" * 32)


def test_what_is_unregistered_or_forgotten_is_not_looked_for(source: Host) -> None:
    source.unit.unregister(FUNCTION, "digits")
    assert run(source.unit.check(FUNCTION)) == []
    assert refused(lambda: source.unit.unregister(FUNCTION, "digits")).code == "watermark-model"
    source.register()
    source.unit.forget(FUNCTION)
    assert source.marks.models() == []


# --- a move ---------------------------------------------------------------------------------------


def test_a_destination_finds_the_model_and_can_move_it_on(source: Host, tmp_path: Path) -> None:
    models = run(source.unit.expected(FUNCTION))
    target = Host(tmp_path, source.memory, HOST_B)
    [signed] = target.require(models)
    assert (signed.verdict.host, signed.verdict.manifest) == (HOST_B, MANIFEST)
    assert signed.verdict.accepted
    assert target.audited == ["passed"]
    assert target.audit.events[0].subject == MANIFEST.hex()
    assert run(target.unit.expected(FUNCTION)) == models


@pytest.mark.parametrize("change", ["weights", "address", "gone", "numbers"])
def test_a_model_that_did_not_arrive_is_refused(
    source: Host, tmp_path: Path, change: str
) -> None:
    models = run(source.unit.expected(FUNCTION))
    target = Host(tmp_path, Memory(digits=marked()), HOST_B)
    tensors = target.memory.tensors
    match change:
        case "weights":
            tensors[PLACE] = plain()
        case "numbers":
            tensors[PLACE] = plain() * np.float32(np.inf)
        case "gone":
            tensors.clear()
        case "address":
            tensors[msgspec.structs.replace(PLACE, address=8192)] = tensors.pop(PLACE)
    error = refused(lambda: target.require(models))
    assert isinstance(error, StateError)
    assert (error.code, error.where) == ("status-watermark", "status:V8")
    assert target.audited == ["status-watermark"]
    assert target.marks.models() == []


def test_a_host_without_the_key_takes_it_unchecked_says_so_and_passes_it_on(
    source: Host, tmp_path: Path
) -> None:
    models = run(source.unit.expected(FUNCTION))
    target = Host(tmp_path, source.memory, HOST_B, knows=False)
    assert target.require(models) == []
    assert target.audited == ["unchecked"]
    assert target.told == ["watermark-unchecked"]
    assert run(target.unit.expected(FUNCTION)) == models
    assert run(target.unit.check(FUNCTION)) == []


def test_a_host_that_requires_keys_refuses_a_model_without(source: Host, tmp_path: Path) -> None:
    models = run(source.unit.expected(FUNCTION))
    target = Host(tmp_path, source.memory, HOST_B, knows=False, policy="require")
    error = refused(lambda: target.require(models))
    assert (error.code, error.where) == ("status-watermark-key", "status:V8")
    assert target.audited == ["status-watermark-key"]
    target.policy = "if-known"
    target.require(models)


def test_a_mark_that_was_lost_before_does_not_hold_up_the_move(source: Host) -> None:
    """A guest may train its model, or free it; else it could keep its host from being emptied."""
    source.memory.tensors[PLACE] = plain()
    assert run(source.unit.expected(FUNCTION)) == []
    assert source.told[1:] == ["watermark-lost"]
    source.memory.tensors.clear()
    assert run(source.unit.expected(FUNCTION)) == []
    assert source.told[1:] == ["watermark-lost"]


def test_without_models_no_function_is_asked(tmp_path: Path) -> None:
    host = Host(tmp_path, Memory())
    host.memory.places = None  # type: ignore[method-assign, assignment]
    assert host.require([]) == []


# --- a real process -------------------------------------------------------------------------------


class Real:
    """The watermark unit over one function process."""

    def __init__(self, process: Process, folder: Path, host: str) -> None:
        self.uuid = process.spec.uuid
        folder.mkdir()
        paths = Paths(folder, folder, folder)
        paths.functions.mkdir()
        # A function keeps its UUID in a move; here both processes are on one host.
        for uuid in (self.uuid, FUNCTION):
            paths.function(uuid).directory.symlink_to(Path(process.spec.holder_socket).parent)
        marks = Marks(folder / "w")
        marks.add_key(KEY)
        reach = Processes(paths, lambda _: process.spec.memory_bytes)
        self.unit = Watermarks(marks, reach, host, lambda: KEY_A, Records(), self._record)

    async def _record(self, kind: str, subject: str, message: str) -> None:
        pass


def test_a_model_in_a_running_functions_memory_is_found(tmp_path: Path) -> None:
    with running() as process, Guest(process) as guest:
        ring = guest.ring()
        ring.open("t")
        ring.tensor(plain(9))
        handle = ring.tensor(marked())
        real = Real(process, tmp_path / "a", HOST_A)
        signed = run(real.unit.register(real.uuid, "digits", handle, KEY.key_id))
        assert signed.verdict.errors == 0
        assert len(run(real.unit.tensors(real.uuid))) == 2
        ring.write(handle, plain())
        [signed] = run(real.unit.check(real.uuid))
        assert not signed.verdict.accepted
        assert signed.verdict.errors is not None


@pytest.mark.parametrize("changed", [False, True])
def test_a_loaded_process_has_the_model_or_is_refused(tmp_path: Path, changed: bool) -> None:
    with running() as source, running() as target, Guest(source) as here, Guest(target) as there:
        ring = here.ring()
        ring.open("t")
        handle = ring.tensor(marked())
        a, b = Real(source, tmp_path / "a", HOST_A), Real(target, tmp_path / "b", HOST_B)
        run(a.unit.register(FUNCTION, "digits", handle, KEY.key_id))
        move = Move(source, target, (here, there))
        frame = move.stop()
        models = run(a.unit.expected(FUNCTION))
        if changed:  # a source that signs what it likes; what it sends is not the model
            place = models and run(a.unit.tensors(FUNCTION))[0]
            forge(move, place.address, plain())
        move.load(frame)
        work = b.unit.require(FUNCTION, models, nonce=NONCE, manifest=MANIFEST)
        if changed:
            assert refused(lambda: run(work)).code == "status-watermark"
        else:
            [signed] = run(work)
            assert signed.verdict.errors == 0
        move.close()


def forge(move: Move, address: int, weights: npt.NDArray[Any]) -> None:
    """Other weights, consistently: the status frame names their digest."""
    view = move.staged.views[Kind.MEMORY]
    view[address : address + weights.nbytes] = weights.tobytes()
    sums = digest.all_sums(view, [(0, len(view))])
    digests = msgspec.structs.replace(move.status.digests, memory=digest.memory_digest(sums))
    move.status = msgspec.structs.replace(move.status, digests=digests)
