"""Checkpoints that continue one another: the chain from a whole one to the one that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from accelvisor.frames.chunks import Kind
from accelvisor.frames.manifest import Manifest
from accelvisor.frames.steps import refuse
from accelvisor.frames.verify import Verified

#: What no checkpoint may change along its chain.
_SAME = ("function", "owner", "kind", "profile")


def check_next(before: Verified, after: Manifest) -> None:
    """``after`` continues ``before``.

    Raises:
        FrameRefused: ``frame-parent``.
    """
    old = before.manifest
    if after.parent != before.digest:
        raise refuse("frame-parent", "it continues another checkpoint")
    for field in _SAME:
        if getattr(after, field) != getattr(old, field):
            raise refuse("frame-parent", f"its {field} is not the one of what it continues")
    if (after.epoch, after.sequence) <= (old.epoch, old.sequence):
        raise refuse("frame-parent", "it is not newer than what it continues")
    if _lasting(after) != _lasting(old):
        raise refuse("frame-parent", "a section has another size than in what it continues")


def check_chain(chain: Sequence[Verified]) -> None:
    """``chain`` begins with a whole checkpoint, and each continues the one before.

    Raises:
        FrameRefused: ``frame-parent``.
    """
    if not chain or chain[0].manifest.parent:
        raise refuse("frame-parent", "the whole checkpoint that it all begins with is missing")
    for before, after in pairwise(chain):
        check_next(before, after.manifest)


def _lasting(manifest: Manifest) -> list[int | None]:
    """Sizes of the sections that a later checkpoint changes in part: they are the function's."""
    return [manifest.section_bytes(kind) for kind in (Kind.STATE, Kind.WINDOW, Kind.MEMORY)]
