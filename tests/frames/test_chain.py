"""Checkpoints that continue one another, and splices that do not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from accelvisor.errors import FrameRefused
from accelvisor.frames import manifest as manifests
from accelvisor.frames.chain import check_chain, check_next
from accelvisor.frames.verify import Verified

from .building import HOST_A, PROFILE, manifest, uuid


def verified(**changes: Any) -> Verified:
    made = manifest(**changes)
    digest = manifests.manifest_digest(manifests.encode(made))
    return Verified(made, digest, frozenset({HOST_A}), b"")


def chain(length: int = 4) -> list[Verified]:
    made = [verified(sequence=0)]
    for sequence in range(1, length):
        made.append(verified(sequence=sequence, parent=made[-1].digest))
    return made


def refused(made: list[Verified]) -> None:
    with pytest.raises(FrameRefused) as caught:
        check_chain(made)
    assert (caught.value.step, caught.value.code) == (6, "frame-parent")


@pytest.mark.parametrize("length", [1, 2, 4])
def test_whole_chain(length: int) -> None:
    check_chain(chain(length))


def test_spliced_chain_is_refused() -> None:
    """A link of another chain of the same function, each validly signed."""
    other = [verified(sequence=0, boot=6)]
    other.append(verified(sequence=1, parent=other[0].digest))
    refused([chain()[0], other[1]])


@pytest.mark.parametrize("at", range(3))
def test_chain_with_a_link_missing_is_refused(at: int) -> None:
    made = chain()
    del made[at]
    refused(made)


def test_reordered_chain_is_refused() -> None:
    made = chain()
    refused([made[0], made[2], made[1], made[3]])


def test_no_chain_is_refused() -> None:
    refused([])


@pytest.mark.parametrize(
    "change",
    [
        {"function": uuid()},
        {"owner": bytes(32)},
        {"kind": "status", "sections": {"status": 1}},
        {"profile": msgspec.structs.replace(PROFILE, queues=9)},
        {"sequence": 0},
        {"epoch": 6},
        {"sections": {"function": 10, "status": 20, "memory": 1 << 19}},
        {"sections": {"function": 10, "status": 20}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_may_not_change_along_a_chain(change: dict[str, Any]) -> None:
    first = chain(1)[0]
    with pytest.raises(FrameRefused) as caught:
        check_next(first, manifest(**{"sequence": 1, "parent": first.digest, **change}))
    assert caught.value.code == "frame-parent"


def test_documents_may_grow_and_the_epoch_too() -> None:
    first = chain(1)[0]
    sections = {"function": 99, "status": 1, "memory": 1 << 20}
    check_next(first, manifest(epoch=8, sequence=0, parent=first.digest, sections=sections))
