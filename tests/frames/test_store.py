"""Which checkpoints may go: generated histories against what must hold at every moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accelvisor.frames.store import Entry, surplus


def entry(number: int, function: str = "f", parent: int | None = None, **more: object) -> Entry:
    return Entry(
        name=f"{number:03}",
        function=function,
        digest=number.to_bytes(32, "big"),
        parent=b"" if parent is None else parent.to_bytes(32, "big"),
        created_ns=int(str(more.get("created", number))),
        size=1,
        pinned=bool(more.get("pinned")),
    )


def names(entries: list[Entry], keep: int) -> list[str]:
    return [found.name for found in surplus(entries, keep)]


def test_keeps_the_newest_of_each_function() -> None:
    entries = [entry(i, "ab"[i % 2]) for i in range(6)]
    assert names(entries, 2) == ["000", "001"]
    assert names(entries, 3) == []


def test_parent_of_a_kept_one_stays_however_old() -> None:
    entries = [entry(0), entry(1, parent=0), entry(2), entry(3, parent=1)]
    assert names(entries, 1) == ["002"]


def test_child_goes_before_its_parent() -> None:
    entries = [entry(0), entry(1, parent=0), entry(2, parent=1), entry(3)]
    assert names(entries, 1) == ["002", "001", "000"]


def test_pinned_stays_and_does_not_count() -> None:
    entries = [entry(0, pinned=True), entry(1), entry(2), entry(3, pinned=True)]
    assert names(entries, 1) == ["001"]


def test_parent_that_is_elsewhere_does_not_matter() -> None:
    assert names([entry(5, parent=99), entry(6)], 1) == ["005"]


histories = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.booleans(), st.integers(0, 50)),
    max_size=25,
)


@given(histories, st.integers(0, 4))
def test_at_no_moment_is_a_kept_one_without_its_parent(
    rows: list[tuple[str, int, bool, int]], keep: int
) -> None:
    entries = []
    for number, (function, back, pinned, created) in enumerate(rows):
        parent = number - back if 0 < back <= number else None
        entries.append(entry(number, function, parent, pinned=pinned, created=created))
    left = list(entries)
    going = surplus(entries, keep)
    assert len(set(going)) == len(going)
    for found in going:
        left.remove(found)
        assert not any(other.parent == found.digest for other in left)
        assert not found.pinned
    for function in "ab":
        before = sorted(
            (e for e in entries if e.function == function and not e.pinned),
            key=lambda e: (e.created_ns, e.name),
            reverse=True,
        )
        assert set(before[:keep]) <= set(left)
