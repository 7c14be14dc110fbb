"""An owner marks a layer in a file, or looks whether it is marked: on a machine of the owner's,
with the key in a file, without a daemon.

A guest's tools know nothing of this: who has the key of a model need not be who uploads it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accelvisor.errors import DataError, NotFoundError, SystemFailure
from accelvisor.frames.watermark import BITS, THRESHOLD, Key
from accelvisor.kernels import watermark
from accelvisor.kernels.declare import Array
from accelvisor.limits import LIMITS

#: What the only array of an .npy file is called here.
ONLY = "array"


class Marked(NamedTuple):
    """How a layer was marked.

    Attributes:
        averages: numbers that carry the bits.
        largest_shift: the largest change of a weight, in standard deviations of the weights.
    """

    array: str
    averages: int
    largest_shift: float


class Looked(NamedTuple):
    """How many of :data:`BITS` bits are wrong, and whether that is a mark."""

    array: str
    errors: int
    accepted: bool


def mark(
    source: Path,
    target: Path,
    array: str | None,
    model: str,
    key: Key,
    margin: float = watermark.MARGIN,
) -> Marked:
    """Write ``target`` (.npz): all arrays of ``source``, ``array`` with the mark of ``model``.

    Args:
        source: .npz, or .npy with one array.
        array: None: the one with the most weights.

    Raises:
        NotFoundError: ``file-not-found``, ``watermark-array``. DataError: ``model-invalid``.
        NumericError: ``watermark-...``: the layer cannot carry the mark.
        SystemFailure: ``file-write``.
    """
    arrays = read(source)
    name = _chosen(arrays, array, source)
    before = arrays[name]
    after = watermark.embed(before, key.secret, watermark.unpack(key.message(model)), margin)
    _write(target, {**arrays, name: after})
    how = watermark.layout(before.shape, BITS)
    return Marked(name, how.groups * how.each, watermark.largest_shift(before, after))


def look(source: Path, array: str | None, model: str, key: Key) -> Looked:
    """Whether ``array`` carries the mark of ``model``. Raises as :func:`mark`."""
    arrays = read(source)
    name = _chosen(arrays, array, source)
    found = watermark.extract(arrays[name], key.secret, BITS)
    wrong = watermark.errors(found, watermark.unpack(key.message(model)))
    return Looked(name, wrong, wrong <= THRESHOLD)


def read(path: Path) -> dict[str, Array]:
    """All arrays of an .npz or .npy file; never unpickles.

    Raises:
        NotFoundError: ``file-not-found``. DataError: ``model-invalid``.
    """
    try:
        # Opened here: numpy leaves a file open that it cannot read.
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > LIMITS.watermark_file_bytes:
                raise _bad(path, f"it is larger than {LIMITS.watermark_file_bytes} bytes")
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    unpacked = sum(item.file_size for item in archive.infolist())
                if unpacked > LIMITS.watermark_file_bytes:
                    raise _bad(path, f"it unpacks to more than {LIMITS.watermark_file_bytes} bytes")
            file.seek(0)
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {ONLY: found}
            arrays = {name: found[name] for name in found.files}
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path} does not exist", code="file-not-found", where="file"
        ) from error
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, MemoryError) as error:
        raise _bad(path, str(error) or type(error).__name__) from error
    for name, item in arrays.items():
        if not isinstance(item, np.ndarray):
            raise _bad(path, f"{name} is no array")
    if "file" in arrays:
        raise _bad(path, 'numpy cannot write an array that is called "file"')
    return arrays


def _chosen(arrays: Mapping[str, Array], name: str | None, path: Path) -> str:
    if name is None:
        name = max(arrays, key=lambda n: _weights(arrays[n]), default="")
    if name not in arrays:
        raise NotFoundError(
            f'{path} has no array "{name}"',
            code="watermark-array",
            where=str(path),
            hint=f"it has: {', '.join(sorted(arrays)) or 'none'}",
        )
    return name


def _weights(array: Array) -> int:
    """How many weights a layer has; vectors (biases, labels) and images do not count."""
    return array.size if array.dtype.kind == "f" and array.ndim >= 2 else 0


def _write(path: Path, arrays: Mapping[str, Array]) -> None:
    staged = path.with_name(path.name + ".new")
    try:
        with open(staged, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as error:
        raise SystemFailure(
            f"cannot write it: {error.strerror}", code="file-write", where=str(path)
        ) from error


def _bad(path: Path, why: str) -> DataError:
    return DataError(
        f"{path}: {why}", code="model-invalid", where=str(path), hint="numpy.savez makes such files"
    )
