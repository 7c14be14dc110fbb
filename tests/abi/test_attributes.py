"""Attributes: ranges, and their raw form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.attributes import FLOAT, INT, Attribute, from_description, pack, unpack
from accelvisor.errors import ProgramError

STRIDE = Attribute("stride", INT, 1, 1, 8)
RATE = Attribute("rate", FLOAT, 0.01)
BOTH = (STRIDE, RATE)


@given(stride=st.integers(1, 8), rate=st.floats(allow_nan=False))
def test_values_survive_their_raw_form_bit_for_bit(stride: int, rate: float) -> None:
    values = unpack(BOTH, pack(BOTH, {"stride": stride, "rate": rate}))
    assert values == (stride, rate)
    assert math.copysign(1, values[1]) == math.copysign(1, rate)


@given(raw=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)))
def test_any_bits_unpack_to_values_in_range_or_a_program_error(raw: tuple[int, int]) -> None:
    try:
        stride, rate = unpack(BOTH, raw)
    except ProgramError:
        return
    assert 1 <= stride <= 8
    assert rate == rate


def test_missing_values_take_their_defaults() -> None:
    assert unpack(BOTH, pack(BOTH, {})) == (1, 0.01)


def test_negative_integers_are_twos_complement() -> None:
    wide = (Attribute("a", INT, 0, -5, 5),)
    assert pack(wide, {"a": -1}) == (2**64 - 1,)
    assert unpack(wide, (2**64 - 1,)) == (-1,)


@pytest.mark.parametrize("bad", [0, 9, 2**63, -(2**63) - 1, 1.5, math.nan, math.inf])
def test_an_integer_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ProgramError, match="stride"):
        pack(BOTH, {"stride": bad})


def test_nan_and_what_no_float_holds_are_refused() -> None:
    for bad in (math.nan, 10**400):
        with pytest.raises(ProgramError, match="rate"):
            pack(BOTH, {"rate": bad})


def test_an_open_float_takes_infinity_and_a_limited_one_does_not() -> None:
    pack(BOTH, {"rate": math.inf})
    with pytest.raises(ProgramError, match=r"must be float from 0\.0 to 1\.0"):
        pack((Attribute("p", FLOAT, 0.5, 0.0, 1.0),), {"p": math.inf})


def test_a_wrong_number_or_an_unknown_name_is_refused() -> None:
    with pytest.raises(ProgramError, match="1 attributes, must be 2"):
        unpack(BOTH, (1,))
    with pytest.raises(ProgramError, match="no attribute 'padd'"):
        pack(BOTH, {"padd": 1})


def test_the_description_describes_the_attribute() -> None:
    assert [from_description(a.describe()) for a in BOTH] == list(BOTH)
