"""Keys of watermarks, registrations that are found by their digest, and signed verdicts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, DataError
from accelvisor.frames import canonical, envelope, watermark
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.watermark import Key, Place, Verdict
from accelvisor.limits import LIMITS

from .building import FUNCTION, HOST_A, HOST_B, KEY_A, KEY_B, NONCE, NOW, SECOND, document, identity

KEY = Key(bytes(range(32)))
PLACE = Place(handle=(3 << 32) | 7, address=0x5000, dtype="float32", shape=(576, 128))
REGISTRATION = watermark.register(FUNCTION, "digits", KEY.key_id, PLACE)


def verdict(**changes: Any) -> Verdict:
    made = watermark.judge(
        REGISTRATION, 2, host=HOST_A, nonce=NONCE, created_ns=NOW, manifest=bytes(32)
    )
    return msgspec.structs.replace(made, **changes)


def forged(**changes: Any) -> bytes:
    """What only somebody with the host's key could sign, and our own code would not."""
    value = {**msgspec.to_builtins(verdict(), builtin_types=(bytes,)), **changes}
    return envelope.sign(watermark.VERDICT_TYPE, canonical.encode(value), [KEY_A]).encode()


def refused(data: bytes, nonce: bytes = NONCE, now: int = NOW) -> str:
    with pytest.raises(AccelvisorError) as caught:
        watermark.verify(data, Keyring(document()), nonce=nonce, now_ns=now)
    return caught.value.code


# --- keys ---


def test_a_key_file_reads_back_and_shows_no_secret_elsewhere() -> None:
    assert Key.from_text(KEY.to_text().encode()) == KEY
    secret = KEY.secret.hex()
    assert secret not in repr(KEY)
    assert secret not in KEY.key_id
    assert len(KEY.key_id) == 32


@given(st.binary(max_size=200))
def test_what_is_no_key_file_is_refused(data: bytes) -> None:
    with pytest.raises(DataError) as caught:
        Key.from_text(data)
    assert caught.value.code == "watermark-key"


@pytest.mark.parametrize(
    "text",
    [
        KEY.to_text()[:-1],
        KEY.to_text() + "\n",
        KEY.to_text().replace("key 1", "key 2"),
        KEY.to_text().replace("0a", "0A"),
        KEY.to_text().replace("0102", "01 02"),
        KEY.to_text().replace("0102", "02"),
    ],
)
def test_a_key_file_has_one_form(text: str) -> None:
    with pytest.raises(DataError):
        Key.from_text(text.encode())


def test_each_key_and_each_name_has_bits_of_its_own() -> None:
    other = Key(bytes(31) + b"\1")
    messages = {KEY.message("a"), KEY.message("b"), other.message("a"), other.message("b")}
    assert len(messages) == 4
    assert {len(m) for m in messages} == {16}


# --- registrations ---


@pytest.mark.parametrize(
    "change",
    [
        {"function": HOST_B},
        {"model": "other"},
        {"key": Key(bytes(32)).key_id},
        {"place": msgspec.structs.replace(PLACE, handle=8)},
        {"place": msgspec.structs.replace(PLACE, address=0x6000)},
        {"place": msgspec.structs.replace(PLACE, dtype="int32")},
        {"place": msgspec.structs.replace(PLACE, shape=(128, 576))},
    ],
)
def test_a_digest_covers_everything_that_a_registration_says(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(REGISTRATION, **change).digest != REGISTRATION.digest


def test_the_identity_is_of_shape_dtype_and_key_alone() -> None:
    same = msgspec.structs.replace(
        REGISTRATION, model="other", place=msgspec.structs.replace(PLACE, handle=1, address=0)
    )
    assert same.identity == REGISTRATION.identity
    other = msgspec.structs.replace(REGISTRATION, key=Key(bytes(32)).key_id)
    assert other.identity != REGISTRATION.identity


def test_the_tensor_that_a_manifest_means_is_found_without_a_key() -> None:
    others = [msgspec.structs.replace(PLACE, handle=h) for h in range(20)]
    model = REGISTRATION.as_model()
    assert watermark.locate(FUNCTION, model, [*others, PLACE]) == REGISTRATION
    assert watermark.locate(FUNCTION, model, others) is None
    assert watermark.locate(HOST_B, model, [PLACE]) is None


def test_a_registration_reads_back_and_nonsense_does_not() -> None:
    data = watermark.encode_registration(REGISTRATION)
    assert watermark.decode_registration(data) == REGISTRATION
    for broken in (b"", data[:-1], data.replace(b"float32", b"float33"), b"\x80"):
        with pytest.raises(DataError) as caught:
            watermark.decode_registration(broken)
        assert caught.value.code == "watermark-registration"


@pytest.mark.parametrize("name", ["", "a\nb", "\u00e4", "x" * 129])
def test_a_model_has_a_printable_name(name: str) -> None:
    with pytest.raises(DataError) as caught:
        watermark.register(FUNCTION, name, KEY.key_id, PLACE)
    assert caught.value.code == "watermark-registration"


# --- verdicts ---


@pytest.mark.parametrize(
    ("errors", "accepted"), [(0, True), (16, True), (17, False), (None, False)]
)
def test_sixteen_wrong_bits_are_accepted_and_seventeen_are_not(
    errors: int | None, accepted: bool
) -> None:
    made = watermark.judge(REGISTRATION, errors, host=HOST_A, nonce=NONCE, created_ns=NOW)
    envelope_ = watermark.sign(made, KEY_A)
    found = watermark.verify(envelope_, Keyring(document()), nonce=NONCE, now_ns=NOW)
    assert found == made
    assert found.accepted is accepted
    assert len(envelope_) < LIMITS.watermark_verdict_bytes


def test_any_changed_byte_of_a_verdict_is_refused() -> None:
    good = watermark.sign(verdict(), KEY_A)
    for at in range(len(good)):
        refused(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (watermark.sign(verdict(), KEY_B), "verdict-signature"),
        (watermark.sign(verdict(host=HOST_B), KEY_A), "verdict-signature"),
        (watermark.sign(verdict(), identity()), "frame-key-unknown"),
        (watermark.sign(verdict(nonce=bytes(16)), KEY_A), "verdict-nonce"),
        (watermark.sign(verdict(created_ns=NOW + 3 * SECOND), KEY_A), "verdict-stale"),
        (watermark.sign(verdict(created_ns=NOW - 121 * SECOND), KEY_A), "verdict-stale"),
        (forged(accepted=False), "verdict-shape"),
        (forged(errors=17), "verdict-shape"),
        (forged(errors=None), "verdict-shape"),
        (forged(errors=60, threshold=64), "verdict-shape"),
        (forged(errors=129, accepted=False), "verdict-shape"),
        (forged(manifest=bytes(31)), "verdict-shape"),
        (forged(version=2), "verdict-shape"),
        (forged(more=1), "verdict-shape"),
        (envelope.sign("application/x", b"", [KEY_A]).encode(), "envelope-invalid"),
    ],
)
def test_a_verdict_that_lies_is_refused(data: bytes, code: str) -> None:
    assert refused(data) == code


def test_nobody_signs_a_verdict_that_could_not_be_read() -> None:
    with pytest.raises(DataError) as caught:
        watermark.sign(verdict(accepted=False), KEY_A)
    assert caught.value.code == "verdict-shape"
