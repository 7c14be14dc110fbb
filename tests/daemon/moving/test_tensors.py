"""What a function's process says of its tensors is held against its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.moving import tensors
from accelvisor.errors import CapacityError, ProtocolError
from accelvisor.frames.watermark import Place
from accelvisor.limits import LIMITS, MIB

MEMORY = 1 * MIB


def tensor(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "tensor", "dtype": "float32", "shape": [4, 8], "handle": 1 << 32,
        "address": 4096, "nbytes": 128, "extent": 4096, **changes,
    }  # fmt: skip


def reply(*objects: dict[str, Any]) -> dict[str, Any]:
    context = {"context": 0, "queue": 0, "pid": 7, "name": "python3"}
    return {"contexts": [{**context, "objects": list(objects)}]}


def place(**changes: Any) -> Place:
    fields = {"handle": 1 << 32, "address": 4096, "dtype": "float32", "shape": (4, 8)}
    return Place(**{**fields, **changes})


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("memory")
    os.ftruncate(fd, MEMORY)
    yield fd
    os.close(fd)


def test_tensors_of_all_contexts_are_found_and_programs_are_not() -> None:
    said = reply(tensor(), {"kind": "program", "sha256": "", "handle": 5, "address": 0,
                            "nbytes": 9, "extent": 4096})  # fmt: skip
    said["contexts"] += reply(tensor(handle=7, dtype="int8", shape=[128]))["contexts"]
    assert tensors.places(said, MEMORY) == [place(), place(handle=7, dtype="int8", shape=(128,))]


@pytest.mark.parametrize(
    "other", [tensor(dtype="uint8", shape=[128]), tensor(dtype="bool"), tensor(nbytes=0, shape=[0])]
)
def test_tensors_that_can_hold_no_mark_are_left_out(other: dict[str, Any]) -> None:
    assert tensors.places(reply(other), MEMORY) == []


@pytest.mark.parametrize(
    "lie",
    [
        {"address": MEMORY},
        {"address": MEMORY - 4096, "shape": [1025], "nbytes": 4100},
        {"address": -4096},
        {"address": 1 << 63},
        {"address": 4100},
        {"nbytes": 127},
        {"shape": [1 << 40, 1 << 40], "nbytes": 1 << 62},
        {"shape": [-4, -8]},
        {"shape": [1] * 9},
        {"shape": "4 8"},
        {"handle": 1 << 64},
        {"handle": -1},
        {"handle": True},
        {"dtype": 3},
    ],
)
def test_impossible_tensors_are_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        tensors.places(reply(tensor(**lie)), MEMORY)
    assert caught.value.code == "function-reply"


@pytest.mark.parametrize(
    "said",
    [{}, {"contexts": 3}, {"contexts": [{}]}, {"contexts": reply()["contexts"] * 65},
     reply(*[tensor()] * (LIMITS.objects + 1)),
     {"contexts": reply(*[tensor()] * LIMITS.objects)["contexts"] * 2}],
)  # fmt: skip
def test_another_answer_than_objects_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        tensors.places(said, MEMORY)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("tensor"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["contexts", "objects", "kind", "handle", "address", "nbytes", "dtype",
                         "shape"]), inner, max_size=8),
    max_leaves=20,
))  # fmt: skip
def test_whatever_a_process_answers_it_is_a_place_inside_or_refused(value: Any) -> None:
    try:
        found = tensors.places({"contexts": value}, MEMORY)
    except ProtocolError:
        return
    assert all(0 <= p.address < MEMORY for p in found)


def test_a_tensor_is_copied_as_it_is(memory: int) -> None:
    weights = np.arange(32, dtype=np.float32).reshape(4, 8)
    os.pwrite(memory, weights.tobytes(), 4096)
    found = tensors.read(memory, MEMORY, place())
    np.testing.assert_array_equal(found, weights)
    os.pwrite(memory, bytes(128), 4096)
    np.testing.assert_array_equal(found, weights)


def test_reading_what_was_never_written_takes_no_memory(memory: int) -> None:
    shape = (MEMORY // 8 // 128, 128)
    assert not tensors.read(memory, MEMORY, place(address=0, dtype="float64", shape=shape)).any()
    assert os.fstat(memory).st_blocks == 0


def test_memory_that_is_not_as_large_as_it_must_be_is_refused(memory: int) -> None:
    for size in (MEMORY - 4096, MEMORY + 4096):
        with pytest.raises(ProtocolError):
            tensors.read(memory, size, place())
    with pytest.raises(ProtocolError):
        tensors.read(memory, MEMORY, place(address=MEMORY - 64))


def test_a_tensor_that_is_too_large_is_not_copied(memory: int) -> None:
    huge = place(shape=(LIMITS.watermark_tensor_bytes // 4 + 1,))
    with pytest.raises(CapacityError) as caught:
        tensors.read(memory, MEMORY, huge)
    assert caught.value.code == "watermark-size"
