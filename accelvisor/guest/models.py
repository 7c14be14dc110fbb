"""Networks and data sets in .npz files, and what ``accelguest run`` and ``train`` do with them.

A *network* file holds ``w0, b0, w1, b1, ...`` (float32; weights (inputs, outputs)), and optionally
``activation`` (default relu), ``scale`` (what samples are multiplied by, default 1), ``x_test`` and
``y_test``. A *data* file holds ``x_train, y_train, x_test, y_test`` and optionally ``scale``.
Samples are (count, features) of any real type, labels integers from 0.
"""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelvisor.errors import DataError, NotFoundError, PermissionDenied
from accelvisor.guest import nn

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

Array = npt.NDArray[Any]
_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Samples:
    """``x`` (count, features) float32, scaled; ``labels`` (count,) int64; ``raw``: unscaled."""

    x: Array
    labels: Array
    raw: Array


@dataclass(frozen=True, slots=True)
class Model:
    """A network file."""

    network: nn.Sequential
    parameters: list[Array]
    test: Samples


def load_model(path: Path) -> Model:
    """Read and check a network file.

    Raises:
        NotFoundError, PermissionDenied: it cannot be read. DataError: it is no network.
    """
    arrays = read(path)
    parameters: list[Array] = []
    while f"w{len(parameters) // 2}" in arrays:
        i = len(parameters) // 2
        parameters += [_floats(arrays, f"w{i}", 2, path), _floats(arrays, f"b{i}", 1, path)]
    if not parameters:
        raise _bad(path, "it has no w0", "a network file has w0, b0, w1, b1, ...")
    activation = str(arrays["activation"]) if "activation" in arrays else "relu"
    network = nn.form_of(parameters, activation)
    test = _samples(arrays, "test", path)
    if test.x.shape[1] != network.sizes[0]:
        raise _bad(
            path, f"x_test has {test.x.shape[1]} features, the network takes {network.sizes[0]}"
        )
    return Model(network, parameters, test)


def load_data(path: Path) -> tuple[Samples, Samples]:
    """Read and check a data file: (training samples, test samples). Raises as load_model."""
    arrays = read(path)
    train, test = _samples(arrays, "train", path), _samples(arrays, "test", path)
    if train.x.shape[1] != test.x.shape[1]:
        raise _bad(path, "training and test samples have different numbers of features")
    return train, test


def read(path: Path) -> dict[str, Array]:
    """All arrays of an .npz file; never unpickles.

    Raises:
        NotFoundError, PermissionDenied, DataError.
    """
    try:
        if path.stat().st_size > _FILE_BYTES:
            raise _bad(path, "it is larger than 1 GiB")
        with zipfile.ZipFile(path) as archive:
            if sum(i.file_size for i in archive.infolist()) > _FILE_BYTES:
                raise _bad(path, "it unpacks to more than 1 GiB")
        with np.load(path, allow_pickle=False) as archive_:
            arrays = {name: archive_[name] for name in archive_.files}
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path} does not exist", code="file-not-found", where="file"
        ) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", where="file") from error
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        why = str(error) or type(error).__name__
        raise _bad(path, why, "numpy.savez makes such files") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy hands a member that is no array out as bytes
            raise _bad(path, f"{name} is no array", "numpy.savez makes such files")
    return arrays


def run_model(function: Function, model: Model, *, singles: int = 100) -> dict[str, Any]:
    """Classify the test set on the device.

    Args:
        singles: how many samples to classify one by one as well, for the latency of one command.

    Returns:
        JSON-able figures; ``logits_sha256`` names the exact bits of the network's outputs.
    """
    network, test = model.network, model.test
    count = len(test.x)
    program = nn.inference(function, network, count, "logits")
    weights = [function.tensor(w) for w in model.parameters]
    started = time.perf_counter()
    with function.tensor(test.x) as x:
        logits = program(x, *weights)
    outputs = logits.numpy()
    logits.close()
    seconds = time.perf_counter() - started
    classes = outputs.argmax(axis=1)
    correct = int((classes == test.labels).sum())
    latencies = _latencies(function, model, weights, min(singles, count))
    for w in weights:
        w.close()
    return {
        "sizes": list(network.sizes),
        "activation": network.activation,
        "samples": count,
        "correct": correct,
        "accuracy": correct / count,
        "classes": classes.tolist(),
        "labels": test.labels.tolist(),
        "logits_sha256": hashlib.sha256(np.ascontiguousarray(outputs).tobytes()).hexdigest(),
        "program_sha256": hashlib.sha256(program.data).hexdigest(),
        "batch_seconds": seconds,
        "latency_us": latencies,
        "outputs": outputs,
    }


def _latencies(
    function: Function, model: Model, weights: list[Any], singles: int
) -> dict[str, float]:
    """Microseconds of classifying one sample: copy in, launch, copy out."""
    if not singles:
        return {}
    one = nn.inference(function, model.network, 1, "classes")
    taken: list[float] = []
    with function.empty((1, model.network.sizes[0])) as x, function.empty((1,), "int64") as y:
        out = np.empty(1, np.int64)
        with one.bind(x, *weights, out=y) as launch:
            for i in range(singles):
                start = time.perf_counter()
                x.copy_(model.test.x[i : i + 1])
                launch()
                y.numpy(out=out)
                taken.append((time.perf_counter() - start) * 1e6)
    taken.sort()
    return {"p50": taken[len(taken) // 2], "p99": taken[min(len(taken) * 99 // 100, singles - 1)]}


def train_model(
    function: Function,
    train: Samples,
    test: Samples,
    *,
    hidden: tuple[int, ...],
    epochs: int,
    batch: int,
    rate: float,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train a network on the device and test it there.

    Returns:
        JSON-able figures, and ``parameters`` (arrays).
    """
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    network = nn.Sequential((train.x.shape[1], *hidden, classes))
    started = time.perf_counter()
    done = nn.train(
        function,
        network,
        train.x,
        train.labels,
        epochs=epochs,
        batch=batch,
        rate=rate,
        seed=seed,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    found = nn.classify(function, network, done.parameters, test.x)
    correct = int((found == test.labels).sum())
    return {
        "sizes": list(network.sizes),
        "samples": len(train.x),
        "epochs": epochs,
        "batch": batch,
        "rate": rate,
        "seed": seed,
        "losses": done.losses,
        "steps": done.steps,
        "cycles": done.cycles,
        "seconds": seconds,
        "correct": correct,
        "accuracy": correct / len(test.x),
        "weights_sha256": digest(done.parameters),
        "parameters": done.parameters,
    }


def digest(arrays: list[Array]) -> str:
    """SHA-256 over the bytes of the arrays in order: equal exactly when all bits are."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def save_model(path: Path, parameters: list[Array], test: Samples, scale: float) -> None:
    """Write a network file that ``accelguest run`` takes."""
    named: dict[str, Any] = {f"{'wb'[i % 2]}{i // 2}": w for i, w in enumerate(parameters)}
    with open(path, "wb") as file:
        np.savez_compressed(
            file, **named, activation="relu", scale=scale, x_test=test.raw, y_test=test.labels
        )


def _samples(arrays: Mapping[str, Array], part: str, path: Path) -> Samples:
    for name in (f"x_{part}", f"y_{part}"):
        if name not in arrays:
            raise _bad(path, f"it has no {name}")
    raw, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if raw.ndim < 2 or raw.dtype.kind not in "biuf" or not len(raw):
        raise _bad(path, f"x_{part} is {raw.dtype} {raw.shape}, not (samples, features) numbers")
    if labels.shape != raw.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise _bad(path, f"y_{part} does not hold one label from 0 on for each sample")
    scale = scale_of(arrays)
    x = raw.reshape(len(raw), -1).astype(np.float32) * np.float32(scale)
    return Samples(np.ascontiguousarray(x), labels.astype(np.int64), raw)


def scale_of(arrays: Mapping[str, Array]) -> float:
    """What samples are multiplied by."""
    scale = arrays.get("scale")
    return float(scale) if scale is not None and scale.size == 1 else 1.0


def _floats(arrays: Mapping[str, Array], name: str, ndim: int, path: Path) -> Array:
    if name not in arrays:
        raise _bad(path, f"it has no {name}")
    array = arrays[name]
    if array.ndim != ndim or array.dtype.kind != "f" or not array.size:
        raise _bad(path, f"{name} is {array.dtype} {array.shape}")
    return np.ascontiguousarray(array, np.float32)


def _bad(path: Path, why: str, hint: str = "see docs/guest.md for the format") -> DataError:
    return DataError(f"{path}: {why}", code="model-invalid", where=str(path), hint=hint)
