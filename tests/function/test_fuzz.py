"""A few seconds of the ring fuzzer in the unit suite, always the same ones."""

from __future__ import annotations

import logging

from tests.fuzz.rings import run


def test_random_commands_give_typed_statuses() -> None:
    logging.disable(logging.WARNING)
    try:
        statuses = run(3.0, seed=20_240_601)
    finally:
        logging.disable(logging.NOTSET)
    assert statuses["OK"] > 100
    assert len(statuses) > 8
