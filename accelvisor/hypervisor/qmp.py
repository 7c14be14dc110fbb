"""QEMU's monitor protocol (QMP), client side, sans-IO: bytes in, greeting, replies and events out.

QEMU sends events whenever it likes: before the greeting is answered, and between a command and its
reply. So every command carries an ``id`` and only the reply that echoes it is its reply; anything
with an ``event`` member is an event wherever it stands (QEMU: interop/qmp-spec).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS

#: ``query-qmp-schema`` is the longest answer there is, about 250 KiB in QEMU 11.
MESSAGE_BYTES = 4 * LIMITS.admin_message_bytes


@dataclass(frozen=True, slots=True)
class Greeting:
    """QEMU's first message: its version and capabilities (``oob`` or none)."""

    version: tuple[int, int, int]
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to the command ``id``: ``value``, or an error of that class."""

    id: int
    value: Any = None
    error_class: str = ""
    error_text: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error_class)


@dataclass(frozen=True, slots=True)
class Event:
    """``time_s`` is QEMU's clock, seconds since 1970 (0.0 when it gave none)."""

    name: str
    data: Mapping[str, Any]
    time_s: float


class Codec:
    """One connection's worth of protocol state: the bytes of a partial line, the next id."""

    def __init__(self, *, max_bytes: int = MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes
        self._next_id = 1
        self._open: set[int] = set()

    def command(self, name: str, arguments: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """(id, the bytes to send)."""
        identifier = self._next_id
        self._next_id += 1
        message: dict[str, Any] = {"execute": name, "id": identifier}
        if arguments:
            message["arguments"] = dict(arguments)
        self._open.add(identifier)
        return identifier, json.dumps(message).encode() + b"\r\n"

    def abandon(self, identifier: int) -> None:
        """Nobody waits for that reply any more; it will be dropped when it comes."""
        self._open.discard(identifier)

    def feed(self, data: bytes) -> list[Greeting | Reply | Event]:
        """All messages that ``data`` completes, in order, replies that nobody waits for left out.

        ProtocolError (``qmp``): the connection is not to be trusted any further.
        """
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        if len(rest) > self._max_bytes or any(len(line) > self._max_bytes for line in lines):
            _broken(f"a message exceeds {self._max_bytes} bytes")
        self._buffer = bytearray(rest)
        found = (self._parse(bytes(line)) for line in lines if line.strip())
        return [message for message in found if message is not None]

    def _parse(self, line: bytes) -> Greeting | Reply | Event | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            _broken(f"not JSON: {error}")
        if not isinstance(message, dict):
            _broken("a message is no object")
        if "event" in message:
            return _event(message)
        if "QMP" in message:
            return _greeting(message["QMP"])
        return self._reply(message)

    def _reply(self, message: dict[str, Any]) -> Reply | None:
        identifier = message.get("id")
        if "error" in message and identifier is None:
            # QEMU could not even read the id: what we sent was no command.
            _broken(f"QEMU understood nothing: {message['error']}")
        if type(identifier) is not int or not 0 < identifier < self._next_id:
            _broken(f"a reply to a command that was never sent (id {identifier!r})")
        if identifier not in self._open:
            return None
        self._open.discard(identifier)
        if "error" in message:
            error = message["error"]
            if not isinstance(error, dict):
                _broken("an error is no object")
            kind = str(error.get("class") or "GenericError")
            return Reply(identifier, None, kind, str(error.get("desc", "")))
        if "return" not in message:
            _broken("a reply has neither return nor error")
        return Reply(identifier, message["return"])


def _event(message: dict[str, Any]) -> Event:
    name, data, stamp = message["event"], message.get("data", {}), message.get("timestamp", {})
    if not (isinstance(name, str) and isinstance(data, dict) and isinstance(stamp, dict)):
        _broken("an event is malformed")
    seconds, micros = stamp.get("seconds", 0), stamp.get("microseconds", 0)
    if not (isinstance(seconds, int) and isinstance(micros, int)) or seconds < 0 or micros < 0:
        # -1 says that QEMU's host could not read its clock.
        seconds = micros = 0
    return Event(name, data, float(seconds) + micros / 1e6)


def _greeting(value: Any) -> Greeting:
    try:
        version = value["version"]["qemu"]
        numbers = (int(version["major"]), int(version["minor"]), int(version["micro"]))
        return Greeting(numbers, tuple(str(name) for name in value["capabilities"]))
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        _broken(f"the greeting is malformed: {error!r}")


def _broken(text: str) -> NoReturn:
    raise ProtocolError(f"QEMU's monitor: {text}", code="qmp", where="qmp")
