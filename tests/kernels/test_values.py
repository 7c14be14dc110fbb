"""Values that people rely on: special numbers, ties, saturation, against results known by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from accelvisor.kernels.registry import BY_NAME

NAN, INF = math.nan, math.inf
TINY = 2.0**-149  # smallest denormal of float32


Outputs = list[tuple[tuple[int, ...], str]]


def run(name: str, *inputs: Any, outputs: Outputs, **attributes: Any) -> Any:
    """Both twins on ``inputs``; they must agree here, the fast result is returned."""
    instruction = BY_NAME[name]
    given = [np.ascontiguousarray(x) for x in inputs]
    values = tuple(attributes.get(a.name, a.default) for a in instruction.attributes)
    results = []
    for twin in ("fast", "reference"):
        outs = [np.full(shape, 77, dtype) for shape, dtype in outputs]
        source, target = iter(given), iter(outs)
        arrays = [
            next(source) if i in instruction.reads else next(target)
            for i in range(len(instruction.operands))
        ]
        if twin == "reference":
            instruction.run_reference(arrays, values)
        else:
            for tile in range(instruction.tiles([a.shape for a in arrays], values)):
                instruction.run_tile(arrays, values, tile)
        results.append(outs)
    for fast, reference in zip(*results, strict=True):
        np.testing.assert_allclose(fast, reference, rtol=1e-5, atol=1e-37)
    return results[0] if len(outputs) > 1 else results[0][0]


def unary(name: str, values: list[float], dtype: str = "float32", **attributes: Any) -> Any:
    x = np.array(values, dtype)
    return run(name, x, outputs=[(x.shape, dtype)], **attributes)


def binary(name: str, a: list[float], b: list[float], dtype: str = "float32") -> Any:
    x, y = np.array(a, dtype), np.array(b, dtype)
    return run(name, x, y, outputs=[(x.shape, dtype)])


def same(result: Any, wanted: list[float]) -> None:
    """Equal, NaN equal to NaN, and zeros of the same sign."""
    got = np.asarray(result, np.float64)
    expected = np.array(wanted, np.float64)
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


def test_relu_and_its_zeros() -> None:
    same(unary("relu", [-1, -0.0, 0.0, 2, NAN, INF, -INF, -TINY, TINY]),
         [0.0, 0.0, 0.0, 2, NAN, INF, 0.0, 0.0, TINY])  # fmt: skip


def test_relu_gradient_is_zero_at_zero_and_at_nan() -> None:
    same(binary("relu_backward", [5, 5, 5, NAN], [1, 0, NAN, 2]), [5, 0.0, 0.0, NAN])


def test_maximum_and_minimum_give_positive_zeros_and_pass_nan() -> None:
    a, b = [-0.0, 0.0, -0.0, NAN, 1, -INF], [0.0, -0.0, -0.0, 1, NAN, INF]
    same(binary("maximum", a, b), [0.0, 0.0, 0.0, NAN, NAN, INF])
    same(binary("minimum", a, b), [0.0, 0.0, 0.0, NAN, NAN, -INF])


def test_neg_and_abs_change_the_sign_bit_alone() -> None:
    same(unary("neg", [0.0, -0.0, INF, TINY, NAN]), [-0.0, 0.0, -INF, -TINY, NAN])
    same(unary("abs", [-0.0, -INF, -TINY, NAN]), [0.0, INF, TINY, NAN])


def test_division_follows_ieee_754() -> None:
    same(binary("div", [1, -1, 0, 1, INF, 1], [0.0, 0.0, 0.0, -0.0, INF, INF]),
         [INF, -INF, NAN, -INF, NAN, 0.0])  # fmt: skip


def test_denormals_are_not_flushed() -> None:
    same(binary("add", [TINY, 2.0**-126], [TINY, -(2.0**-127)]), [2 * TINY, 2.0**-127])
    same(binary("mul", [2.0**-100], [2.0**-40]), [2.0**-140])


def test_functions_at_their_edges() -> None:
    same(unary("exp", [-INF, 0.0, INF, NAN, 1000, -1000]), [0.0, 1, INF, NAN, INF, 0.0])
    same(unary("log", [0.0, -0.0, 1, INF, -1, NAN]), [-INF, -INF, 0.0, INF, NAN, NAN])
    same(unary("sqrt", [0.0, -0.0, 4, INF, -1, NAN]), [0.0, -0.0, 2, INF, NAN, NAN])
    same(unary("tanh", [-INF, -0.0, 0.0, INF, NAN]), [-1, -0.0, 0.0, 1, NAN])
    same(unary("sigmoid", [-INF, 0.0, INF, NAN, -1000, 1000]), [0.0, 0.5, 1, NAN, 0.0, 1])
    same(
        unary("gelu", [-INF, 0.0, INF, NAN, -(2.0**99), 2.0**99]),
        [-0.0, 0.0, INF, NAN, -0.0, 2.0**99],
    )


def test_integers_wrap() -> None:
    assert binary("add", [2**31 - 1], [1], "int32").tolist() == [-(2**31)]
    assert binary("mul", [2**62], [2], "int64").tolist() == [-(2**63)]
    x = np.full((3,), 2**31 - 1, np.int32)
    assert run("sum_all", x, outputs=[((), "int32")]).tolist() == 2**31 - 3


def test_comparisons_are_false_against_nan() -> None:
    a, b = np.array([1, NAN, 0.0], "f4"), np.array([1, NAN, -0.0], "f4")
    for name, wanted in (
        ("equal", [True, False, True]), ("less", [False] * 3), ("less_equal", [True, False, True]),
    ):  # fmt: skip
        assert run(name, a, b, outputs=[((3,), "bool")]).tolist() == wanted


CAST = [
    (3.99, "int32", 3), (-3.99, "int32", -3), (NAN, "int32", 0), (INF, "int32", 2**31 - 1),
    (-INF, "int64", -(2**63)), (1e30, "int64", 2**63 - 1), (2.0**63, "int64", 2**63 - 1),
    (-(2.0**63), "int64", -(2**63)), (2.0**64, "uint64", 2**64 - 1), (-5, "uint8", 0),
    (300, "uint8", 255), (128, "int8", 127), (-129, "int8", -128), (255.9, "uint8", 255),
    (-0.9, "uint8", 0), (0.3, "bool", True), (NAN, "bool", True), (-0.0, "bool", False),
    (65520.0, "float16", INF), (65519.0, "float16", 65504), (1e39, "float32", INF),
    (1 + 2.0**-11, "float16", 1), (1 + 3 * 2.0**-11, "float16", 1 + 2.0**-9),
]  # fmt: skip


@pytest.mark.parametrize(("value", "dtype", "wanted"), CAST)
def test_casts_saturate_truncate_and_round_to_even(value: float, dtype: str, wanted: Any) -> None:
    source = np.array([value], np.float64)
    assert run("cast", source, outputs=[((1,), dtype)])[0] == wanted
    filled = run("fill", outputs=[((2,), dtype)], value=value) if value == value else None
    assert filled is None or filled.tolist() == [wanted] * 2


def test_integer_casts_saturate_at_the_type_they_go_to() -> None:
    """Clipping to another type's range and then wrapping is the classic mistake."""
    wide = np.array([-(2**63), -129, -128, -1, 127, 128, 255, 256, 2**63 - 1])
    assert run("cast", wide, outputs=[((9,), "int8")]).tolist() == [
        -128, -128, -128, -1, 127, 127, 127, 127, 127,
    ]  # fmt: skip
    assert run("cast", wide, outputs=[((9,), "uint8")]).tolist() == [
        0, 0, 0, 0, 127, 128, 255, 255, 255,
    ]  # fmt: skip
    top = np.array([2**64 - 1, 2**63], np.uint64)
    assert run("cast", top, outputs=[((2,), "int64")]).tolist() == [2**63 - 1] * 2


def test_every_float16_survives_a_way_through_float32() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wide = run("cast", every, outputs=[(every.shape, "float32")])
    back = run("cast", wide, outputs=[(every.shape, "float16")])
    number = ~np.isnan(every)
    assert (back.view(np.uint16) == every.view(np.uint16))[number].all()


def test_every_tie_between_float16_neighbours_goes_to_even() -> None:
    every = np.arange(0, 0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (every[:-1] + every[1:]) / 2
    rounded = run("cast", ties, outputs=[(ties.shape, "float16")]).view(np.uint16)
    below = np.arange(0, 0x7BFE, dtype=np.uint16)
    assert (rounded == below + (below & 1)).all()


def test_argmax_takes_the_first_of_equals_and_the_first_nan() -> None:
    x = np.array([[1, 3, 3], [NAN, 5, NAN], [-INF, -INF, -INF], [0.0, -0.0, -1]], "f4")
    assert run("argmax_last", x, outputs=[((4,), "int64")]).tolist() == [1, 0, 0, 0]


def test_sums_of_nothing_are_zero() -> None:
    assert run("sum_last", np.zeros((2, 0), "f4"), outputs=[((2,), "float32")]).tolist() == [0, 0]
    assert run("sum_rows", np.zeros((0, 2), "f4"), outputs=[((2,), "float32")]).tolist() == [0, 0]
    assert run("sum_all", np.zeros((0,), "f4"), outputs=[((), "float32")]) == 0
    nothing = np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4")
    assert run("matmul", *nothing, outputs=[((2, 3), "float32")]).tolist() == [[0] * 3] * 2


def test_a_long_sum_keeps_its_small_terms() -> None:
    """A naive float32 loop is off by tens of percent here."""
    x = np.full((1 << 22,), 0.1, np.float32)
    wanted = float(Fraction(float(np.float32(0.1))) * (1 << 22))
    for name, shape, out in (
        ("sum_all", (1 << 22,), ()), ("sum_last", (1, 1 << 22), (1,)), ("sum_rows", (1 << 19, 8),
        (8,)),
    ):  # fmt: skip
        instruction = BY_NAME[name]
        result = np.empty(out, np.float32)
        instruction.run_tile([x.reshape(shape), result], (), 0)
        share = wanted / max(1, result.size)
        assert np.abs(result / share - 1).max() < 1e-5, name


def test_softmax_of_large_numbers_does_not_overflow() -> None:
    x = np.array([[1000, 1000, -1000], [-1e30, 0, -1e30], [5, 5, 5]], "f4")
    same(run("softmax", x, outputs=[((3, 3), "float32")])[:2], [[0.5, 0.5, 0.0], [0.0, 1, 0.0]])


def test_softmax_of_what_has_no_answer_is_nan_in_that_row_alone() -> None:
    x = np.array([[-INF, -INF], [INF, 0], [NAN, 0], [0, -INF]], "f4")
    got = run("softmax", x, outputs=[((4, 2), "float32")])
    assert np.isnan(got[:3]).all()
    assert got[3].tolist() == [1, 0]


def test_cross_entropy_by_hand() -> None:
    logits = np.array([[0, 0], [2, 0]], "f4")
    loss, grad = run(
        "softmax_cross_entropy", logits, np.array([0, 1]),
        outputs=[((2,), "float32"), ((2, 2), "float32")], scale=0.5,
    )  # fmt: skip
    p = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(loss, [math.log(2), -math.log(1 - p)], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-0.25, 0.25], [p / 2, -p / 2]], rtol=1e-6)


def test_convolution_by_hand() -> None:
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    w = np.array([[[[1, 2], [3, 4]]]], np.float32)
    got = run("conv2d", x, w, outputs=[((1, 1, 2, 2), "float32")])
    assert got.ravel().tolist() == [27, 37, 57, 67]
    padded = run("conv2d", x, w, outputs=[((1, 1, 2, 2), "float32")], stride=2, pad=1)
    assert padded.ravel().tolist() == [0, 11, 30, 67]


def test_the_pool_gradient_goes_to_the_first_greatest() -> None:
    x = np.array([[[[1, 1], [1, 1]]]], np.float32)
    dy = np.array([[[[7]]]], np.float32)
    got = run("maxpool2d_backward", x, dy, outputs=[((1, 1, 2, 2), "float32")])
    assert got.ravel().tolist() == [7, 0, 0, 0]


def test_rows_are_gathered_in_the_order_of_the_indices() -> None:
    x = np.arange(6, dtype=np.int16).reshape(3, 2)
    got = run("gather_rows", x, np.array([2, 0, 2]), outputs=[((3, 2), "int16")])
    assert got.tolist() == [[4, 5], [0, 1], [4, 5]]


def test_a_scalar_beyond_float32_becomes_infinity() -> None:
    same(unary("mul_scalar", [1, -1, 0.0], b=1e300), [INF, -INF, NAN])
    same(unary("mul_scalar", [1, -1], "float64", b=1e300), [1e300, -1e300])


def test_the_product_of_a_matrix_with_itself_transposed_is_a_plain_product() -> None:
    """numpy has a short cut for it whose bits differ; the device must not depend on addresses."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((65, 70), dtype=np.float32)
    instruction = BY_NAME["matmul_nt"]
    one, two = np.empty((65, 65), np.float32), np.empty((65, 65), np.float32)
    instruction.run_tile([a, a, one], (), 0)
    instruction.run_tile([a, a.copy(), two], (), 0)
    assert one.tobytes() == two.tobytes()
