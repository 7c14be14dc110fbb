"""Somebody who owns a guest and then its function's worker gains nothing: code that runs in a real
worker, beside a second real function under the same user, tries what it likes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.function.attempts import ATTEMPTS, NO_SUCH_CALL
from tests.function.harness import (
    DEADLINE_S,
    Guest,
    Process,
    call,
    environment,
    make_spec,
    wait_for,
)

#: "nobody": as in the unit, a user that owns nothing. Whoever is not root stays who they are.
UID = 65534 if os.geteuid() == 0 else os.geteuid()


class Intruder(Process):
    """A function under that user, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="avf-"))
        self.spec = make_spec(self.folder)
        self.path = self.folder / "spec.json"
        self.path.write_text(self.spec.to_json())
        self.log = self.folder / "log"
        with self.log.open("w") as log:
            for path in (self.folder, self.path, self.log):
                os.chown(path, UID, -1)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.function.intruder", str(self.path), str(UID)],
                cwd=Path(__file__).parents[2],
                # numpy is imported before the product could say so.
                env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
                stderr=log,
            )

    def pids(self) -> dict[str, int]:
        status = self.holder("status")
        return {name: int(status[f"{name}_pid"]) for name in ("holder", "zygote", "worker")}

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Intruder, Intruder]]:
    """The one that was taken over, and its neighbour."""
    with ExitStack() as stack:
        both = []
        for _ in range(2):
            both.append(Intruder())
            stack.callback(both[-1].stop)
        for one in both:
            wait_for(one._ready, "the function to be ready")
        yield both[0], both[1]


@pytest.fixture(scope="module")
def facts(pair: tuple[Intruder, Intruder]) -> Iterator[dict[str, Any]]:
    """What there is to aim at."""
    taken, other = pair
    own = taken.pids()
    files = {
        int(path.name): os.readlink(path) for path in Path(f"/proc/{own['worker']}/fd").iterdir()
    }
    by_name = {
        name: next(fd for fd, file in files.items() if f"memfd:{name} " in file + " ")
        for name in ("window", "state")
    }
    with (
        tempfile.TemporaryDirectory(prefix="avf-") as folder,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        os.chmod(folder, 0o755)
        sock.bind(f"{folder}/admin")
        os.chmod(f"{folder}/admin", 0o666)
        sock.listen()
        yield {
            **other.pids(), **by_name, "own_holder": own["holder"], "own_zygote": own["zygote"],
            "channel": next(fd for fd, file in files.items() if file.startswith("socket:")),
            "own_folder": str(taken.folder), "own_spec": str(taken.path),
            "own_file": str(taken.folder / "planted"), "other_folder": str(other.folder),
            "other_spec": str(other.path), "other_holder": other.spec.holder_socket,
            "other_control": other.spec.control_socket, "other_vfio": other.spec.vfio_socket,
            "own_holder_socket": taken.spec.holder_socket, "admin": f"{folder}/admin",
        }  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(pair: tuple[Intruder, Intruder], facts: dict[str, Any]) -> dict[str, str]:
    """Of every attempt, in one worker, one after the other: none may end it either."""
    worker = pair[0].pids()["worker"]
    found: dict[str, str] = call(pair[0].spec.control_socket, "attempts", facts)
    assert pair[0].pids()["worker"] == worker
    return found


def test_every_measure_is_active_under_a_user_without_privileges(
    pair: tuple[Intruder, Intruder],
) -> None:
    sandbox = pair[0].control("status")["sandbox"]
    assert all(sandbox.values()), sandbox


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_is_refused(
    pair: tuple[Intruder, Intruder], outcomes: dict[str, str], name: str
) -> None:
    attempt = ATTEMPTS[name]
    if attempt.by_landlock and not pair[0].control("status")["sandbox"]["landlock"]:
        pytest.skip("this kernel has no Landlock")
    assert outcomes[name] in (*attempt.refusals, NO_SUCH_CALL)


def test_what_a_worker_needs_it_may(pair: tuple[Intruder, Intruder]) -> None:
    done = pair[0].control("works")
    assert done["thread"]
    assert done["maps"]


def test_after_all_that_both_functions_compute(
    pair: tuple[Intruder, Intruder], outcomes: dict[str, str]
) -> None:
    assert outcomes
    for one in pair:
        assert one.holder("status")["worker_restarts"] == 0
        with Guest(one) as guest:
            ring = guest.ring()
            ring.open()
            data = np.arange(1000, dtype=np.float32)
            assert np.array_equal(ring.read(ring.tensor(data), "float32", (1000,)), data)
    assert not (pair[0].folder / "planted").exists()


def test_a_worker_replaced_under_that_user_is_as_confined(pair: tuple[Intruder, Intruder]) -> None:
    taken = pair[0]
    before = taken.kill_worker()
    after = wait_for(
        lambda: (pid := taken.pids()["worker"]) != before and pid, "the next worker", DEADLINE_S
    )
    status = taken.control("status")
    assert status["pid"] == after
    assert all(status["sandbox"].values())
