"""Real function processes: lent while they compute, staged, loaded into another process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.abi import commands as abi
from accelvisor.abi.dtypes import DType
from accelvisor.abi.programs import Program, Role, Slot
from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.lent import Lent
from accelvisor.daemon.moving.orders import Given, ask
from accelvisor.daemon.moving.staged import Staged
from accelvisor.errors import (
    AccelvisorError,
    DeadlineError,
    ProtocolError,
    StateError,
    UnavailableError,
)
from accelvisor.frames.chunks import Kind
from accelvisor.function import state as s
from accelvisor.function.moving import SECTION_BYTES
from accelvisor.limits import MIB
from tests.descriptors import open_fds
from tests.function.harness import Guest, Process, Ring, operation, running

N = 150_000


def control(process: Process, method: str, expected: int = 0, fds: list[int] | None = None,
            **parameters: object) -> Given:
    path = Path(process.spec.control_socket)
    return ask(path, method, parameters, fds or [], expected, 30.0)


def lend(process: Process) -> Lent:
    given = ask(Path(process.spec.holder_socket), "lend", None, [], 4, 30.0)
    return Lent(given.fds, process.spec.memory_bytes, process.spec.window_bytes)


def accumulate() -> Program:
    slots = (Slot(DType.FLOAT32, (N,), Role.INPUT), Slot(DType.FLOAT32, (N,), Role.OUTPUT))
    return Program(slots, (operation("add", 1, 0, 1),))


class Move:
    """One move between two processes, step by step, without the daemons around it."""

    def __init__(self, source: Process, target: Process, guests: tuple[Guest, Guest]) -> None:
        self.source, self.target = source, target
        self.here, self.there = guests
        control(source, "track", on=True)
        control(target, "track", on=True)
        self.lent = lend(source)
        spec = source.spec
        self.staged = Staged(
            {Kind.STATE: SECTION_BYTES, Kind.WINDOW: spec.window_bytes,
             Kind.MEMORY: spec.memory_bytes, Kind.EXTENTS: 64 * MIB}
        )  # fmt: skip
        self.sent = 0
        self.apply(self.lent.everything())

    def apply(self, pieces: Iterator[object]) -> int:
        count = 0
        for kind, offset, view in pieces:  # type: ignore[misc]
            self.staged.views[kind][offset : offset + len(view)] = view
            count += len(view)
        self.sent += count
        return count

    def stop(self) -> documents.FunctionFrame:
        control(self.source, "migrate", to="STOP_COPY")
        control(self.source, "fence", on=True)
        self.last = self.apply(self.lent.changes())
        said = documents.described(control(self.source, "describe"))
        self.status = documents.status_frame(said, self.lent.digests())
        section = self.lent.section()
        self.staged.views[Kind.STATE][:] = section
        extents = control(self.source, "extents", expected=1)
        size = os.fstat(extents.fds[0]).st_size
        self.staged.views[Kind.EXTENTS][:size] = os.pread(extents.fds[0], size, 0)
        extents.close()
        self.staged.finish({Kind.EXTENTS: size})
        return documents.function_frame(said)

    def load(self, frame: documents.FunctionFrame) -> None:
        control(self.target, "fence", on=True)
        control(self.target, "migrate", to="RESUMING")
        before = documents.described(control(self.target, "describe"))
        after = control(self.target, "load", fds=self.staged.descriptors())
        documents.validate(frame, self.status, before, after)

    def commit(self) -> None:
        control(self.target, "migrate", to="RUNNING")
        control(self.target, "moved")
        control(self.target, "fence", on=False)

    def close(self) -> None:
        self.lent.close()
        self.staged.close()


@pytest.fixture
def pair() -> Iterator[tuple[Process, Process]]:
    with running() as source, running() as target:
        yield source, target


def moved_ring(ring: Ring, guest: Guest) -> Ring:
    moved = Ring.__new__(Ring)
    moved.__dict__.update(ring.__dict__)
    moved.guest, moved.words = guest, guest.window.cast("I")
    guest._rings.append(moved)
    return moved


def test_a_computation_moves_between_processes_with_the_same_bits(
    pair: tuple[Process, Process],
) -> None:
    source, target = pair
    x = np.random.default_rng(5).standard_normal(N).astype(np.float32)
    repeat = 1500
    with Guest(source) as here, Guest(target) as there:
        ring = here.ring()
        ring.open("t")
        a, y = ring.tensor(x), ring.tensor(np.zeros(N, np.float32))
        program = ring.load(accumulate())
        pairs = abi.BINDING.pack(a, 0) + abi.BINDING.pack(y, 0)
        buffer = here.buffer(pairs)
        ring.post(abi.launch(99, program, 2, buffer.whole(32), repeat=repeat))
        ring.submit()
        move = Move(source, target, (here, there))
        for _ in range(3):
            move.apply(move.lent.changes())
        frame = move.stop()
        assert not ring.ready(), "it was over before it moved"
        there.transport.ram[:] = here.transport.ram[:]
        move.load(frame)
        moved = moved_ring(ring, there)
        assert not moved.ready()
        target.kill_worker()  # whoever comes next finds the loaded memory, and the fence
        move.commit()
        there.wait(moved.ready)
        assert moved.take().status == 0
        want = np.zeros(N, np.float32)
        for _ in range(repeat):
            want = want + x
        assert moved.read(y, "float32", (N,)).tobytes() == want.tobytes()
        assert move.last < move.sent
        move.close()
        # An abandoned source goes on as if nothing had been.
        control(source, "migrate", to="RUNNING")
        control(source, "fence", on=False)
        here.wait(ring.ready)
        assert ring.read(y, "float32", (N,)).tobytes() == want.tobytes() if ring.take() else True


def test_small_changes_are_small_rounds(pair: tuple[Process, Process]) -> None:
    source, target = pair
    with Guest(source) as here, Guest(target) as there:
        ring = here.ring()
        ring.open("t")
        ring.tensor(np.ones(8 * MIB, np.uint8))
        y = ring.tensor(np.ones(4096, np.uint8))
        move = Move(source, target, (here, there))
        assert move.apply(move.lent.changes()) < MIB
        ring.write(y, np.full(4096, 3, np.uint8))
        assert move.lent.dirty_bytes() == 4096
        # The page, and the pages of the window in which rings and staging moved.
        assert move.apply(move.lent.changes()) <= 16 * 4096
        move.close()


def test_a_freed_tensor_is_zero_at_the_destination_and_no_hole_is_filled(
    pair: tuple[Process, Process],
) -> None:
    source, target = pair
    with Guest(source) as here, Guest(target) as there:
        ring = here.ring()
        ring.open("t")
        big = ring.tensor(np.ones(8 * MIB, np.uint8))
        move = Move(source, target, (here, there))
        ring.ok(abi.tensor_destroy, big)
        frame = move.stop()
        memory = move.lent._fds[2]
        assert os.fstat(memory).st_blocks * 512 < MIB
        move.load(frame)
        assert not any(move.staged.views[Kind.MEMORY])
        move.close()


@pytest.mark.parametrize("kind", [Kind.MEMORY, Kind.WINDOW])
def test_a_byte_that_got_lost_between_staging_and_device_is_found(
    pair: tuple[Process, Process], kind: Kind
) -> None:
    source, target = pair
    with Guest(source) as here, Guest(target) as there:
        ring = here.ring()
        ring.open("t")
        ring.tensor(np.ones(MIB, np.uint8))
        move = Move(source, target, (here, there))
        frame = move.stop()
        # Where no record lies: in the middle of the tensor, of the staging area.
        at = MIB // 2 if kind is Kind.MEMORY else len(move.staged.views[kind]) - 5
        move.staged.views[kind][at] ^= 1
        with pytest.raises(StateError, match="reads back differently") as caught:
            move.load(frame)
        assert caught.value.code == "status-digest"
        move.close()


def test_lent_memory_cannot_be_written(pair: tuple[Process, Process]) -> None:
    given = ask(Path(pair[0].spec.holder_socket), "lend", None, [], 4, 30.0)
    for fd in given.fds[:3]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
    given.close()


def test_memory_of_another_size_is_refused_and_closed(pair: tuple[Process, Process]) -> None:
    before = open_fds()
    given = ask(Path(pair[0].spec.holder_socket), "lend", None, [], 4, 30.0)
    with pytest.raises(ProtocolError):
        Lent(given.fds, 4096, pair[0].spec.window_bytes)
    assert open_fds() == before


# --- orders ---------------------------------------------------------------------------------------


class Peer:
    """A function process that says one thing."""

    def __init__(self, folder: Path, answer: bytes, fds: int, given: int) -> None:
        self.path = folder / "peer.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._answer, self._fds = answer, [given] * fds
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as client:
            client.recv(65536)
            if self._answer:
                socket.send_fds(client, [self._answer], self._fds)
            if not self._answer.endswith(b"\0"):
                client.recv(1)  # until the other end goes


@pytest.mark.parametrize(
    ("answer", "fds", "error", "code"),
    [
        (b'{"parameters": {}}\0', 1, ProtocolError, "function-reply"),
        (b"nonsense\0", 2, ProtocolError, "function-reply"),
        (b'{"error": {"code": "no-way", "message": "no"}}\0', 0, AccelvisorError, "no-way"),
        (b'{"half', 1, DeadlineError, "function-deadline"),
    ],
)
def test_no_descriptor_is_left_open_whatever_a_function_answers(
    tmp_path: Path, answer: bytes, fds: int, error: type[AccelvisorError], code: str
) -> None:
    mine = os.memfd_create("known")
    peer = Peer(tmp_path, answer, fds, mine)
    with pytest.raises(error) as caught:
        ask(peer.path, "lend", None, [], 0, 0.2)
    assert caught.value.code == code
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{fd}")]  # fmt: skip
    assert names.count(os.readlink(f"/proc/self/fd/{mine}")) == 1
    os.close(mine)


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        ask(tmp_path / "nothing.sock", "lend", None, [], 4, 1.0)


def test_another_user_cannot_borrow_a_functions_memory() -> None:
    """Functions share a user; the keeper is another."""
    assert os.geteuid() == 0, "this test changes its user"
    with running(keeper=0) as process:
        os.chmod(os.path.dirname(process.spec.holder_socket), 0o777)
        os.chmod(process.spec.holder_socket, 0o777)
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                ask(Path(process.spec.holder_socket), "lend", None, [], 4, 5.0)
                os._exit(0)
            except UnavailableError:
                os._exit(7)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_incompatible_hosts_are_named_with_every_difference() -> None:
    here = {"abi": "1.0", "numpy": "2.2", "blas": "OpenBLAS 0.3.29 X", "core": "Zen"}
    with pytest.raises(StateError, match=r"numpy: 1\.24 there.*core: Haswell there") as caught:
        documents.require_compatible({**here, "numpy": "1.24", "core": "Haswell"}, here)
    assert caught.value.code == "status-firmware"
    assert documents.firmware_name(here) != documents.firmware_name({**here, "core": "Haswell"})


def test_the_state_section_is_one_chunk_kind_wide() -> None:
    assert s.DIGEST_END - s.PCI_AT == SECTION_BYTES
