"""The same collectives over Open MPI: ranks on loopback, started by mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accelvisor.collectives.local import LocalGroup

from . import mpi_ranks

ROOT = Path(__file__).parents[2]
MPIRUN = ["mpirun", "--oversubscribe", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include",
          "lo", "--mca", "oob_tcp_if_include", "lo"]  # fmt: skip


def mpirun(scenario: str, ranks: int, directory: Path, code: int | None = 0) -> list[Any]:
    """What each rank wrote. Without mpirun this fails, as it should."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [*MPIRUN, *root, "-n", str(ranks), sys.executable, "-m", "tests.collectives.mpi_ranks",
         scenario, str(directory)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    ) as running:  # fmt: skip
        try:
            _, said = running.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            running.terminate()  # and not killed: it takes its ranks with it
            raise
    assert code is None or running.returncode == code, said
    files = [directory / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


@pytest.mark.parametrize("ranks", [2, 4])
def test_over_mpi_as_between_threads_to_the_bit(ranks: int, tmp_path: Path) -> None:
    found = mpirun("reductions", ranks, tmp_path)

    class Local:
        """A rank of threads that can be closed, as MPI's can."""

        def __init__(self, c: Any) -> None:
            self.c = c

        def __getattr__(self, name: str) -> Any:
            return getattr(self.c, name)

        def close(self) -> None: ...

    wanted = LocalGroup(ranks).run(lambda c: mpi_ranks.reductions(Local(c)))  # type: ignore[arg-type]
    assert found == wanted
    for name, digests in found[0].items():
        if "/" in name:
            assert len(set(digests)) == 1, name
            assert all(other[name] == digests for other in found)


@pytest.mark.parametrize(
    ("scenario", "said"),
    [("mismatch", "rank 1 has shape (10, 3), not (10, 2)"), ("other_root", "rank 2 has root 1")],
)
def test_a_mismatch_is_one_error_on_all_ranks(scenario: str, said: str, tmp_path: Path) -> None:
    found = mpirun(scenario, 4, tmp_path)
    assert all(error == found[0] for error in found)
    assert found[0]["code"] == "collective-mismatch"
    assert said in found[0]["message"]


def test_a_rank_that_left_is_named_by_all_others(tmp_path: Path) -> None:
    found = mpirun("absent", 4, tmp_path)
    assert found[2] == {}
    for rank in (0, 1, 3):
        assert found[rank]["code"] == "collective-rank-lost"
        assert "lost rank 2 (it never began)" in found[rank]["message"]


def test_a_rank_that_hangs_does_not_keep_the_others_from_ending(tmp_path: Path) -> None:
    began = time.monotonic()
    found = mpirun("hangs", 3, tmp_path, code=None)
    assert time.monotonic() - began < 60
    for rank in (0, 2):
        assert found[rank]["code"] == "collective-rank-lost"
        assert "rank 1" in found[rank]["message"]


def test_abort_ends_all_ranks_when_told(tmp_path: Path) -> None:
    mpirun("aborts", 3, tmp_path, code=7)
