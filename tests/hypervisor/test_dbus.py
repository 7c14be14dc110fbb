from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jeepney import new_method_call
from jeepney.low_level import HeaderFields, MessageFlag

from accelvisor.errors import ProtocolError
from accelvisor.hypervisor.dbus import Connection, Question, Request
from accelvisor.limits import LIMITS
from tests.hypervisor.bus_client import (
    BUS,
    HANDSHAKE,
    VMSTATE,
    answer,
    bus_call,
    get_all,
    load,
    messages,
    owners,
    save,
)

GUID = "0" * 31 + "1"


def connected() -> Connection:
    connection = Connection(GUID, 0)
    assert connection.feed(HANDSHAKE) == []
    connection.outgoing()
    return connection


def said(*lines: str, uid: int | None = 0) -> list[str]:
    connection = Connection(GUID, uid)
    connection.feed(b"\0" + "".join(f"{line}\r\n" for line in lines).encode())
    return connection.outgoing().decode().split("\r\n")[:-1]


# --- authentication ------------------------------------------------------------------------------


def test_qemus_handshake() -> None:
    connection = Connection(GUID, 0)
    connection.feed(b"\0AUTH\r\n")
    assert connection.outgoing() == b"REJECTED EXTERNAL ANONYMOUS\r\n"
    connection.feed(b"AUTH EXTERNAL 30\r\n")
    assert connection.outgoing() == f"OK {GUID}\r\n".encode()
    connection.feed(b"NEGOTIATE_UNIX_FD\r\n")
    assert connection.outgoing().startswith(b"ERROR")
    assert not connection.ready
    connection.feed(b"BEGIN\r\n")
    assert connection.ready


@pytest.mark.parametrize(
    ("lines", "uid", "last"),
    [
        (["AUTH EXTERNAL 3634303535"], 64055, f"OK {GUID}"),
        (["AUTH EXTERNAL", "DATA"], 64055, f"OK {GUID}"),
        (["AUTH EXTERNAL", "DATA 3634303535"], 64055, f"OK {GUID}"),
        (["AUTH ANONYMOUS"], None, f"OK {GUID}"),
        (["AUTH ANONYMOUS 41"], 0, f"OK {GUID}"),
        (["AUTH EXTERNAL 30"], 64055, "REJECTED EXTERNAL ANONYMOUS"),
        (["AUTH EXTERNAL 30"], None, "REJECTED EXTERNAL ANONYMOUS"),
        (["AUTH EXTERNAL zz"], 0, "REJECTED EXTERNAL ANONYMOUS"),
        (["AUTH EXTERNAL 30 30"], 0, "REJECTED EXTERNAL ANONYMOUS"),
        (["AUTH DBUS_COOKIE_SHA1 30"], 0, "REJECTED EXTERNAL ANONYMOUS"),
        (["AUTH EXTERNAL", "CANCEL"], 0, "REJECTED EXTERNAL ANONYMOUS"),
        (["DATA 30"], 0, "ERROR"),
        (["NEGOTIATE_UNIX_FD"], 0, "ERROR"),
        (["äöü"], 0, "ERROR"),
        ([""], 0, "ERROR"),
    ],
)
def test_who_says_who_it_is(lines: list[str], uid: int | None, last: str) -> None:
    assert said(*lines, uid=uid)[-1] == last


def test_rejected_after_accepted_is_not_accepted() -> None:
    connection = Connection(GUID, 0)
    connection.feed(b"\0AUTH EXTERNAL 30\r\nAUTH EXTERNAL 31\r\n")
    with pytest.raises(ProtocolError):
        connection.feed(b"BEGIN\r\n")


@pytest.mark.parametrize(
    "data", [b"A", b"\0BEGIN\r\n", b"\0" + b"A" * 2000, b"\0AUTH\r\n" + b"A" * 2000 + b"\r\n"]
)
def test_what_is_no_handshake_ends_the_connection(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Connection(GUID, 0).feed(data)


# --- questions -----------------------------------------------------------------------------------


@given(st.integers(1, 40))
def test_the_questions_of_a_migration_however_they_are_cut(step: int) -> None:
    data = HANDSHAKE + bus_call("Hello") + owners() + get_all() + save() + load(b"token")
    connection = Connection(GUID, 0)
    found: list[Request] = []
    for at in range(0, len(data), step):
        found += connection.feed(data[at : at + step])
    assert [(request.question, request.data) for request in found] == [
        (Question.OWNERS, b""),
        (Question.SAVE, b""),
        (Question.LOAD, b"token"),
    ]
    sent = connection.outgoing()
    sent = sent[sent.rindex(b"\r\n") + 2 :]
    assert answer(sent, 1) == ("", (":1.1",))
    assert answer(sent, 10) == ("", ({"Id": ("s", "accel")},))


def test_each_question_gets_its_answer() -> None:
    connection = connected()
    who, keep, take = connection.feed(owners() + save() + load(b"x"))
    connection.loaded(take)
    connection.saved(keep, b"t" * LIMITS.vmstate_bytes)
    connection.owners(who, True)
    sent = connection.outgoing()
    assert answer(sent, 7) == ("", ([":1.2"],))
    assert answer(sent, 8) == ("", (b"t" * LIMITS.vmstate_bytes,))
    assert answer(sent, 9) == ("", ())
    assert connection.outgoing() == b""
    serials = [message.header.serial for message in messages(sent)]
    assert len(set(serials)) == 3
    assert all(m.header.fields[HeaderFields.destination] == ":1.1" for m in messages(sent))


def test_a_refusal_has_a_name_and_a_text() -> None:
    connection = connected()
    who, take = connection.feed(owners() + load(b"x"))
    connection.owners(who, False)
    connection.refuse(take, "the signature is wrong")
    sent = connection.outgoing()
    assert answer(sent, 7) == ("", ([],))
    assert answer(sent, 9) == ("io.accelvisor.Refused", ("the signature is wrong",))


def test_more_state_than_qemu_takes_is_not_sent() -> None:
    connection = connected()
    (keep,) = connection.feed(save())
    with pytest.raises(ProtocolError):
        connection.saved(keep, bytes(LIMITS.vmstate_bytes + 1))


@pytest.mark.parametrize(
    ("member", "signature", "body", "wanted"),
    [
        ("GetNameOwner", "s", ("org.qemu.VMState1",), ":1.2"),
        ("GetNameOwner", "s", ("org.freedesktop.DBus",), "org.freedesktop.DBus"),
        ("NameHasOwner", "s", (":1.2",), True),
        ("NameHasOwner", "s", ("org.else",), False),
        ("RequestName", "su", ("org.qemu.VMState1", 0), 3),
        ("StartServiceByName", "su", (":1.2", 0), 2),
        ("GetId", "", (), GUID),
    ],
)
def test_what_glib_asks_of_a_bus(
    member: str, signature: str, body: tuple[object, ...], wanted: object
) -> None:
    connection = connected()
    assert connection.feed(bus_call(member, signature, *body)) == []
    assert answer(connection.outgoing(), 1) == ("", (wanted,))


def test_a_match_is_acknowledged_and_a_ping_answered() -> None:
    connection = connected()
    connection.feed(bus_call("AddMatch", "s", "type='signal'") + bus_call("RemoveMatch", "s", "x"))
    assert len(messages(connection.outgoing())) == 2


def test_who_expects_no_reply_gets_none() -> None:
    connection = connected()
    call = new_method_call(BUS, "AddMatch", "s", ("type='signal'",))
    call.header.flags |= MessageFlag.no_reply_expected
    connection.feed(call.serialise(serial=3))
    assert connection.outgoing() == b""


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (bus_call("ListQueuedOwners", "s", "org.else"), "NameHasNoOwner"),
        (bus_call("GetNameOwner", "s", "org.else"), "NameHasNoOwner"),
        (bus_call("BecomeMonitor", "asu", [], 0), "UnknownMethod"),
        (bus_call("ListQueuedOwners", "u", 5), "InvalidArgs"),
        (bus_call("ListQueuedOwners"), "InvalidArgs"),
        (new_method_call(VMSTATE, "Load", "s", ("x",)).serialise(serial=1), "InvalidArgs"),
        (new_method_call(VMSTATE, "Other").serialise(serial=1), "UnknownMethod"),
    ],
)
def test_what_is_not_there_is_an_error_of_dbus(data: bytes, error: str) -> None:
    connection = connected()
    assert connection.feed(data) == []
    assert answer(connection.outgoing(), 1)[0] == f"org.freedesktop.DBus.Error.{error}"


def test_a_property_that_is_not_there() -> None:
    connection = connected()
    address = VMSTATE.with_interface("org.freedesktop.DBus.Properties")
    for name, error in (("Id", ""), ("Other", "org.freedesktop.DBus.Error.UnknownProperty")):
        call = new_method_call(address, "Get", "ss", ("org.qemu.VMState1", name))
        connection.feed(call.serialise(serial=1))
        assert answer(connection.outgoing(), 1)[0] == error
    connection.feed(get_all("org.else"))
    assert answer(connection.outgoing(), 10) == ("", ({},))


# --- hostile messages ----------------------------------------------------------------------------


def header(fields: bytes, *, size: int = 0, order: bytes = b"l", version: int = 1) -> bytes:
    head = order + struct.pack("<BBBIII", 1, 0, version, size, 1, len(fields))
    return head + fields + bytes(-len(fields) % 8)


def field(code: int, signature: bytes, value: bytes) -> bytes:
    return bytes([code, len(signature)]) + signature + b"\0" + value


@pytest.mark.parametrize(
    "data",
    [
        header(b"", order=b"x"),
        header(b"", version=2),
        header(b"", size=LIMITS.dbus_message_bytes),
        header(bytes(5000)),
        header(field(3, b"a()", b"\0" * 3 + b"\x10\0\0\0" + bytes(16))),  # would never end
        header(field(3, b"as", b"\0" * 4 + b"\0\0\0\0" + bytes(8))),  # no text, and not hashable
        header(field(200, b"u", b"\0" * 4 + b"\1\0\0\0")),
        header(field(3, b"a" * 200, b"\0")),
        header(field(3, b"v" * 1, b"\1v\0" * 1300)),
        header(field(9, b"u", b"\0" * 4 + b"\1\0\0\0")),
        header(b"\xff" * 64),
    ],
)
def test_a_hostile_message_ends_the_connection(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        connected().feed(data)
    assert caught.value.code == "dbus"


@given(st.binary(max_size=300), st.integers(0, 3))
def test_no_bytes_raise_anything_else(noise: bytes, kind: int) -> None:
    connection = connected()
    data = [noise, header(noise[:200]), save()[:40] + noise, header(field(8, b"g", noise))][kind]
    with suppress(ProtocolError):
        connection.feed(data)


def test_an_array_that_never_ends_is_not_begun() -> None:
    """Of empty structures: jeepney would read it for good, from a body as from a header."""
    body = struct.pack("<II", 8, 0) + bytes(8)
    fields = field(8, b"g", b"\3a()\0")
    with pytest.raises(ProtocolError):
        connected().feed(header(fields, size=len(body)) + body)
