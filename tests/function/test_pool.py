"""Cores: tiles side by side, in any order, each exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelvisor.function.pool import Pool


class Tiles:
    """An operation whose tiles do what the test says."""

    def __init__(self, tiles: int, body: Callable[[int], None] = lambda tile: None) -> None:
        self.tiles = tiles
        self.ran: list[int] = []
        self._body = body

    def run_tile(self, arrays: Any, tile: int) -> None:
        self._body(tile)
        self.ran.append(tile)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()


def run(pool: Pool, tiles: Tiles, first: int = 0, stop: Callable[[], bool] = lambda: False) -> Any:
    progress: list[int] = []
    low = pool.run(tiles, [], first, progress.append, stop)  # type: ignore[arg-type]
    return low, progress


def test_every_tile_runs_once(pool: Pool) -> None:
    tiles = Tiles(200)
    low, progress = run(pool, tiles, 3)
    assert low == 200
    assert sorted(tiles.ran) == list(range(3, 200))
    assert progress == sorted(progress)


def test_tiles_really_run_side_by_side(pool: Pool) -> None:
    meeting = threading.Barrier(3, timeout=30)
    run(pool, Tiles(3, lambda tile: meeting.wait() and None))


def test_progress_never_passes_an_unfinished_tile(pool: Pool) -> None:
    others = threading.Event()
    seen: list[int] = []

    def body(tile: int) -> None:
        if tile == 0:
            assert others.wait(30)
            assert all(low == 0 for low in seen)
        elif tile == 9:
            others.set()

    pool.run(Tiles(10, body), [], 0, seen.append, lambda: False)  # type: ignore[arg-type]
    assert seen[-1] == 10


def test_stopping_waits_for_what_runs_and_says_where_to_go_on(pool: Pool) -> None:
    tiles = Tiles(1000)
    low, _ = run(pool, tiles, 0, lambda: len(tiles.ran) > 50)
    assert 50 < low < 1000
    assert sorted(tiles.ran) == list(range(low))
    low, _ = run(pool, tiles, low)
    assert low == 1000
    assert sorted(tiles.ran) == list(range(1000))


def test_a_tile_that_fails_is_reported_and_the_pool_goes_on(pool: Pool) -> None:
    def body(tile: int) -> None:
        if tile == 5:
            raise ValueError("tile 5")

    with pytest.raises(ValueError, match="tile 5"):
        run(pool, Tiles(100, body))
    assert run(pool, Tiles(10))[0] == 10


def test_no_tiles_are_no_work(pool: Pool) -> None:
    assert run(pool, Tiles(0))[0] == 0
