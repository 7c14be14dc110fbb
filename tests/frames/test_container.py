"""Checkpoints in files: flipped bytes, cuts, tails, absurd heads; sealed and compressed ones."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator

import pytest

from accelvisor.errors import CallerError, FrameRefused
from accelvisor.frames import container, receive
from accelvisor.frames.chunks import Buffer, Coding, Header, Kind, cut, expand, leaf_hash
from accelvisor.frames.container import AREA_BYTES, HEAD, Reader, Writer, area_for
from accelvisor.frames.manifest import Algorithms, Model
from accelvisor.frames.seal import Opener, Sealer
from tests.amount import by_night

from .building import (
    EXPECTED,
    FUNCTION,
    HOST_A,
    HOST_B,
    KEY_B,
    NONCE,
    Checkpoint,
    Destination,
    signed,
    small_chunks,
)


def take(here: Destination, data: bytes | bytearray) -> tuple[int, str]:
    """What becomes of a file: where it is refused, or (0, "")."""
    try:
        verified = container.verify(io.BytesIO(data), here.verifier, here.staging)
    except FrameRefused as error:
        return error.step, error.code
    here.device.load(verified, here.staging)
    return 0, ""


def test_every_flipped_byte_of_a_small_checkpoint_is_refused_by_steps_1_to_6() -> None:
    data = Checkpoint().file()
    here = Destination()
    dice = random.Random(1)
    seen = set()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= dice.randrange(1, 256)
        step, code = take(here, changed)
        assert 1 <= step <= 6, at
        assert here.records.steps[-1] == (step, code)
        assert here.device.writes == 0
        seen.add(code)
    assert here.nonces.used == set()
    assert {"frame-shape", "frame-version", "frame-key-unknown", "frame-signature",
            "frame-chunk", "frame-root"} <= seen  # fmt: skip
    assert take(here, data) == (0, "")


def test_every_flipped_bit_of_head_envelope_and_records_is_refused() -> None:
    data = Checkpoint().file()
    end = HEAD.size + len(Checkpoint().envelope())
    ends = [*range(end), *range(HEAD.size + AREA_BYTES, len(data))]
    here = Destination()
    for at in ends:
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            assert 1 <= take(here, changed)[0] <= 6, (at, bit)
    assert here.device.writes == 0


LARGE = random.Random(5).randbytes(2 << 20)


def large() -> Checkpoint:
    made = [*small_chunks()[:2]]
    made += cut(Kind.MEMORY, memoryview(LARGE), index=2, size=64 << 10)
    return Checkpoint(made, sections={"function": 10, "status": 20, "memory": len(LARGE)})


class Forgetful:
    """Staging that counts and keeps nothing: here the root is all that matters."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, header: Header, payload: Buffer) -> None:
        self.count += 1


def test_flipped_bits_of_a_large_checkpoint_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand by night."""
    checkpoint = large()
    data = bytearray(checkpoint.file())
    # A leaf's hash is looked up when header and payload are the very bytes that it was made of,
    # so that 20 GiB need not be hashed; what was changed is hashed.
    known = {h.pack(): (bytes(p), leaf_hash(h.pack(), p)) for h, p in checkpoint.chunks}

    def remembered(header: bytes, payload: Buffer) -> bytes:
        before, leaf = known.get(header, (b"", b""))
        same = len(before) == len(payload) and before.startswith(payload)
        return leaf if same and leaf else leaf_hash(header, payload)

    monkeypatch.setattr(receive, "leaf_hash", remembered)
    here = Destination()
    dice = random.Random(2)
    codes: dict[str, int] = {}
    count = by_night(10_000, 2_000)
    for _ in range(count):
        at, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
        data[at] ^= bit
        # BytesIO shares bytes but copies a bytearray; the reader only wants readinto.
        with pytest.raises(FrameRefused) as caught:
            container.verify(Memory(data), here.verifier, Forgetful())
        data[at] ^= bit
        assert 1 <= caught.value.step <= 6
        codes[caught.value.code] = codes.get(caught.value.code, 0) + 1
    assert codes["frame-root"] > 0.9 * count
    assert here.nonces.used == set()
    assert container.verify(Memory(data), here.verifier, Forgetful()).manifest.chunks == 34


class Memory:
    """A file over bytes that may change between two readers."""

    def __init__(self, data: bytes | bytearray, most: int = 1 << 30) -> None:
        self._view = memoryview(data)
        self._at = 0
        self._most = most

    def readinto(self, buffer: memoryview, /) -> int:
        count = min(len(buffer), len(self._view) - self._at, self._most)
        buffer[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_pipe_gives_as_little_as_it_likes(most: int) -> None:
    here = Destination()
    assert container.verify(Memory(Checkpoint().file(), most), here.verifier, here.staging)
    assert here.staging.chunks == small_chunks()


def test_every_cut_is_refused() -> None:
    data = Checkpoint().file()
    here = Destination()
    for size in range(len(data)):
        step, code = take(here, data[:size])
        assert (step, code) == (6, "frame-truncated"), size
    assert here.device.writes == 0


@pytest.mark.parametrize("tail", [b"\0", b"XCKP", bytes(100_000)])
def test_tail_is_refused(tail: bytes) -> None:
    assert take(Destination(), Checkpoint().file() + tail) == (6, "frame-excess")


def heads() -> Iterator[tuple[bytes, str]]:
    yield HEAD.pack(b"XCKQ", 1, 0, 100, AREA_BYTES), "frame-shape"
    yield bytes(16), "frame-shape"
    yield HEAD.pack(b"XCKP", 0, 0, 100, AREA_BYTES), "frame-version"
    yield HEAD.pack(b"XCKP", 2, 0, 100, AREA_BYTES), "frame-version"
    yield HEAD.pack(b"XCKP", 1, 1, 100, AREA_BYTES), "frame-shape"
    yield HEAD.pack(b"XCKP", 1, 0, 0, AREA_BYTES), "frame-shape"
    yield HEAD.pack(b"XCKP", 1, 0, AREA_BYTES + 1, AREA_BYTES), "frame-shape"
    yield HEAD.pack(b"XCKP", 1, 0, 100, 1 << 31), "frame-shape"
    yield HEAD.pack(b"XCKP", 1, 0, (1 << 32) - 1, (1 << 32) - 1), "frame-shape"


@pytest.mark.parametrize(("head", "code"), list(heads()))
def test_absurd_head_is_refused_before_memory_is_made_for_it(head: bytes, code: str) -> None:
    assert take(Destination(), head) == (1, code)


def test_absurd_length_of_a_payload_is_refused_before_it_is_read() -> None:
    data = bytearray(Checkpoint().file())
    struct.pack_into("<I", data, HEAD.size + AREA_BYTES + 32, (1 << 32) - 1)
    assert take(Destination(), data)[0] == 6


def test_something_hidden_after_the_envelope_is_refused() -> None:
    data = bytearray(Checkpoint().file())
    data[HEAD.size + AREA_BYTES - 1] = 1
    assert take(Destination(), data) == (1, "frame-shape")


def test_file_that_was_not_finished_is_no_checkpoint() -> None:
    out = io.BytesIO()
    writer = Writer(out)
    for header, payload in small_chunks():
        writer.add(header, payload)
    assert take(Destination(), out.getvalue()) == (1, "frame-shape")


def test_writer_writes_what_the_format_says_and_knows_its_totals() -> None:
    out = io.BytesIO()
    writer = Writer(out)
    for header, payload in small_chunks():
        assert writer.chunks == header.index
        writer.add(header, payload)
    made = Checkpoint()
    assert (writer.root, writer.chunks) == (made.manifest.root, made.manifest.chunks)
    assert writer.payload_bytes == made.manifest.payload_bytes
    writer.finish(made.envelope())
    assert out.getvalue() == made.file()


def test_writer_refuses_a_gap_and_an_envelope_without_room() -> None:
    writer = Writer(io.BytesIO())
    with pytest.raises(CallerError):
        writer.add(small_chunks()[1][0], b"")
    with pytest.raises(CallerError):
        writer.finish(bytes(AREA_BYTES + 1))


def test_area_has_room_for_the_largest_manifest() -> None:
    model = Model(model="m" * 128, key="f" * 32, digest=bytes(32))
    for count in (0, 1, 100, 200):
        envelope = signed(Checkpoint(models=(model,) * count).manifest).encode()
        assert len(envelope) <= area_for(count)


def test_reader_shows_the_envelope_alone() -> None:
    made = Checkpoint()
    assert Reader(io.BytesIO(made.file())).envelope == made.envelope()


def test_compressed_and_sealed_checkpoint_opens_for_its_audience() -> None:
    """Everything at once: zeros left out, zstd, AES-GCM, and only ciphertext in staging."""
    memory = bytearray(1 << 20)
    memory[300_000:400_000] = bytes(range(250)) * 400
    sealer = Sealer(
        KEY_B.public_identity.sealing, bytes(range(32)), function=FUNCTION, source=HOST_A,
        audience=HOST_B, nonce=NONCE,
    )  # fmt: skip
    plain = [*small_chunks()[:2]]
    plain += cut(Kind.MEMORY, memoryview(memory), index=2, size=64 << 10, zstd=True)
    stored = [(header, sealer.seal_chunk(header, payload)) for header, payload in plain]
    made = Checkpoint(
        stored,
        seal=sealer.seal,
        algorithms=Algorithms(compression="zstd", sealing="x25519-hkdf-sha256-aes256gcm"),
    )
    here = Destination()
    verified = container.verify(io.BytesIO(made.file()), here.verifier, here.staging)
    assert {h.coding for h, _ in plain} == set(Coding)
    assert not any(b"function" in payload for _, payload in here.staging.chunks)
    opener = Opener(verified.manifest, KEY_B.sealing, KEY_B.public_identity.sealing)
    out = bytearray(1 << 20)
    for header, payload in here.staging.chunks:
        data = expand(header, opener.open_chunk(header, payload))
        if header.kind == Kind.MEMORY:
            out[header.offset : header.offset + header.length] = data
    assert out == memory
    assert verified.manifest.audience == EXPECTED.me
