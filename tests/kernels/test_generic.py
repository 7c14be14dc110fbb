"""What every instruction must do, tried on cases made from its declaration."""

from __future__ import annotations

import random

import numpy as np
import pytest

from accelvisor.errors import NumericError
from accelvisor.kernels import conv, declare, linear, reduce
from accelvisor.kernels.declare import Array, Instruction
from accelvisor.kernels.registry import INSTRUCTIONS

from .generate import Case, cases

EVERY = pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=lambda i: i.name)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut so finely that small shapes have many tiles."""
    monkeypatch.setattr(declare, "FLAT_STEP", 6)
    monkeypatch.setattr(linear, "PANEL", 2)
    monkeypatch.setattr(linear, "TILE_MACS", 24)
    monkeypatch.setattr(linear, "NARROW_MACS", 8)
    monkeypatch.setattr(linear, "TILE_ELEMENTS", 30)
    monkeypatch.setattr(conv, "COLUMN_ELEMENTS", 48)
    monkeypatch.setattr(conv, "TILE_MACS", 200)
    monkeypatch.setattr(reduce, "_BLOCK", 3)


def run_fast(case: Case, arrays: list[Array], order: list[int] | None = None) -> list[Array]:
    tiles = case.instruction.tiles(case.shapes, case.values)
    for tile in range(tiles) if order is None else order:
        case.instruction.run_tile(arrays, case.values, tile)
    return case.outputs(arrays)


def run_reference(case: Case, arrays: list[Array]) -> list[Array]:
    case.instruction.run_reference(arrays, case.values)
    return case.outputs(arrays)


def bits(array: Array) -> bytes:
    """The bytes, every NaN made the same (IEEE 754 leaves its payload open)."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.tobytes()


def assert_close(case: Case, got: list[Array], wanted: list[Array], inputs: list[Array]) -> None:
    """``got`` is within the declared bound of ``wanted``."""
    bound = case.instruction.bound
    scales = [np.abs(w) for w in wanted]
    factor = float(bound.ulps)
    with np.errstate(all="ignore"):
        if bound.scale:
            scales = bound.scale.magnitude(inputs, case.values)
            factor *= bound.scale.roundings(case.shapes, case.values)
    for result, reference, scale in zip(got, wanted, scales, strict=True):
        if bound.ulps == 0 or result.dtype.kind != "f":
            assert bits(result) == bits(reference), (case.shapes, case.named, case.kind)
            continue
        limits = np.finfo(result.dtype)
        # beyond this a partial sum may overflow in one order and not in the other
        safe = ~(scale > float(limits.max) / 4) | np.isinf(reference)
        if case.kind == "huge":
            safe &= scale < float(limits.max) / 4 / max(1.0, factor)
        nan, infinite = np.isnan(reference), np.isinf(reference)
        assert np.array_equal(np.isnan(result) & safe, nan & safe), (case.shapes, case.named)
        assert np.array_equal(result[infinite & safe], reference[infinite & safe])
        normal = ~nan & ~infinite & safe & np.isfinite(scale)
        error = np.abs(result[normal].astype(np.float64) - reference[normal])
        size = np.maximum(scale[normal], np.abs(reference[normal]).astype(np.float64))
        tolerance = factor * float(limits.eps) * size + 4 * float(limits.tiny)
        worst = np.max(error / tolerance, initial=0.0)
        assert worst <= 1, f"{worst:.3g} of the bound, {case.shapes} {case.named} {case.kind}"


@EVERY
def test_fast_agrees_with_the_reference(instruction: Instruction) -> None:
    for case in cases(instruction, 40):
        arrays, wanted = case.fresh(), case.fresh(poison=0x5A)
        case.instruction.run_reference(wanted, case.values)
        assert_close(case, run_fast(case, arrays), case.outputs(wanted), arrays)


@EVERY
@pytest.mark.usefixtures("small_tiles")
def test_fast_agrees_with_the_reference_in_many_tiles(instruction: Instruction) -> None:
    for case in cases(instruction, 40, seed=1):
        arrays, wanted = case.fresh(), case.fresh(poison=0x5A)
        case.instruction.run_reference(wanted, case.values)
        assert_close(case, run_fast(case, arrays), case.outputs(wanted), arrays)


@EVERY
@pytest.mark.usefixtures("small_tiles")
def test_tiles_in_any_order_and_repeated_give_the_same_bits(instruction: Instruction) -> None:
    for case in cases(instruction, 15, seed=2):
        tiles = list(range(instruction.tiles(case.shapes, case.values)))
        wanted = [bits(out) for out in run_fast(case, case.fresh())]
        shuffled = tiles + tiles
        random.Random(0).shuffle(shuffled)
        again = run_fast(case, case.fresh(poison=0x5A), shuffled)
        assert [bits(out) for out in again] == wanted


@EVERY
@pytest.mark.usefixtures("small_tiles")
def test_each_byte_of_an_output_is_written_by_exactly_one_tile(instruction: Instruction) -> None:
    most = 0
    for case in cases(instruction, 15, seed=3):
        tiles = instruction.tiles(case.shapes, case.values)
        most = max(most, tiles)
        counts = [np.zeros(case.arrays[i].nbytes, int) for i in instruction.writes]
        for tile in range(tiles):
            first = run_fast(case, case.fresh(poison=0x00), [tile])
            second = run_fast(case, case.fresh(poison=0xFF), [tile])
            for count, a, b in zip(counts, first, second, strict=True):
                count += a.reshape(-1).view(np.uint8) == b.reshape(-1).view(np.uint8)
        assert all((count == 1).all() for count in counts), (case.shapes, case.named)
    assert most > 1 or instruction.name.endswith("_all"), "no case here has more than one tile"


@EVERY
def test_bits_do_not_depend_on_where_the_arrays_lie(instruction: Instruction) -> None:
    for case in cases(instruction, 12, seed=4):
        wanted = [bits(out) for out in run_fast(case, case.fresh())]
        for shift in (1, 3):
            moved = run_fast(case, case.fresh(shift=shift))
            assert [bits(out) for out in moved] == wanted


@EVERY
def test_bits_do_not_depend_on_whether_operands_share_memory(instruction: Instruction) -> None:
    for case in cases(instruction, 12, seed=5):
        arrays = case.fresh(writable=True)
        shared = list(arrays)
        for i in instruction.reads:
            for j in instruction.reads:
                same = arrays[i].shape == arrays[j].shape and arrays[i].dtype == arrays[j].dtype
                if i < j and same and not instruction.operands[j].below:
                    arrays[j][...] = arrays[i]
                    shared[j] = shared[i]
        wanted = [bits(out.copy()) for out in run_fast(case, arrays)]
        assert [bits(out) for out in run_fast(case, shared)] == wanted


@EVERY
def test_twenty_repeats_give_one_bit_pattern(instruction: Instruction) -> None:
    (case,) = cases(instruction, 1, seed=6)
    seen = {tuple(bits(out) for out in run_fast(case, case.fresh(poison=p))) for p in range(20)}
    assert len(seen) == 1


@EVERY
def test_the_model_clock_gives_positive_integers(instruction: Instruction) -> None:
    for case in cases(instruction, 10, seed=7):
        cost = instruction.cost(case.shapes, case.values)
        assert all(isinstance(number, int) for number in cost)
        assert cost.cycles > 0
        assert cost.bytes_read >= 0
        assert cost.bytes_written >= 0


INDEXED = [i for i in INSTRUCTIONS.values() if any(o.below for o in i.operands)]


@pytest.mark.parametrize("instruction", INDEXED, ids=lambda i: i.name)
@pytest.mark.parametrize("twin", ["fast", "reference"])
@pytest.mark.parametrize("bad", [-1, 2**31 - 1, -(2**31)])
def test_an_index_out_of_range_is_a_fault(instruction: Instruction, twin: str, bad: int) -> None:
    for case in cases(instruction, 6, seed=8, n=4, m=5, classes=4):
        arrays = case.fresh(writable=True)
        for operand, array in zip(instruction.operands, arrays, strict=True):
            if operand.below:
                array[-1] = bad
        if any(out.size == 0 for out in case.outputs(arrays)):
            continue
        run = run_fast if twin == "fast" else run_reference
        with pytest.raises(NumericError, match=str(bad)):
            run(case, arrays)
