"""What QEMU's GDBus sends on the bus, as it was seen, built with jeepney."""

from __future__ import annotations

from typing import Any

from jeepney import DBusAddress, Properties, new_method_call
from jeepney.low_level import HeaderFields, Message, MessageType, Parser

HANDSHAKE = b"\0AUTH EXTERNAL 30\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n"
BUS = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
VMSTATE = DBusAddress("/org/qemu/VMState1", ":1.2", "org.qemu.VMState1")


def bus_call(member: str, signature: str = "", *body: Any, serial: int = 1) -> bytes:
    """A call of the bus itself."""
    call = new_method_call(BUS, member, signature or None, body)
    return bytes(call.serialise(serial=serial))


def owners(serial: int = 7) -> bytes:
    return bus_call("ListQueuedOwners", "s", "org.qemu.VMState1", serial=serial)


def save(serial: int = 8) -> bytes:
    return bytes(new_method_call(VMSTATE, "Save").serialise(serial=serial))


def load(token: bytes, serial: int = 9) -> bytes:
    return bytes(new_method_call(VMSTATE, "Load", "ay", (token,)).serialise(serial=serial))


def get_all(interface: str = "org.qemu.VMState1", serial: int = 10) -> bytes:
    call = Properties(VMSTATE).get_all()
    call.body = (interface,)
    return bytes(call.serialise(serial=serial))


def messages(data: bytes) -> list[Message]:
    return list(Parser().feed(data))


def answer(data: bytes, serial: int) -> Any:
    """(error's name or "", body) of the reply to that call."""
    replies = {m.header.fields.get(HeaderFields.reply_serial): m for m in messages(data)}
    found = replies[serial]
    if found.header.message_type is MessageType.error:
        return found.header.fields[HeaderFields.error_name], found.body
    return "", found.body
