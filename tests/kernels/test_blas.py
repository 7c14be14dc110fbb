"""Finding the BLAS and keeping it to one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.kernels import blas
from accelvisor.kernels.registry import BY_NAME

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libc.so.6
7f01-7f02 r--p 00000000 08:01 2 /usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3
7f02-7f03 r-xp 00000000 08:01 2 /usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3
7f03-7f04 r-xp 00000000 08:01 3 /a b/numpy.libs/libscipy_openblas64_-32a4b2a6.so
7f04-7f05 r-xp 00000000 08:01 4 /srv/blas/notes.txt
7f05-7f06 rw-p 00000000 00:00 0 [heap]
"""


@pytest.fixture
def openblas() -> Iterator[blas.Blas]:
    found = blas.loaded()
    assert found is not None, "these tests run with numpy's OpenBLAS"
    before = found.threads
    yield found
    found.threads = before


def test_mapped_libraries_are_found_once_each() -> None:
    assert blas.candidates(MAPS) == [
        "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3",
        "/a b/numpy.libs/libscipy_openblas64_-32a4b2a6.so",
    ]


def test_a_library_without_threads_is_passed_over() -> None:
    assert blas.open_first(["libc.so.6", "/nonexistent/libblas.so"]) is None


def test_kernels_take_one_thread_whatever_was_set(openblas: blas.Blas) -> None:
    openblas.threads = 2
    a = np.ones((4, 4), np.float32)
    out = np.empty_like(a)
    BY_NAME["matmul"].run_tile([a, a, out], (), 0)
    assert openblas.threads == 1
    assert (out == 4).all()


def test_bits_of_a_product_do_not_depend_on_the_thread_setting(openblas: blas.Blas) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((300, 310), dtype=np.float32) for _ in range(2))
    results = set()
    for threads in (1, 2, 4):
        openblas.threads = threads
        out = np.empty((300, 300), np.float32)
        instruction = BY_NAME["matmul_nt"]
        for tile in range(instruction.tiles([a.shape, b.shape, out.shape], ())):
            instruction.run_tile([a, b, out], (), tile)
        results.add(out.tobytes())
    assert len(results) == 1


def test_without_openblas_nothing_is_controlled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "loaded", lambda: None)
    blas.single_thread()
    assert blas.fingerprint()["core"] == ""


def test_the_fingerprint_is_stable_text(openblas: blas.Blas) -> None:
    first, second = blas.fingerprint(), blas.fingerprint()
    assert first == second
    assert first["numpy"] == np.__version__
    assert "OpenBLAS" in first["blas"]
    assert first["core"]
    assert all(isinstance(text, str) for text in first.values())


def test_a_blas_that_says_nothing_of_itself_is_known_by_its_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    for directory, content in ((one, b"adds from the left"), (other, b"adds from the right")):
        directory.mkdir()
        (directory / "libblas.so.3.12.1").write_bytes(content)
    first, second = (blas.named_files([str(d / "libblas.so.3.12.1")]) for d in (one, other))
    assert first.startswith("libblas.so.3.12.1 ")
    assert first != second
    assert blas.named_files([]) == "unknown"
