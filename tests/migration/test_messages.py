"""Control messages: what goes in comes out; what is out of bounds, unknown or damaged does not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS
from accelvisor.migration import messages
from accelvisor.migration.messages import (
    Abort,
    Accept,
    Commit,
    Committed,
    Part,
    Refuse,
    Reserve,
    Sealed,
    Wanted,
    decode,
    encode,
)

ID = b"m" * 16
UUIDS = [f"00000000-0000-0000-0000-{number:012x}" for number in range(32)]
KINDS = [kind for kind in messages.AnyMessage.__args__]  # noqa: C416 - a tuple of types


def part(number: int = 0, **changes: object) -> Part:
    made = {"function": UUIDS[number], "epoch": 1, "digest": b"d" * 32}
    return Part(**{**made, **changes})  # type: ignore[arg-type]


ids = st.binary(min_size=16, max_size=16)
texts = st.text(max_size=40)
counts = st.integers(0, 2**63 - 1)
functions = st.lists(st.sampled_from(UUIDS), min_size=1, max_size=16, unique=True)
parts = functions.flatmap(
    lambda names: st.tuples(
        *(
            st.builds(
                Part,
                function=st.just(name),
                epoch=st.integers(1, 2**63 - 1),
                digest=st.binary(min_size=32, max_size=32),
            )
            for name in names
        )
    )
)
offered = functions.flatmap(
    lambda names: st.tuples(
        *(
            st.builds(
                messages.Offered,
                function=st.just(name),
                epoch=st.integers(1, 2**63 - 1),
                profile=texts,
                cores=st.integers(1, 64),
                chips=st.integers(1, 4),
                queues=st.integers(1, LIMITS.queues),
                ring_entries=st.integers(2, LIMITS.ring_entries),
                memory_bytes=st.integers(1, LIMITS.memory_bytes),
                window_bytes=st.integers(1, LIMITS.window_bytes),
                chunks=counts,
                bytes=counts,
            )
            for name in names
        )
    )
)


def with_signatures(kind: type, field: str) -> st.SearchStrategy[object]:
    return st.tuples(ids, parts, st.binary(max_size=64)).map(
        lambda made: kind(migration=made[0], parts=made[1], **{field: (made[2],) * len(made[1])})
    )


valid = st.one_of(
    st.builds(
        Reserve,
        migration=ids,
        domain=st.sampled_from(UUIDS),
        destination=st.sampled_from(UUIDS),
        nonce=ids,
        functions=functions.map(lambda names: tuple(Wanted(name, "small") for name in names)),
    ),
    st.tuples(ids, st.sampled_from(["source", "etcd"]), offered, st.binary(max_size=64)).map(
        lambda made: messages.Offer(made[0], made[1], made[2], (made[3],) * len(made[2]))
    ),
    st.builds(Refuse, migration=ids, code=st.just("frame-root"), message=texts, where=texts),
    st.builds(Accept, migration=ids),
    st.builds(messages.Round, migration=ids, number=counts, chunks=counts, bytes=counts),
    st.builds(messages.Ack, migration=ids, number=counts, chunks=counts),
    st.builds(messages.Resume, migration=ids, chunk=counts),
    with_signatures(Sealed, "envelopes"),
    st.builds(messages.Verified, migration=ids, parts=parts),
    st.builds(Commit, migration=ids, parts=parts),
    with_signatures(Committed, "records"),
    st.builds(Abort, migration=ids, message=texts),
    st.builds(messages.Aborted, migration=ids),
    st.builds(messages.Discarded, migration=ids, message=texts),
    st.builds(messages.Running, migration=ids),
)


@given(valid)
def test_what_goes_in_comes_out(message: messages.Message) -> None:
    raw = encode(message)
    assert decode(raw) == message
    assert len(raw) <= LIMITS.migration_message_bytes


@given(valid, st.data())
def test_a_damaged_message_is_refused_or_another_valid_one(
    message: messages.Message, data: st.DataObject
) -> None:
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(raw))
    except ProtocolError:
        return
    encode(found)  # within all bounds


@given(st.binary(max_size=200))
def test_rubbish_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(raw)


@given(valid)
def test_a_cut_or_prolonged_message_is_refused(message: messages.Message) -> None:
    raw = encode(message)
    for wrong in (raw[:-1], raw + b"\xc0", b""):
        with pytest.raises(ProtocolError):
            decode(wrong)


def refused(message: messages.Message) -> None:
    with pytest.raises(ProtocolError) as caught:
        encode(message)
    assert caught.value.code == "peer-message"
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "changes",
    [
        {"function": "x"}, {"function": UUIDS[1].upper() + "A"}, {"function": UUIDS[1] + "\n"},
        {"epoch": 0}, {"epoch": -1}, {"epoch": 2**63}, {"digest": b""}, {"digest": b"d" * 33},
    ],
)  # fmt: skip
def test_a_part_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    refused(Commit(ID, (part(**changes),)))


def test_a_function_that_is_named_twice_is_refused() -> None:
    refused(Commit(ID, (part(), part(epoch=2))))
    refused(Reserve(ID, UUIDS[0], UUIDS[1], ID, (Wanted(UUIDS[2], "a"), Wanted(UUIDS[2], "b"))))


def test_no_functions_and_too_many_are_refused() -> None:
    refused(Commit(ID, ()))
    refused(Commit(ID, tuple(part(number) for number in range(17))))


def test_a_seal_has_one_envelope_for_each_function() -> None:
    refused(Sealed(ID, (part(0), part(1)), (b"one",)))
    refused(Committed(ID, (part(0),), (b"one", b"two")))


@pytest.mark.parametrize("field", ["migration", "code", "message"])
def test_a_field_that_is_too_long_is_refused(field: str) -> None:
    made = {"migration": ID, "code": "a-b", "message": ""}
    long = {"migration": ID + b"x", "code": "a" * 65, "message": "x" * 1025}
    refused(Refuse(**{**made, field: long[field]}))  # type: ignore[arg-type]


def test_an_unknown_field_or_type_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode(Accept(ID)))
    for wrong in ({**raw, "x": 1}, {**raw, "t": "x"}, {"t": "accept"}, [raw], None, 1):
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode(wrong))


def test_a_message_for_the_other_side_is_refused() -> None:
    """A destination cannot be told what only a source is told, and the other way round."""
    commit, abort = encode(Commit(ID, (part(),))), encode(Abort(ID))
    assert isinstance(decode(commit, messages.ToSource), Commit)
    assert isinstance(decode(abort, messages.ToDestination), Abort)
    for raw, kind in ((commit, messages.ToDestination), (abort, messages.ToSource)):
        with pytest.raises(ProtocolError):
            decode(raw, kind)


def test_a_message_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(b"\0" * (LIMITS.migration_message_bytes + 1))
    assert caught.value.code == "peer-message-too-long"


def test_the_largest_message_fits() -> None:
    many = tuple(part(number) for number in range(LIMITS.migration_functions))
    envelope = b"e" * LIMITS.migration_envelope_bytes
    encode(Sealed(ID, many, (envelope,) * len(many)))


def test_the_list_of_messages_is_complete() -> None:
    """Every message class has a direction."""

    def below(kind: type) -> set[type]:
        return {kind} | {k for sub in kind.__subclasses__() for k in below(sub)}

    concrete = {kind for kind in below(messages.Message) if kind.__struct_config__.tag is not None
                and kind not in (messages.Message, messages.Step)}  # fmt: skip
    assert set(KINDS) == concrete
    assert set(messages.ToSource.__args__) | set(messages.ToDestination.__args__) == concrete
