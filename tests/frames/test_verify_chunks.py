"""Attacks on the bytes of a checkpoint, refused by the step that is meant to (test_verify.py).

Of The Update Framework's attack list: mix and match, endless data, slow retrieval; and reordered,
truncated, and other than what was offered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from accelvisor.frames.chunks import Coding, Header, Kind
from accelvisor.frames.manifest import Algorithms
from accelvisor.frames.pace import Pace
from accelvisor.frames.receive import Receiver
from accelvisor.limits import LIMITS

from .building import (
    NOW,
    PROFILE,
    SECOND,
    Checkpoint,
    Destination,
    signed_offer,
    small_chunks,
)

# --- mix and match, reordered, truncated, spliced, endless, slow ---


def swapped(chunk: tuple[Header, bytes], at: int = 2) -> Checkpoint:
    made = Checkpoint()
    made.chunks[at] = chunk
    return made


def test_chunk_of_another_checkpoint() -> None:
    foreign = (Header(2, Kind.MEMORY, Coding.RAW, 4096, 16), b"fifteen letters?")
    assert Destination().refuses(swapped(foreign)) == (6, "frame-root")


@pytest.mark.parametrize(
    "header",
    [
        Header(2, Kind.MEMORY, Coding.RAW, 4097, 16),
        Header(2, Kind.MEMORY, Coding.RAW, 0, 16),
        Header(2, Kind.STATUS, Coding.RAW, 0, 16),
    ],
)
def test_chunk_in_another_place(header: Header) -> None:
    assert Destination().refuses(swapped((header, b"sixteen letters!"))) == (6, "frame-root")


def test_payload_as_zeros_and_zeros_as_payload() -> None:
    zeros = (Header(2, Kind.MEMORY, Coding.ZEROS, 4096, 16), b"")
    assert Destination().refuses(swapped(zeros)) == (6, "frame-truncated")
    longer = (Header(3, Kind.MEMORY, Coding.RAW, 8192, 4096), bytes(4096))
    assert Destination().refuses(swapped(longer, 3)) == (6, "frame-excess")


def test_reordered_chunks() -> None:
    made = Checkpoint()
    made.chunks[1], made.chunks[2] = made.chunks[2], made.chunks[1]
    assert Destination().refuses(made) == (6, "frame-chunk")


def test_reordered_and_renumbered_chunks() -> None:
    made = Checkpoint()
    a, b = made.chunks[1], made.chunks[2]
    made.chunks[1] = (dataclasses.replace(b[0], index=1), b[1])
    made.chunks[2] = (dataclasses.replace(a[0], index=2), a[1])
    assert Destination().refuses(made) == (6, "frame-root")


def test_repeated_chunk() -> None:
    made = Checkpoint()
    made.chunks[1] = made.chunks[0]
    assert Destination().refuses(made) == (6, "frame-chunk")


@pytest.mark.parametrize("left", range(4))
def test_truncated_by_whole_chunks(left: int) -> None:
    made = Checkpoint()
    del made.chunks[left:]
    assert Destination().refuses(made) == (6, "frame-truncated")


@pytest.mark.parametrize("left", range(4))
def test_migration_truncated_by_whole_chunks(left: int) -> None:
    made, here = Checkpoint(), Destination()
    del made.chunks[left:]
    assert here.refusal(lambda: here.stream(signed_offer(), made)) == (6, "frame-truncated")


def test_migration_without_its_manifest() -> None:
    here = Destination()
    receiver = Receiver(here.verifier, here.verifier.open_offer(signed_offer()), here.staging)
    here.records.events.clear()
    assert here.refusal(receiver.finish) == (6, "frame-truncated")


def test_endless_chunks() -> None:
    made = Checkpoint()
    made.chunks.append((Header(4, Kind.MEMORY, Coding.ZEROS, 0, 4096), b""))
    assert Destination().refuses(made) == (6, "frame-excess")


def test_one_byte_more_than_was_signed() -> None:
    made = Checkpoint()
    header, payload = made.chunks[2]
    made.chunks[2] = (dataclasses.replace(header, length=17), bytes(payload) + b"!")
    assert Destination().refuses(made) == (6, "frame-excess")


def test_endless_migration_stops_at_what_was_offered() -> None:
    here = Destination()
    offered = signed_offer(chunks=100, payload_bytes=40)
    assert here.refusal(lambda: here.stream(offered, Checkpoint())) == (6, "frame-excess")
    assert len(here.staging.chunks) == 2
    here = Destination()
    offered = signed_offer(chunks=3)
    assert here.refusal(lambda: here.stream(offered, Checkpoint())) == (6, "frame-excess")


def test_more_came_than_the_manifest_says_at_last() -> None:
    here = Destination()
    less = Checkpoint(chunks=small_chunks()[:3])
    less.chunks = small_chunks()
    assert here.refusal(lambda: here.stream(signed_offer(), less)) == (6, "frame-excess")


def test_slow_retrieval() -> None:
    """One byte a second, where 1 MiB in ten seconds is the least."""
    here = Destination()
    verifier = here.verifier
    pace = Pace(NOW, deadline_ns=3600 * SECOND, window_ns=10 * SECOND, least_bytes=1 << 20)
    offered = verifier.open_offer(signed_offer(chunks=1000))
    receiver = Receiver(verifier, offered, here.staging, pace)

    def trickle() -> None:
        for index in range(60):
            receiver.feed(Header(index, Kind.MEMORY, Coding.RAW, index, 1), b"x")
            here.now += SECOND

    assert here.refusal(trickle) == (6, "frame-slow")
    assert receiver.chunks == 10


def test_silence_is_slow_too() -> None:
    here = Destination()
    verifier = here.verifier
    pace = Pace(NOW, deadline_ns=3600 * SECOND, window_ns=10 * SECOND, least_bytes=1)
    receiver = Receiver(verifier, verifier.open_offer(signed_offer()), here.staging, pace)
    here.now += 9 * SECOND
    receiver.tick()
    here.now += SECOND
    assert here.refusal(receiver.tick) == (6, "frame-slow")


BAD_CHUNKS = {
    "kind unknown": Header(2, 9, Coding.RAW, 0, 16),
    "section not signed": Header(2, Kind.WINDOW, Coding.RAW, 0, 16),
    "coding unknown": Header(2, Kind.MEMORY, 7, 0, 16),
    "compression not signed": Header(2, Kind.MEMORY, Coding.ZSTD, 0, 17),
    "past its section": Header(2, Kind.MEMORY, Coding.RAW, (1 << 20) - 15, 16),
    "past 2**64": Header(2, Kind.MEMORY, Coding.RAW, (1 << 64) - 1, 16),
    "length nought": Header(2, Kind.MEMORY, Coding.ZEROS, 0, 0),
    "length too large": Header(2, Kind.MEMORY, Coding.ZEROS, 0, LIMITS.chunk_bytes + 1),
    "index skipped": Header(3, Kind.MEMORY, Coding.RAW, 0, 16),
    "index repeated": Header(1, Kind.MEMORY, Coding.RAW, 0, 16),
    "payload too short": Header(2, Kind.MEMORY, Coding.RAW, 0, 17),
    "payload of zeros": Header(2, Kind.MEMORY, Coding.ZEROS, 0, 16),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunk_out_of_bounds_is_refused_even_if_it_was_signed(name: str) -> None:
    header = BAD_CHUNKS[name]
    empty = header.coding == Coding.ZEROS and name != "payload of zeros"
    chunks = small_chunks()
    chunks[2] = (header, b"" if empty else b"sixteen letters!")
    assert Destination().refuses(Checkpoint(chunks)) == (6, "frame-chunk")


def test_after_a_refusal_nothing_more_is_taken() -> None:
    here, made = Destination(), Checkpoint()
    verifier = here.verifier
    receiver = Receiver(verifier, verifier.open(made.envelope()), here.staging)
    good, payload = made.chunks[0]
    bad = dataclasses.replace(good, kind=9)
    assert here.refusal(lambda: receiver.feed(bad, payload)) == (6, "frame-chunk")
    for again in (lambda: receiver.feed(good, payload), receiver.finish):
        assert here.refusal(again) == (6, "frame-chunk")
    assert here.staging.chunks == []


def test_another_payload_than_was_admitted() -> None:
    here, made = Destination(), Checkpoint()
    verifier = here.verifier
    receiver = Receiver(verifier, verifier.open(made.envelope()), here.staging)
    header, payload = made.chunks[0]
    receiver.admit(header, len(payload))
    assert here.refusal(lambda: receiver.take(header, b"x")) == (6, "frame-chunk")


def test_staging_that_is_full_does_not_lose_the_chunk() -> None:
    here, made = Destination(), Checkpoint()
    verifier = here.verifier
    receiver = Receiver(verifier, verifier.open(made.envelope()), here.staging)
    write, here.staging.write = here.staging.write, fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="full"):
        receiver.feed(*made.chunks[0])
    here.staging.write = write  # type: ignore[method-assign]
    for header, chunk in made.chunks:
        receiver.feed(header, chunk)
    assert receiver.finish().manifest == made.manifest


def fails(header: Header, payload: object) -> None:
    raise OSError("the disk is full")


# --- what was offered and what came ---


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "status", "sections": {"status": 20, "memory": 1 << 20}},
        {"boot": 6},
        {"epoch": 8},
        {"algorithms": Algorithms(compression="zstd")},
        {"profile": msgspec.structs.replace(PROFILE, cores=3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_manifest_is_not_what_was_offered(change: dict[str, Any]) -> None:
    here, made = Destination(), Checkpoint(**change)
    assert here.refusal(lambda: here.stream(signed_offer(), made)) == (6, "frame-offer")


def test_manifest_has_a_section_that_was_not_offered() -> None:
    here = Destination()
    made = Checkpoint(sections={**Checkpoint().manifest.sections, "window": 5})
    assert here.refusal(lambda: here.stream(signed_offer(), made)) == (6, "frame-offer")


def test_section_shrinks_below_a_chunk_that_came() -> None:
    here = Destination()
    made = Checkpoint(sections={**Checkpoint().manifest.sections, "memory": 8192})
    assert here.refusal(lambda: here.stream(signed_offer(), made)) == (6, "frame-chunk")


def test_section_ends_smaller_than_offered() -> None:
    here = Destination()
    offered = signed_offer(sections={"function": 500, "status": 500, "memory": 1 << 20})
    assert here.stream(offered, Checkpoint())
