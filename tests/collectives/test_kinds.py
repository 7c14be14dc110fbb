"""Arithmetic of all element types against Python's own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from accelvisor.collectives import kinds, reference
from accelvisor.collectives.kinds import BY_NAME, KINDS, Kind, Op
from accelvisor.errors import UsageError

from .cases import values

EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


@EVERY
@pytest.mark.parametrize("op", Op)
def test_a_reduction_of_two_is_the_plain_one(kind: Kind, op: Op) -> None:
    a, b = values(kind, 3000, "dense", 1), values(kind, 3000, "half", 2)
    a[:100] = b[:100]
    out = np.empty_like(a)
    kinds.combine(kind, op, a, b, out)
    kinds.finish(kind, op, out)
    assert out.tobytes() == reference.combine(kind, op, a, b).tobytes()


@EVERY
@pytest.mark.parametrize("op", Op)
def test_a_reduction_of_one_is_the_plain_one(kind: Kind, op: Op) -> None:
    out = values(kind, 3000, "dense", 3)
    wanted = reference.finish(kind, op, out)
    kinds.finish(kind, op, out)
    assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_value_plus_awkward_ones(name: str) -> None:
    kind = BY_NAME[name]
    a = np.arange(1 << 16, dtype=np.uint16).view(kind.storage)
    one = 0x3C00 if name == "float16" else 0x3F80
    for bits in (one, one + 1, 1, 0x0080, 0x8000 | one, kind.infinity - 1):
        b = np.full(1 << 16, bits, np.uint16).view(kind.storage)
        out = np.empty_like(a)
        kinds.combine(kind, Op.SUM, a, b, out)
        kinds.finish(kind, Op.SUM, out)
        assert out.tobytes() == reference.combine(kind, Op.SUM, a, b).tobytes()


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    """By the lower half's distance to both neighbours, for all upper halves."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        out = np.empty(x.size, np.uint16)
        kinds.float32_to_bfloat16(x, out)
        high = (upper >> 16).astype(np.int64)
        up = (lower > 0x8000) | ((lower == 0x8000) & (high & 1 == 1))
        wanted = np.where(np.isnan(x), 0x7FC0, high + up)
        assert np.array_equal(out, wanted)


def test_the_lowest_integer_has_the_highest_magnitude() -> None:
    kind = BY_NAME["int8"]
    out = np.empty(2, np.int8)
    kinds.combine(kind, Op.ABSMAX, np.array([-128, 3], "i1"), np.array([0, -5], "i1"), out)
    assert out.tolist() == [127, 5]


def test_types_and_operators_that_are_none() -> None:
    with pytest.raises(UsageError, match="complex64"):
        kinds.kind_of(np.zeros(1, np.complex64))
    with pytest.raises(UsageError, match="does not hold"):
        kinds.kind_of(np.zeros(1, np.float32), "bfloat16")
    with pytest.raises(UsageError, match="'avg'"):
        kinds.op_of("avg")
    assert kinds.kind_of(np.zeros(1, np.uint16), "bfloat16").is_float
