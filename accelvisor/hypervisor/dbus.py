"""A bus for one client, QEMU's ``dbus-vmstate``, sans-IO: bytes in, questions and bytes out.

QEMU looks for helpers on a D-Bus when it saves and when it loads a VM (QEMU: interop/dbus-vmstate):
it asks who owns ``org.qemu.VMState1``, reads each owner's ``Id``, and calls ``Save`` or ``Load``. A
message bus of our own needs no daemon, no policy and no name that another could take: the only
client is QEMU, and the only name on it is ours.

The client is a process that its guest may have taken over. jeepney parses its messages, and what
reaches jeepney is bounded before: the size of a message and of its header, and the signature of a
body, which is the one of a method that we have. (An array of empty structures never ends there.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from jeepney.low_level import (
    Header,
    HeaderFields,
    Message,
    MessageFlag,
    MessageType,
    calc_msg_size,
)
from jeepney.wrappers import DBusAddress, new_error, new_method_return, new_signal

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS

INTERFACE = "org.qemu.VMState1"
PATH = "/org/qemu/VMState1"
#: What ``id-list`` of the QEMU object names: without an owner of this Id nothing is saved.
IDENTITY = "accel"
REFUSED = "io.accelvisor.Refused"

_BUS = "org.freedesktop.DBus"
_PROPERTIES = "org.freedesktop.DBus.Properties"
#: Unique names: the client's, and ours as a peer on the bus.
_CLIENT = ":1.1"
_OURS = ":1.2"
#: A line of the authentication; the longest is ``AUTH EXTERNAL`` with a uid in hexadecimal.
_LINE_BYTES = 1024
#: Header fields of one message: four names of at most 255 bytes, a path, and little else.
_FIELDS_BYTES = 4096


class Question(Enum):
    """What QEMU wants to know."""

    OWNERS = auto()  # answered with a bool: are we there? "no" makes a migration or a save fail
    SAVE = auto()  # answered with bytes
    LOAD = auto()  # answered with None


@dataclass(frozen=True, slots=True)
class Request:
    """One question; ``data`` is what ``Load`` brings."""

    question: Question
    data: bytes
    message: Any  # the call, for the reply to refer to


class _Phase(Enum):
    NUL = auto()
    AUTHENTICATING = auto()
    DATA = auto()  # EXTERNAL without an initial response: the identity comes on a line of its own
    AUTHENTICATED = auto()
    MESSAGES = auto()


class Connection:
    """The server's side of one connection.

    Args:
        guid: 32 hexadecimal digits that name this bus.
        peer_uid: whose process it is, as the kernel says; an identity claimed by EXTERNAL must be
            this one. None: not known, none is accepted.
    """

    def __init__(self, guid: str, peer_uid: int | None) -> None:
        self._guid = guid
        self._uid = peer_uid
        self._phase = _Phase.NUL
        self._input = bytearray()
        self._output = bytearray()
        self._serial = 0

    @property
    def ready(self) -> bool:
        """Authenticated: messages may follow."""
        return self._phase is _Phase.MESSAGES

    def outgoing(self) -> bytes:
        """What is to be sent now; each byte is given out once."""
        data, self._output = bytes(self._output), bytearray()
        return data

    def feed(self, data: bytes) -> list[Request]:
        """The questions that ``data`` completes. What needs no decision is answered on the way.

        ProtocolError (``dbus``): the connection is not to be trusted any further.
        """
        self._input += data
        found: list[Request] = []
        while self._phase is not _Phase.MESSAGES:
            if not self._authenticate():
                return found
        while (raw := self._cut()) is not None:
            request = self._dispatch(_parse(raw))
            if request is not None:
                found.append(request)
        return found

    def owners(self, request: Request, present: bool) -> None:
        """Answer OWNERS."""
        self._return(request.message, "as", ([_OURS] if present else [],))

    def saved(self, request: Request, data: bytes) -> None:
        """Answer SAVE. ProtocolError (``dbus``) when it is more than QEMU takes."""
        if len(data) > LIMITS.vmstate_bytes:
            _broken(f"{len(data)} bytes of state, QEMU takes {LIMITS.vmstate_bytes}")
        self._return(request.message, "ay", (data,))

    def loaded(self, request: Request) -> None:
        """Answer LOAD."""
        self._return(request.message)

    def refuse(self, request: Request, text: str) -> None:
        """Answer SAVE or LOAD with an error whose text QEMU writes into its log."""
        self._error(request.message, REFUSED, text)

    # --- authentication (D-Bus specification, "Authentication Protocol") -------------------------

    def _authenticate(self) -> bool:
        """One step; False when it needs more bytes."""
        if self._phase is _Phase.NUL:
            if not self._input:
                return False
            if self._input[0] != 0:
                _broken("the client does not begin with a NUL")
            del self._input[0]
            self._phase = _Phase.AUTHENTICATING
        end = self._input.find(b"\r\n")
        if end < 0 or end > _LINE_BYTES:
            if len(self._input) > _LINE_BYTES:
                _broken("a line of the authentication does not end")
            return False
        line = bytes(self._input[:end])
        del self._input[: end + 2]
        try:
            words = line.decode("ascii").split(" ")
        except UnicodeDecodeError:
            words = [""]
        self._say(self._authentication(words))
        return True

    def _authentication(self, words: list[str]) -> str:
        """The answer to one line; empty for none."""
        verb, arguments = words[0], words[1:]
        if self._phase is _Phase.AUTHENTICATED:
            if verb == "BEGIN":
                self._phase = _Phase.MESSAGES
                return ""
            if verb == "NEGOTIATE_UNIX_FD":
                return "ERROR no descriptors here"
        if verb == "AUTH":
            return self._mechanism(arguments)
        if verb == "DATA" and self._phase is _Phase.DATA:
            return self._external(arguments[0] if arguments else "")
        if verb in ("CANCEL", "ERROR"):
            return self._rejected()
        if verb == "BEGIN":
            _broken("the client begins without having authenticated itself")
        return "ERROR"

    def _mechanism(self, arguments: list[str]) -> str:
        match arguments:
            case ["EXTERNAL"]:
                self._phase = _Phase.DATA
                return "DATA"
            case ["EXTERNAL", identity]:
                return self._external(identity)
            case ["ANONYMOUS", *_]:
                # Who it is was decided by whoever let it connect.
                return self._accepted()
        return self._rejected()

    def _external(self, identity: str) -> str:
        """``identity``: a uid in decimal digits, these in hexadecimal; empty: the peer's own."""
        try:
            claimed = bytes.fromhex(identity).decode("ascii")
        except ValueError:
            return self._rejected()
        if self._uid is None or claimed not in ("", str(self._uid)):
            return self._rejected()
        return self._accepted()

    def _accepted(self) -> str:
        self._phase = _Phase.AUTHENTICATED
        return f"OK {self._guid}"

    def _rejected(self) -> str:
        self._phase = _Phase.AUTHENTICATING
        return "REJECTED EXTERNAL ANONYMOUS"

    def _say(self, line: str) -> None:
        if line:
            self._output += line.encode() + b"\r\n"

    # --- messages --------------------------------------------------------------------------------

    def _cut(self) -> bytes | None:
        """The next whole message's bytes; None while it is incomplete."""
        if len(self._input) < 16:
            return None
        order = {ord("l"): "<", ord("B"): ">"}.get(self._input[0])
        if order is None or self._input[3] != 1:
            _broken("a message of another protocol")
        (fields,) = struct.unpack_from(f"{order}I", self._input, 12)
        size: int = calc_msg_size(bytes(self._input[:16]))
        if fields > _FIELDS_BYTES or size > LIMITS.dbus_message_bytes:
            _broken(f"a message of {size} bytes, {fields} of them header fields")
        if len(self._input) < size:
            return None
        raw = bytes(self._input[:size])
        if b"()" in raw[16 : 16 + fields]:
            _broken("an empty structure in a header")
        del self._input[:size]
        return raw

    def _dispatch(self, message: Any) -> Request | None:
        """Answer a call, or return what somebody else has to answer."""
        header = message.header
        if header.message_type is not MessageType.method_call:
            return None  # a bus forwards signals and replies; here is nobody to forward them to
        fields = header.fields
        interface = fields.get(HeaderFields.interface, "")
        member = fields.get(HeaderFields.member, "")
        call = _CALLS.get((interface, member))
        if call is None:
            text = f"{interface}.{member}: there is no such method on this bus"
            self._error(message, "org.freedesktop.DBus.Error.UnknownMethod", text)
            return None
        signature, answer = call
        if fields.get(HeaderFields.signature, "") != signature:
            text = f"{member} takes ({signature})"
            self._error(message, "org.freedesktop.DBus.Error.InvalidArgs", text)
            return None
        return answer(self, message)

    def _return(self, call: Any, signature: str | None = None, body: tuple[Any, ...] = ()) -> None:
        self._send(call, new_method_return(call, signature, body))

    def _error(self, message: Any, name: str, text: str) -> None:
        self._send(message, new_error(message, name, "s", (text,)))

    def _send(self, call: Any, reply: Any) -> None:
        if call.header.flags & MessageFlag.no_reply_expected:
            return
        destination = call.header.fields.get(HeaderFields.destination, _BUS)
        reply.header.fields[HeaderFields.sender] = destination
        reply.header.fields[HeaderFields.destination] = _CLIENT
        self._put(reply)

    def _put(self, message: Any) -> None:
        self._serial += 1
        self._output += message.serialise(serial=self._serial)

    # --- the methods -----------------------------------------------------------------------------

    def _hello(self, message: Any) -> None:
        self._return(message, "s", (_CLIENT,))
        acquired = new_signal(
            DBusAddress("/org/freedesktop/DBus", interface=_BUS), "NameAcquired", "s", (_CLIENT,)
        )
        acquired.header.fields[HeaderFields.sender] = _BUS
        acquired.header.fields[HeaderFields.destination] = _CLIENT
        self._put(acquired)

    def _queued_owners(self, message: Any) -> Request | None:
        if message.body[0] == INTERFACE:
            return Request(Question.OWNERS, b"", message)
        self._no_owner(message)
        return None

    def _name_owner(self, message: Any) -> None:
        name = message.body[0]
        if name in (INTERFACE, _OURS):
            self._return(message, "s", (_OURS,))
        elif name in (_BUS, _CLIENT):
            self._return(message, "s", (name,))
        else:
            self._no_owner(message)

    def _no_owner(self, message: Any) -> None:
        text = f"nobody has the name {message.body[0][:255]}"
        self._error(message, "org.freedesktop.DBus.Error.NameHasNoOwner", text)

    def _has_owner(self, message: Any) -> None:
        there = message.body[0] in (INTERFACE, _OURS, _BUS, _CLIENT)
        self._return(message, "b", (there,))

    def _list_names(self, message: Any) -> None:
        self._return(message, "as", ([_BUS, _CLIENT, _OURS, INTERFACE],))

    def _request_name(self, message: Any) -> None:
        # DBUS_REQUEST_NAME_REPLY_EXISTS: every name that matters here is ours.
        self._return(message, "u", (3,))

    def _start_service(self, message: Any) -> None:
        # DBUS_START_REPLY_ALREADY_RUNNING.
        self._return(message, "u", (2,))

    def _get_id(self, message: Any) -> None:
        self._return(message, "s", (self._guid,))

    def _acknowledge(self, message: Any) -> None:
        self._return(message)

    def _get(self, message: Any) -> None:
        if message.body == (INTERFACE, "Id"):
            self._return(message, "v", (("s", IDENTITY),))
        else:
            text = f"there is no property {'.'.join(message.body)[:255]}"
            self._error(message, "org.freedesktop.DBus.Error.UnknownProperty", text)

    def _get_all(self, message: Any) -> None:
        known = {"Id": ("s", IDENTITY)} if message.body[0] == INTERFACE else {}
        self._return(message, "a{sv}", (known,))

    def _save(self, message: Any) -> Request:
        return Request(Question.SAVE, b"", message)

    def _load(self, message: Any) -> Request:
        return Request(Question.LOAD, bytes(message.body[0]), message)


#: (interface, member) -> (signature, what answers it).
_CALLS: dict[tuple[str, str], tuple[str, Callable[[Connection, Any], Request | None]]] = {
    (_BUS, "Hello"): ("", Connection._hello),
    (_BUS, "ListQueuedOwners"): ("s", Connection._queued_owners),
    (_BUS, "GetNameOwner"): ("s", Connection._name_owner),
    (_BUS, "NameHasOwner"): ("s", Connection._has_owner),
    (_BUS, "ListNames"): ("", Connection._list_names),
    (_BUS, "RequestName"): ("su", Connection._request_name),
    (_BUS, "StartServiceByName"): ("su", Connection._start_service),
    (_BUS, "GetId"): ("", Connection._get_id),
    # Nobody sends signals here, so there is nothing that a match could select.
    (_BUS, "AddMatch"): ("s", Connection._acknowledge),
    (_BUS, "RemoveMatch"): ("s", Connection._acknowledge),
    ("org.freedesktop.DBus.Peer", "Ping"): ("", Connection._acknowledge),
    (_PROPERTIES, "Get"): ("ss", Connection._get),
    (_PROPERTIES, "GetAll"): ("s", Connection._get_all),
    (INTERFACE, "Save"): ("", Connection._save),
    (INTERFACE, "Load"): ("ay", Connection._load),
}
_TEXTS = frozenset(HeaderFields) - {HeaderFields.reply_serial, HeaderFields.unix_fds}
_SIGNATURES = frozenset(signature for signature, _ in _CALLS.values())


def _parse(raw: bytes) -> Any:
    try:
        header, _ = Header.from_buffer(raw)
        # A field's variant may hold any type.
        texts = (value for key, value in header.fields.items() if key in _TEXTS)
        if not all(isinstance(text, str) for text in texts):
            _broken("a header field that is no text")
        if header.message_type is not MessageType.method_call:
            return Message(header, ())
        if header.fields.get(HeaderFields.unix_fds, 0) != 0:
            _broken("a message with descriptors")
        if header.fields.get(HeaderFields.signature, "") not in _SIGNATURES:
            return Message(header, ())  # it is answered without a look at its body
        return Message.from_buffer(raw)
    except ProtocolError:
        raise
    except Exception as error:
        # jeepney has no error of its own: struct.error, KeyError, AssertionError and more.
        _broken(f"a malformed message: {type(error).__name__}: {error}")


def _broken(text: str) -> NoReturn:
    raise ProtocolError(f"QEMU's D-Bus: {text}", code="dbus", where="vmstate")
