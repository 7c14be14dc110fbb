"""The sections of the configuration that say how large cards and functions are: their keys, what
must be true of them together, and the planner's view of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from accelvisor.abi.registers import PAGE, WindowLayout
from accelvisor.isolation import placing
from accelvisor.isolation.resources import Card, Links, Policy, Profile
from accelvisor.limits import GIB, KIB, LIMITS, MIB

_SIZE = re.compile(r"^\s*(\d+)\s*(B|KiB|MiB|GiB)?\s*$")
_UNITS = {None: 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
#: Of one card, all of its boards together.
MOST_CHIPS = 256


class Size(int):
    """Bytes. In TOML a whole number of bytes, or a string such as ``"64MiB"``."""

    @classmethod
    def parse(cls, value: object) -> Size:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f'expected a size such as "64MiB", got `{type(value).__name__}`')
        if isinstance(value, int):
            if value < 0:
                raise ValueError("a size cannot be negative")
            return cls(value)
        match = _SIZE.match(value)
        if match is None:
            raise ValueError(f'"{value}" is not a size: write "64MiB" (B, KiB, MiB, GiB)')
        return cls(int(match[1]) * _UNITS[match[2]])


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table; unknown keys are refused."""


class CardConfig(Section, frozen=True):
    """``[cards.NAME]``: one emulated card: a grid of chips, on one board or several."""

    # Of all boards together; where columns are given it follows from the grid.
    chips: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHIPS)] = 4
    # Physical cards that cables make one: columns of chips go on from one to the next.
    boards: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHIPS)] = 1
    # Of chips on each board.
    rows: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHIPS)] = 1
    # Chips in a row. 0: as many as make up the chips.
    columns: Annotated[int, msgspec.Meta(ge=0, le=MOST_CHIPS)] = 0
    cores_per_chip: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    memory: Size = Size(4 * GIB)
    # Equal parts of the memory; a function has its memory in one of them if it can.
    banks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    # Pairs of rings for all functions together. 0: 16 for each core.
    queues: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    # The most functions that it can be cut into (SR-IOV's TotalVFs). 0: one for each core.
    functions: Annotated[int, msgspec.Meta(ge=0, le=LIMITS.functions)] = 0
    # Bytes a second of DMA for all functions together, shared by weight. 0: as many as there are.
    host_port: Size = Size(0)


class ProfileConfig(Section, frozen=True):
    """``[profiles.NAME]``: one size of function."""

    cores: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    chips: Annotated[int, msgspec.Meta(ge=1, le=LIMITS.chips)] = 1
    memory: Size = Size(64 * MIB)
    window: Size = Size(16 * MIB)
    queues: Annotated[int, msgspec.Meta(ge=1, le=LIMITS.queues)] = 8
    ring_entries: Annotated[int, msgspec.Meta(ge=2, le=LIMITS.ring_entries)] = LIMITS.ring_entries
    # guaranteed: host CPUs of its own. burstable: its share, and cores that nobody holds.
    # best-effort: what the others leave.
    policy: Policy = Policy.BURSTABLE
    # Its share of what functions have in common: host CPUs, the card's host port.
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    # ring: only where links make a ring of its chips. any: with the best links that there are.
    links: Links = Links.ANY


BUILTIN_CARDS: Mapping[str, CardConfig] = {"card0": CardConfig()}
BUILTIN_PROFILES: Mapping[str, ProfileConfig] = {
    "small": ProfileConfig(),
    "medium": ProfileConfig(
        cores=4, chips=1, memory=Size(256 * MIB), window=Size(32 * MIB), queues=16
    ),
    "large": ProfileConfig(cores=8, chips=2, memory=Size(GIB), window=Size(64 * MIB), queues=32),
}


# --- what must be true ----------------------------------------------------------------------------


def check_grid(name: str, card: CardConfig, given: Mapping[str, Any], problem: Any) -> None:
    """``given``: what the files say; keys that are left out follow from the others."""
    key = ["cards", name]
    lines = card.boards * card.rows
    place = f"{card.boards} boards with {card.rows} rows"
    if not card.columns:
        if card.chips % lines:
            key = [*key, "rows" if "rows" in given else "boards"]
            text = f"{card.chips} chips do not spread evenly over {place} of chips"
            problem(key, text, "give columns and leave chips out")
        return
    found = lines * card.columns
    if found > MOST_CHIPS:
        text = f"{place} of {card.columns} chips are {found}, at most {MOST_CHIPS}"
        problem([*key, "columns"], text)
    elif "chips" in given and card.chips != found:
        text = f"{card.chips} chips, but {place} of {card.columns} chips are {found}"
        problem([*key, "chips"], text, "leave chips out: it follows from the grid")


def check_profile(
    name: str, profile: ProfileConfig, cards: Mapping[str, CardConfig], problem: Any
) -> None:
    key = ["profiles", name]
    if profile.cores % profile.chips:
        problem(
            [*key, "cores"],
            f"{profile.cores} cores do not spread evenly over {profile.chips} chips",
            "each chip of a function gives the same number of cores",
        )
        return
    if not PAGE <= profile.memory <= LIMITS.memory_bytes or profile.memory % PAGE:
        problem([*key, "memory"], "4 KiB to 64 GiB, a multiple of 4 KiB")
    if profile.ring_entries & (profile.ring_entries - 1):
        problem([*key, "ring_entries"], "must be a power of two")
    need = WindowLayout(profile.queues, profile.ring_entries).staging + PAGE
    if profile.window & (profile.window - 1) or not need <= profile.window <= LIMITS.window_bytes:
        problem(
            [*key, "window"],
            f"must be a power of two from {need} bytes ({profile.queues} queues) to 1 GiB",
            "a PCI BAR has a power-of-two size",
        )
    empty = [card_of(name, item) for name, item in cards.items()]
    # Whether the host has CPUs to give away is no question of the configuration.
    answer = placing.plan(empty, [], replace(profile_of(name, profile), policy=Policy.BURSTABLE))
    if answer.placement is None:
        why = "; ".join(map(str, answer.reasons))
        hint = f"shrink it, or enlarge a card ({why})"
        problem(key, "fits on no card, not even an empty one", hint)


# --- as the planner knows it -----------------------------------------------------------------


def card_of(name: str, item: CardConfig) -> Card:
    """The card that a section describes."""
    chips = item.boards * item.rows * item.columns or item.chips
    cores = chips * item.cores_per_chip
    return Card(
        name,
        chips,
        item.cores_per_chip,
        int(item.memory),
        item.banks,
        item.queues or 16 * cores,
        item.functions or min(cores, LIMITS.functions),
        int(item.host_port),
        item.boards,
        item.rows,
    )


def profile_of(name: str, item: ProfileConfig) -> Profile:
    """The profile that a section describes."""
    return Profile(
        name,
        item.cores,
        item.chips,
        int(item.memory),
        int(item.window),
        item.queues,
        item.ring_entries,
        item.policy,
        item.weight,
        item.links,
    )
