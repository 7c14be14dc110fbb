"""Which BLAS numpy uses, and how many threads it takes.

Parallelism is over tiles, chosen by the engine, so each BLAS call has one thread: with more, both
the cut of the work and the order of additions (and so the bits) would depend on the machine's core
count. The library is found among what the process has mapped (numpy's bundled OpenBLAS, Debian's
libopenblas), so nothing is loaded that numpy itself does not use. Without one (reference BLAS)
there are no threads to control, and every call here is a no-op.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np

_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"/[^/\n]*(?:blas|blis|mkl)[^/\n]*\.so[^/\n]*$", re.IGNORECASE)
_PREFIXES = ("scipy_openblas_", "openblas_")
_SUFFIXES = ("64_", "_64", "_64_", "")


class Blas:
    """Handles into one loaded OpenBLAS."""

    def __init__(self, path: str, library: ctypes.CDLL, prefix: str, suffix: str) -> None:
        self.path = path
        self._get: Callable[[], int] = _function(library, prefix, "get_num_threads", suffix)
        self._set = _function(library, prefix, "set_num_threads", suffix)
        self._set.argtypes = [ctypes.c_int]
        self._set.restype = None
        self.config = _text(library, prefix, "get_config", suffix)
        self.core = _text(library, prefix, "get_corename", suffix)

    @property
    def threads(self) -> int:
        """Threads that the next call takes."""
        return self._get()

    @threads.setter
    def threads(self, count: int) -> None:
        self._set(count)


def _function(library: ctypes.CDLL, prefix: str, name: str, suffix: str) -> Any:
    return getattr(library, prefix + name + suffix)


def _text(library: ctypes.CDLL, prefix: str, name: str, suffix: str) -> str:
    try:
        function = _function(library, prefix, name, suffix)
    except AttributeError:
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode("ascii", "replace")


def candidates(maps: str) -> list[str]:
    """Paths of mapped BLAS libraries in the text of a ``/proc/PID/maps``, in order, once each."""
    found: dict[str, None] = {}
    for line in maps.splitlines():
        if _LIBRARY.search(line):
            found[line[line.index("/") :]] = None
    return list(found)


def open_first(paths: Iterable[str]) -> Blas | None:
    """The first of ``paths`` that is an OpenBLAS, None when none is."""
    for path in paths:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                if hasattr(library, f"{prefix}set_num_threads{suffix}"):
                    return Blas(path, library, prefix, suffix)
    return None


@lru_cache(maxsize=1)
def loaded() -> Blas | None:
    """The OpenBLAS that numpy uses in this process, None when it uses another BLAS."""
    try:
        maps = _MAPS.read_text()
    except OSError:
        return None
    return open_first(candidates(maps))


def identity() -> str:
    """Names the BLAS of this process: an OpenBLAS by how it was built; any other, which says
    nothing of itself, by its files; ``unknown`` when there is none to be read.
    """
    blas = loaded()
    return (blas.config or os.path.basename(blas.path)) if blas else _mapped()


@lru_cache(maxsize=1)
def _mapped() -> str:
    try:
        return named_files(candidates(_MAPS.read_text()))
    except OSError:
        return "unknown"


def named_files(paths: Iterable[str]) -> str:
    """Base names and the beginnings of SHA-256. OSError: one of them can't be read."""
    named = []
    for path in paths:
        with open(path, "rb") as file:
            named.append(f"{os.path.basename(path)} {file_digest(file, 'sha256').hexdigest()[:16]}")
    return ", ".join(sorted(named)) or "unknown"


def single_thread() -> None:
    """Make BLAS calls of this process take one thread from now on. Cheap when they do already.

    Every kernel that calls BLAS calls this first, so that no setting from outside changes its bits.
    """
    blas = loaded()
    if blas is not None and blas.threads != 1:
        blas.threads = 1


def fingerprint() -> dict[str, str]:
    """What the bits of the fast twins depend on, for comparing two machines.

    Keys: ``numpy`` and ``libc`` versions, ``machine``, ``blas`` (:func:`identity`), ``core``
    (which kernels BLAS chose), ``simd`` (vector features that numpy dispatches on).
    """
    blas = loaded()
    return {
        "numpy": np.__version__,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "blas": identity(),
        "core": blas.core if blas else "",
        "simd": " ".join(_simd()),
    }


def _simd() -> list[str]:
    """CPU features that this numpy found and may dispatch on; its own names, sorted."""
    core = getattr(np, "_core", None) or getattr(np, "core", None)
    features = getattr(getattr(core, "_multiarray_umath", None), "__cpu_features__", {})
    return sorted(name for name, present in features.items() if present)
