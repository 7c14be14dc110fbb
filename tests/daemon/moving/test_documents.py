"""Function frame, status frame, token: what is bounded and compared, what each step refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.moving import documents, sealing
from accelvisor.daemon.moving.documents import Described, Digests, FunctionFrame, StatusFrame
from accelvisor.errors import DataError, ProtocolError, StateError
from accelvisor.frames import canonical
from accelvisor.migration import messages as wire

FIRMWARE = {"abi": "1.0", "state": "1", "version": "0.1", "numpy": "2.2", "blas": "OpenBLAS 0.3"}
SAID: dict[str, Any] = {
    "uuid": "f", "profile": "small", "cores": 1, "chips": 1, "memory_bytes": 1 << 20,
    "window_bytes": 1 << 16, "queues": 2, "ring_entries": 64, "firmware": FIRMWARE,
    "config": bytes(4096).hex(), "msi": True, "migration_state": "RUNNING", "fenced": False,
    "tracking": False, "contexts": [], "windows": [[0, 4096, 3]], "peers": [], "ram_bytes": 4096,
    "faults": 0, "resets": 1, "objects": 0, "memory_used_bytes": 0,
}  # fmt: skip
DIGESTS = {"state": "a" * 64, "window": "b" * 64, "memory": "c" * 64}


@dataclass
class Load:
    """What a destination has after a load; tests change one thing."""

    frame: FunctionFrame
    status: StatusFrame
    before: Described
    after: dict[str, Any]

    def validate(self) -> None:
        documents.validate(self.frame, self.status, self.before, self.after)


@pytest.fixture
def load() -> Load:
    said = documents.described(SAID)
    return Load(
        documents.function_frame(said),
        documents.status_frame(said, DIGESTS),
        said,
        {**DIGESTS, "faults": 0},
    )


def refused(load: Load, code: str) -> StateError:
    with pytest.raises(StateError) as caught:
        load.validate()
    assert caught.value.code == code
    return caught.value


def test_the_same_on_both_sides_passes(load: Load) -> None:
    load.validate()
    assert documents.decode(documents.encode(load.frame), FunctionFrame) == load.frame
    assert documents.decode(documents.encode(load.status), StatusFrame) == load.status


@pytest.mark.parametrize("key", ["abi", "state", "numpy", "blas"])
def test_v1_other_firmware(load: Load, key: str) -> None:
    changed = {**FIRMWARE, key: "another"}
    load.before = msgspec.structs.replace(load.before, firmware=changed)
    assert f"{key}: {FIRMWARE[key]} there, another here" in refused(load, "status-firmware").message


def test_v1_another_version_of_the_package_computes_the_same(load: Load) -> None:
    load.before = msgspec.structs.replace(load.before, firmware={**FIRMWARE, "version": "9"})
    load.validate()


@pytest.mark.parametrize(
    "name", ["memory_bytes", "window_bytes", "queues", "ring_entries", "chips"]
)
def test_v2_other_resources(load: Load, name: str) -> None:
    load.before = msgspec.structs.replace(load.before, **{name: 12345})
    refused(load, "status-resources")


def test_v2_more_cores_are_no_harm_and_fewer_are(load: Load) -> None:
    load.before = msgspec.structs.replace(load.before, cores=4)
    load.validate()
    load.frame = msgspec.structs.replace(load.frame, cores=8)
    refused(load, "status-resources")


@pytest.mark.parametrize("name", ["state", "window", "memory"])
def test_v3_a_section_that_reads_back_differently(load: Load, name: str) -> None:
    load.after[name] = "0" * 64
    assert name in refused(load, "status-digest").message
    del load.after[name]
    refused(load, "status-digest")


def test_v6_peers_that_are_not_here(load: Load) -> None:
    load.frame = msgspec.structs.replace(load.frame, peers=("another",))
    refused(load, "status-peers")


def test_v7_a_fault_counter_that_moved(load: Load) -> None:
    load.after["faults"] = 1
    refused(load, "status-faults")


def config(control: int, address: int) -> bytes:
    """Configuration space with MSI at 0x80."""
    made = bytearray(4096)
    made[0x34] = 0x80
    made[0x80:0x84] = bytes((0x05, 0, control & 0xFF, control >> 8))
    made[0x84:0x88] = address.to_bytes(4, "little")
    return bytes(made)


@pytest.mark.parametrize(
    ("there", "here", "msi", "fits"),
    [
        (config(0x81, 0xFEE0_0000), config(0x81, 0xFEE0_0000), True, True),
        (config(0x81, 0xFEE0_0000), config(0x81, 0xFEE1_0000), True, False),
        (config(0x81, 0xFEE0_0000), config(0x80, 0xFEE0_0000), True, False),
        (config(0x80, 0xFEE0_0000), config(0x80, 0x0000_0000), True, True),
        (config(0x81, 0xFEE0_0000), config(0x81, 0xFEE0_0000), False, False),
    ],
)
def test_an_interrupt_must_go_where_it_went(
    load: Load, there: bytes, here: bytes, msi: bool, fits: bool
) -> None:
    frame = msgspec.structs.replace(load.frame, config=there)
    before = msgspec.structs.replace(load.before, config=here.hex(), msi=msi)
    if fits:
        documents.require_context(frame, before)
        return
    with pytest.raises(StateError) as caught:
        documents.require_context(frame, before)
    assert caught.value.code == "status-context"


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": -1}, {"firmware": {"x": "y" * 5000}}, {"config": "00" * 5000}, {"cores": "1"},
        {"contexts": [{"queue": 0, "pid": 1, "name": "x", "objects": []}] * 100},
        {"peers": ["p"] * 300}, {"windows": [[0, -1, 3]]},
    ],
)  # fmt: skip
def test_an_impossible_description_is_refused(changes: dict[str, Any]) -> None:
    """It comes from a process that a guest drives."""
    with pytest.raises(ProtocolError) as caught:
        documents.described({**SAID, **changes})
    assert caught.value.code == "function-reply"


@pytest.mark.parametrize("missing", sorted(SAID))
def test_a_description_without_a_field_is_refused(missing: str) -> None:
    with pytest.raises(ProtocolError):
        documents.described({key: value for key, value in SAID.items() if key != missing})


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader_of_frames(raw: bytes) -> None:
    for kind in (FunctionFrame, StatusFrame):
        with pytest.raises(StateError):
            documents.decode(raw, kind)


def test_the_status_digest_is_of_all_sections() -> None:
    known = documents.status_digest(Digests(**DIGESTS))
    for name in DIGESTS:
        assert documents.status_digest(Digests(**{**DIGESTS, name: "d" * 64})) != known


# --- tokens ---------------------------------------------------------------------------------------

PARTS = (wire.Part("33333333-3333-4333-8333-333333333333", 2, b"d" * 32),)


def test_a_token_says_which_seal_it_goes_with() -> None:
    found = sealing.read_token(sealing.token(b"m" * 16, PARTS))
    assert (found.migration, found.parts) == (b"m" * 16, {PARTS[0].function: b"d" * 32})


@given(st.data())
def test_a_token_that_was_changed_is_another_or_none(data: st.DataObject) -> None:
    raw = bytearray(sealing.token(b"m" * 16, PARTS))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = sealing.read_token(bytes(raw))
    except DataError:
        return
    assert (found.migration, found.parts) != (b"m" * 16, {PARTS[0].function: b"d" * 32})


@given(st.binary(max_size=100))
def test_no_bytes_crash_the_reader_of_tokens(raw: bytes) -> None:
    with pytest.raises(DataError):
        sealing.read_token(raw)


def test_a_token_of_another_version_is_refused() -> None:
    with pytest.raises(DataError, match="version 2"):
        sealing.read_token(canonical.encode({"version": 2, "migration": b"m", "parts": {}}))
