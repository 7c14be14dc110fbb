"""Arrays for collectives: every kind, awkward values, awkward masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from accelvisor.collectives import fast
from accelvisor.collectives.kinds import Array, Kind

MASKS = ("none", "all", "first", "last", "alternate", "words", "sparse", "half", "dense")


def mask(name: str, n: int, random: np.random.Generator) -> Array:
    """Which of ``n`` values are not zero."""
    where = np.arange(n)
    return {
        "none": np.zeros(n, bool),
        "all": np.ones(n, bool),
        "first": where == 0,
        "last": where == n - 1,
        "alternate": where % 2 == 1,
        "words": where // 64 % 2 == 0,
        "sparse": random.random(n) < 0.05,
        "half": random.random(n) < 0.5,
        "dense": random.random(n) < 0.97,
    }[name]


def values(kind: Kind, n: int, name: str, seed: int) -> Array:
    """1-D array of ``kind.storage``: small numbers that cancel, any bits, extremes, zeros."""
    random = np.random.default_rng(seed)
    any_bits = random.integers(0, 1 << 8 * kind.width, n, np.uint64, endpoint=False) \
        if kind.width < 8 else random.integers(0, 2**64 - 1, n, np.uint64, endpoint=True)
    bits = any_bits.astype(kind.bits)
    if kind.is_float:
        sign = kind.keep + 1
        one = kind.infinity >> 1 & kind.infinity
        pool = [
            0, sign, kind.infinity, sign | kind.infinity, kind.nan, sign | kind.nan | 1, 1,
            sign | 1, one, sign | one, kind.infinity - 1, sign | (kind.infinity - 1),
            kind.infinity | 1,
        ]  # fmt: skip
        special = random.choice(np.array(pool, kind.bits), n)
        bits = np.where(random.random(n) < 0.5, special, bits)
    else:
        small = random.integers(-2, 3, n).astype(kind.storage).view(kind.bits)
        top = np.array([kind.keep, kind.keep >> 1, (kind.keep >> 1) + 1], kind.bits)
        bits = np.where(random.random(n) < 0.6, small, bits)
        bits = np.where(random.random(n) < 0.1, random.choice(top, n), bits)
    bits[~mask(name, n, random)] = 0
    return bits.astype(kind.bits).view(kind.storage)


def smooth(kind: Kind, n: int, name: str, seed: int) -> Array:
    """Ordinary numbers, for long runs."""
    random = np.random.default_rng(seed)
    wide = (random.standard_normal(n) * 20).astype(np.float32)
    wide[~mask(name, n, random)] = 0
    if kind.name == "bfloat16":
        return (wide.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return wide.astype(np.int64).astype(kind.storage) if not kind.is_float else wide.astype(
            kind.storage
        )


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Pack and unpack with numpy or numba."""
    if name == "numba":
        assert fast.warm((1, 2, 4, 8)), "numba is a dependency of the development environment"
    else:
        fast.cool()
    try:
        yield
    finally:
        fast.cool()
