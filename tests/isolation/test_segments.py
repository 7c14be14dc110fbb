"""The segment table: against the plainest possible twin, a dictionary from page to page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ConfigError
from accelvisor.isolation.resources import Range
from accelvisor.isolation.segments import Segment, SegmentTable, Unmapped, checked, lay
from accelvisor.limits import LIMITS

PAGE = 4096


@st.composite
def ranges(draw: st.DrawFn) -> list[Range]:
    """Disjoint pieces of banks, in any order."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=LIMITS.segments))
    at = 0
    found = []
    for size in sizes:
        at += draw(st.integers(0, 2))
        found.append(Range(draw(st.integers(0, 3)), at * PAGE, size * PAGE))
        at += size
    return draw(st.permutations(found))


AROUND = st.integers(-PAGE, 90 * PAGE) | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**64)])


@given(ranges(), AROUND, AROUND)
def test_an_access_is_allowed_exactly_where_the_twin_has_every_byte(
    pieces: list[Range], address: int, nbytes: int
) -> None:
    table = SegmentTable(checked(lay(pieces), "test"), 3)
    twin = [
        (piece.bank, piece.start + at) for piece in pieces for at in range(0, piece.nbytes, PAGE)
    ]
    end = len(twin) * PAGE
    inside = address >= 0 and nbytes >= 0 and address + nbytes <= end
    if not inside:
        with pytest.raises(Unmapped):
            table.check(address, nbytes, 3)
        return
    table.check(address, nbytes, 3)
    touched = []
    for piece in table.translate(address, nbytes):
        touched += [(piece.bank, at // PAGE * PAGE) for at in (piece.start, piece.end - 1)]
        assert piece.nbytes > 0
    assert sum(piece.nbytes for piece in table.translate(address, nbytes)) == nbytes
    wanted = twin[address // PAGE : (address + nbytes + PAGE - 1) // PAGE] if nbytes else []
    assert set(touched) <= set(wanted)
    if wanted:
        assert (touched[0], touched[-1]) == (wanted[0], wanted[-1])


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_another_epoch_may_touch_nothing(epoch: int, other: int) -> None:
    table = SegmentTable((Segment(0, PAGE, 0, 0),), epoch)
    if epoch == other:
        table.check(0, PAGE, other)
    else:
        with pytest.raises(Unmapped, match="epoch"):
            table.check(0, 0, other)


def test_a_function_without_memory_may_touch_nothing() -> None:
    table = SegmentTable((), 1)
    table.check(0, 0, 1)
    with pytest.raises(Unmapped):
        table.check(0, 1, 1)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, PAGE, n, 0) for n in range(LIMITS.segments + 1)],
        [Segment(PAGE, PAGE, 0, 0)],
        [Segment(0, PAGE, 0, 0), Segment(2 * PAGE, PAGE, 1, 0)],
        [Segment(0, 2 * PAGE, 0, 0), Segment(PAGE, PAGE, 1, 0)],
        [Segment(0, 0, 0, 0)],
        [Segment(0, -PAGE, 0, 0)],
        [Segment(0, PAGE, -1, 0)],
        [Segment(0, PAGE, 0, -PAGE)],
        [Segment(0, 100, 0, 0)],
        [Segment(0, PAGE, 0, 100)],
        [Segment(0, PAGE, 0, 0), Segment(PAGE, PAGE, 0, 0)],
        [Segment(0, 2 * PAGE, 0, 0), Segment(2 * PAGE, PAGE, 0, PAGE)],
        [Segment(0, LIMITS.memory_bytes + PAGE, 0, 0)],
    ],
)
def test_what_is_no_table_is_refused(segments: list[Segment]) -> None:
    if len(segments) > LIMITS.segments:
        segments = list(lay(Range(n, 0, PAGE) for n in range(len(segments))))
    with pytest.raises(ConfigError) as caught:
        checked(segments, "test")
    assert caught.value.code == "segments-invalid"
