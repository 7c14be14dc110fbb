"""The cut of a card by its properties, and the life of a static card derived another way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.abi.registers import PAGE
from accelvisor.errors import ConflictError, UsageError
from accelvisor.isolation.resources import Card, violations
from accelvisor.isolation.static import (
    NUMBERS,
    TABLE,
    Event,
    Part,
    Refused,
    State,
    Table,
    allowed,
    move,
    partition,
)
from accelvisor.limits import LIMITS, MIB

CARD = Card("card0", 4, 4, 256 * MIB, 4, queues=64, functions=16)

GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))


def in_grid(grid: tuple[int, int, int], **fields: Any) -> Card:
    boards, rows, columns = grid
    return Card("card0", boards * rows * columns, boards=boards, rows=rows, **fields)


cards = st.builds(
    in_grid,
    GRIDS.filter(lambda grid: grid[0] * grid[1] * grid[2] <= 9),
    cores_per_chip=st.integers(1, 9),
    memory_bytes=st.integers(0, 200 * PAGE),
    banks=st.integers(1, 9),
    queues=st.integers(1, 2000),
    functions=st.integers(1, 40),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    card = draw(cards.filter(allowed))
    return partition(card, draw(st.sampled_from(allowed(card))))


def cores(part: Part) -> list[tuple[int, int]]:
    return [
        (chip, core)
        for chip, spans in part.cores.items()
        for span in spans
        for core in range(span.first, span.end)
    ]


def pages(part: Part) -> list[int]:
    """Page numbers of the card, the banks being laid one after the other, far apart."""
    return [
        item.bank * 1_000_000 + page
        for item in part.ranges
        for page in range(item.start // PAGE, item.end // PAGE)
    ]


def numbered(kind: str) -> Callable[[Part], list[int]]:
    def all_of(part: Part) -> list[int]:
        span = getattr(part, kind)
        return list(range(span.first, span.end))

    return all_of


def totals(card: Card) -> list[tuple[Callable[[Part], list[Any]], list[Any]]]:
    """For each kind of resource: how to list a part's, and all that the card has, in order."""
    bank = card.memory_bytes // card.banks // PAGE
    return [
        (cores, list(product(range(card.chips), range(card.cores_per_chip)))),
        (pages, [b * 1_000_000 + page for b in range(card.banks) for page in range(bank)]),
        (numbered("queues"), list(range(card.queues))),
        (numbered("vectors"), list(range(card.functions))),
    ]


@given(tables())
def test_parts_and_remainder_are_all_of_the_card_and_nothing_twice(table: Table) -> None:
    for listed, everything in totals(table.card):
        found = [item for part in (*table.parts, table.remainder) for item in listed(part)]
        assert sorted(found) == everything


@given(tables())
def test_shares_are_equal_contiguous_and_not_empty(table: Table) -> None:
    assert len(table.parts) == table.number
    for listed, everything in totals(table.card):
        shares = [listed(part) for part in table.parts]
        assert len({len(share) for share in shares}) == 1
        for share in shares:
            first = everything.index(share[0])
            assert share == everything[first : first + len(share)]
        assert shares == sorted(shares)


@given(tables())
def test_a_part_has_whole_chips_or_lies_within_one(table: Table) -> None:
    for part in table.parts:
        whole = all(
            len([core for at, core in cores(part) if at == chip]) == table.card.cores_per_chip
            for chip in part.cores
        )
        assert whole or len(part.cores) == 1


@given(tables())
def test_no_larger_share_would_have_fitted(table: Table) -> None:
    """Cores by trying: one more core, or one more chip, for each part does not fit."""
    card, part = table.card, table.parts[0]
    if len(part.cores) > 1 or part.core_count == card.cores_per_chip:
        assert (len(part.cores) + 1) * table.number > card.chips
    else:
        assert card.cores_per_chip // (part.core_count + 1) * card.chips < table.number
    whole = card.banks * (card.memory_bytes // card.banks // PAGE)
    assert whole - table.number * len(pages(part)) < table.number
    assert part.queues.count == min(64, card.queues // table.number)


@given(tables())
def test_placements_are_a_valid_partition_of_the_card(table: Table) -> None:
    held = {str(index): table.placement(index) for index in range(table.number)}
    assert violations([table.card], held) == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        assert type(value) in (int, str)
        yield path


@given(tables(), st.data())
def test_any_other_number_gives_another_digest(table: Table, data: st.DataObject) -> None:
    """Each number of the table's own objects, not of the document: nothing was left out of it."""
    document = json.loads(json.dumps(table.document()))
    assert document == table.document()
    # Counted by hand from the objects: nine facts of the card, format, number, and each part's.
    each = [
        3 * sum(map(len, part.cores.values())) + 3 * len(part.ranges) + 4 + len(part.links)
        for part in (*table.parts, table.remainder)
    ]
    assert len(list(leaves(document))) == 11 + sum(each)
    index = data.draw(st.integers(0, table.number - 1))
    part = table.parts[index]
    chip = next(iter(part.cores))
    span, piece = part.cores[chip][0], part.ranges[0]
    changed = [
        dataclasses.replace(part, cores={**part.cores, chip: (dataclasses.replace(span, **item),)})
        for item in ({"first": span.first + 1}, {"count": span.count + 1})
    ]
    changed += [
        dataclasses.replace(part, ranges=(dataclasses.replace(piece, **item), *part.ranges[1:]))
        for item in (
            {"bank": piece.bank + 1},
            {"start": piece.start + PAGE},
            {"nbytes": piece.nbytes + PAGE},
        )
    ]
    for kind in ("queues", "vectors"):
        at = getattr(part, kind)
        changed += [
            dataclasses.replace(part, **{kind: dataclasses.replace(at, **item)})
            for item in ({"first": at.first + 1}, {"count": at.count + 1})
        ]
    changed.append(dataclasses.replace(part, links=(*part.links, 99)))
    digests = {table.digest()}
    for other in changed:
        parts = (*table.parts[:index], other, *table.parts[index + 1 :])
        digests.add(dataclasses.replace(table, parts=parts).digest())
        digests.add(dataclasses.replace(table, remainder=other).digest())
    assert len(digests) == 1 + 2 * len(changed)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "card1"},
        {"chips": 5},
        {"cores_per_chip": 5},
        {"memory_bytes": 256 * MIB + 1},
        {"banks": 5},
        {"queues": 65},
        {"functions": 17},
        {"boards": 2},
        {"rows": 2},
    ],
)
def test_any_other_card_gives_another_digest(change: dict[str, Any]) -> None:
    table = partition(CARD, 4)
    other = dataclasses.replace(table, card=dataclasses.replace(CARD, **change))
    assert other.digest() != table.digest()


def test_the_digest_is_the_same_on_every_host_and_day() -> None:
    """A signature over it must hold for years: a change of the form is a new format number."""
    assert partition(CARD, 4).digest(1) == (
        "2c34f47e09b7d1105339cdbd94724c8ab16c6a0bb9ecbe0d930c38fc37d8f923"
    )
    assert partition(CARD, 4).digest() == (
        "50fd487e6560fe7938d43254b7ba533cc481f951e8b0cd0aa362cace32ba3c74"
    )


@given(tables())
def test_a_link_is_of_the_part_that_has_both_its_chips(table: Table) -> None:
    """Asked of each chip who has it, and each link once."""
    owner = {chip: n for n, part in enumerate(table.parts) for chip in part.cores}
    shared = {chip for chip in owner if sum(chip in part.cores for part in table.parts) > 1}
    for number, (one, other) in enumerate(table.card.links):
        has = [n for n, part in enumerate(table.parts) if number in part.links]
        alone = {one, other}.isdisjoint(shared) and one in owner
        assert has == ([owner[one]] if alone and owner[one] == owner.get(other) else [])
        assert (number in table.remainder.links) == (not has)


def test_a_card_with_a_chip_switched_off_is_not_cut() -> None:
    off = dataclasses.replace(CARD, disabled=frozenset({2}))
    assert allowed(off) == ()
    with pytest.raises(UsageError, match="its chip 2 is disabled"):
        partition(off, 2)


def test_a_table_that_was_signed_before_cards_were_grids_has_no_grid() -> None:
    assert "boards" not in partition(CARD, 4).document(1)["card"]
    other = dataclasses.replace(CARD, rows=2)
    assert partition(other, 4).digest(1) != partition(CARD, 4).digest(1)


def test_a_card_that_divides_leaves_nothing() -> None:
    table = partition(CARD, 8)
    assert not table.remainder.core_count
    assert not table.remainder.memory_bytes
    assert table.parts[1].cores.keys() == {0}
    assert cores(table.parts[3]) == [(1, 2), (1, 3)]
    assert [(item.bank, item.start, item.nbytes) for item in table.parts[3].ranges] == [
        (1, 32 * MIB, 32 * MIB)
    ]
    assert list(numbered("queues")(table.parts[3])) == list(range(24, 32))


def test_three_chips_for_two_functions_leave_one_to_the_pf() -> None:
    table = partition(dataclasses.replace(CARD, chips=3), 2)
    assert [sorted(part.cores) for part in (*table.parts, table.remainder)] == [[0], [1], [2]]


def test_no_part_has_pieces_of_two_chips() -> None:
    """Three chips of four cores for four functions: three cores each would need that."""
    table = partition(dataclasses.replace(CARD, chips=3), 4)
    assert [cores(part) for part in table.parts] == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(1, 0), (1, 1)],
        [(1, 2), (1, 3)],
    ]
    assert sorted(table.remainder.cores) == [2]


def test_queues_are_capped_at_what_a_function_can_have() -> None:
    table = partition(dataclasses.replace(CARD, queues=1024), 2)
    assert table.parts[0].queues.count == LIMITS.queues
    assert table.remainder.queues.count == 1024 - 2 * LIMITS.queues


@pytest.mark.parametrize(
    ("card", "number"),
    [
        (CARD, 0),
        (CARD, 3),
        (CARD, -1),
        (CARD, 32),
        (dataclasses.replace(CARD, functions=4), 8),
        (dataclasses.replace(CARD, chips=1, cores_per_chip=4), 8),
        (dataclasses.replace(CARD, chips=3, cores_per_chip=1), 4),
        (dataclasses.replace(CARD, chips=9, cores_per_chip=1), 16),
        (dataclasses.replace(CARD, memory_bytes=15 * PAGE, banks=1), 16),
        (dataclasses.replace(CARD, queues=7), 8),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_those_that_can(card: Card, number: int) -> None:
    with pytest.raises(UsageError) as caught:
        partition(card, number)
    assert caught.value.code == "functions-count"
    assert caught.value.where == "card:card0"
    for other in NUMBERS:
        assert (str(other) in caught.value.hint.replace(",", "").split()) == (
            other in allowed(card)
        )


def test_a_card_too_small_for_any_number_says_so() -> None:
    with pytest.raises(UsageError) as caught:
        partition(dataclasses.replace(CARD, memory_bytes=100), 1)
    assert "too small" in caught.value.hint


# --- the life of a static card ------------------------------------------------------------------

#: The life is a ring, and each event that does not set a number names a place on it.
RING = [State.DISABLED, State.ENABLING, State.ENABLED, State.DISABLING]
PLACE = {Event.DISABLED: 0, Event.ENABLE: 1, Event.ENABLED: 2, Event.DISABLE: 3}


def derived(at: int, event: Event) -> int | str:
    """Where the ring's rules lead from its place ``at``, or the code of the refusal."""
    under_way = at % 2 == 1
    if event is Event.SET_NUMBER:
        return at if at == 0 else "card-enabled"
    if event is Event.FAILED:
        # Back where it came from on the way up, which nobody was told of; stay on the way down.
        return {1: 0, 3: 3}.get(at, "card-not-changing")
    there = PLACE[event]
    asked = there % 2 == 1
    if (there - at) % 4 == 1 or there == at:
        return there
    if asked:
        # Whoever asks for what is already so gets it.
        return "card-changing" if under_way else at
    return "card-not-changing"


def test_the_table_is_what_the_ring_says() -> None:
    assert set(TABLE) == set(product(State, Event))
    for (state, event), answer in TABLE.items():
        expected = derived(RING.index(state), event)
        found = answer.code if isinstance(answer, Refused) else RING.index(answer)
        assert found == expected, (state, event)


def reachable(start: State, without: State) -> set[State]:
    seen, edge = {start}, [start]
    while edge:
        state = edge.pop()
        for event in Event:
            target = TABLE[state, event]
            if isinstance(target, State) and target not in seen | {without}:
                seen.add(target)
                edge.append(target)
    return seen


def test_an_enabled_card_is_scrubbed_before_it_can_be_cut_again() -> None:
    assert reachable(State.ENABLED, State.DISABLING) == {State.ENABLED}
    for state in State:
        if not isinstance(TABLE[state, Event.SET_NUMBER], Refused):
            assert state is State.DISABLED


def test_whoever_finds_a_journal_state_can_end_it_by_failing_or_trying_again() -> None:
    assert TABLE[State.ENABLING, Event.FAILED] is State.DISABLED
    assert TABLE[State.DISABLING, Event.FAILED] is State.DISABLING
    assert TABLE[State.DISABLING, Event.DISABLED] is State.DISABLED


def test_nothing_changes_a_card_that_has_functions_but_what_is_under_way() -> None:
    for state, event in product(State, Event):
        try:
            with_functions: State | str = move(state, event, "card0", 1)
        except ConflictError as error:
            with_functions = error.code
        try:
            without: State | str = move(state, event, "card0", 0)
        except ConflictError as error:
            without = error.code
        begins = isinstance(without, State) and without is not state
        if begins and event in (Event.ENABLE, Event.DISABLE):
            assert with_functions == "card-in-use"
        else:
            assert with_functions == without


def test_a_refusal_is_an_error_with_its_code_and_the_cards_name() -> None:
    with pytest.raises(ConflictError) as caught:
        move(State.ENABLED, Event.SET_NUMBER, "mine", 0)
    assert caught.value.code == "card-enabled"
    assert "mine" in caught.value.message
    assert caught.value.where == "card:mine"
    assert caught.value.hint
