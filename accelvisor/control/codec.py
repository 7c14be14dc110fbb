"""Varlink's framing, sans-IO: JSON objects, each ended by one NUL (varlink.org, "Method call").

Bytes in, messages out; limits on bytes, nesting and the number of messages that wait. The bytes
of a message are bounded before they are kept, its depth before it is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from accelvisor.errors import ProtocolError
from accelvisor.limits import LIMITS

# Member names of varlink.org's grammar; used before a name is looked up or shown to anyone.
_INTERFACE = r"[A-Za-z](?:-*[A-Za-z0-9])*(?:\.[A-Za-z0-9](?:-*[A-Za-z0-9])*)+"
METHOD = re.compile(rf"({_INTERFACE})\.([A-Z][A-Za-z0-9]*)")

# Possessive, and an unclosed string ends with the text: no input makes this more than linear.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKET = re.compile(rb"[^\[\]{}]+")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Decoder:
    """Cuts a byte stream into JSON objects.

    Args:
        max_bytes: of one message without its NUL.
        max_depth: of nested arrays and objects.
        max_pending: messages that may be complete in one :meth:`feed`.
    """

    def __init__(
        self,
        *,
        max_bytes: int = LIMITS.admin_message_bytes,
        max_depth: int = LIMITS.admin_depth,
        max_pending: int = 64,
    ) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes
        self._max_depth = max_depth
        self._max_pending = max_pending

    @property
    def partial(self) -> bool:
        """The stream ended (or pauses) inside a message."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """All messages that ``data`` completes, in order.

        Raises:
            ProtocolError: the stream is not to be trusted any further, nor is the decoder.
        """
        self._buffer += data
        *complete, rest = self._buffer.split(b"\0")
        if len(rest) > self._max_bytes:
            raise _broken(f"a message exceeds {self._max_bytes} bytes", "message-too-long")
        if len(complete) > self._max_pending:
            raise _broken(f"more than {self._max_pending} calls at once", "too-many-calls")
        self._buffer = bytearray(rest)
        return [self._parse(bytes(raw)) for raw in complete]

    def _parse(self, raw: bytes) -> dict[str, Any]:
        if len(raw) > self._max_bytes:
            raise _broken(f"a message exceeds {self._max_bytes} bytes", "message-too-long")
        # The parser recurses: bound the depth first. Brackets inside strings do not count.
        if _deeper(raw, self._max_depth):
            raise _broken(f"nested deeper than {self._max_depth} levels", "message-too-deep")
        try:
            message = json.loads(
                raw.decode(), parse_constant=_no_constant, object_pairs_hook=_no_duplicates
            )
        except UnicodeDecodeError as error:
            raise _broken("not UTF-8", "message-syntax") from error
        except ValueError as error:
            raise _broken(f"not JSON: {error}", "message-syntax") from error
        if not isinstance(message, dict):
            raise _broken("not a JSON object", "message-syntax")
        if rb"\u" in raw and _SURROGATE.search(json.dumps(message, ensure_ascii=False)):
            raise _broken("a string holds half of a surrogate pair", "message-syntax")
        return message


def encode(message: Mapping[str, object], *, max_bytes: int = LIMITS.admin_message_bytes) -> bytes:
    """One message with its NUL.

    Raises:
        ProtocolError: ``message-too-long``.
    """
    raw = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > max_bytes:
        raise _broken(f"a message exceeds {max_bytes} bytes", "message-too-long")
    return raw + b"\0"


@dataclass(frozen=True, slots=True)
class Call:
    """One method call; ``interface`` and ``member`` are well-formed names."""

    interface: str
    member: str
    parameters: dict[str, Any] = field(default_factory=dict)
    oneway: bool = False
    more: bool = False
    upgrade: bool = False

    @property
    def method(self) -> str:
        return f"{self.interface}.{self.member}"


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply; an error when ``error`` is not None."""

    parameters: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    continues: bool = False


def parse_call(message: Mapping[str, Any]) -> Call:
    """A message as a call.

    Raises:
        ProtocolError: ``call-malformed``.
    """
    known = ("method", "parameters", "oneway", "more", "upgrade")
    for name in message:
        if name not in known:
            raise _broken("a call has an unknown member", "call-malformed")
    method = message.get("method")
    match = METHOD.fullmatch(method) if isinstance(method, str) and len(method) <= 256 else None
    if match is None:
        raise _broken('"method" is no interface and member name', "call-malformed")
    flags = {name: message.get(name, False) for name in ("oneway", "more", "upgrade")}
    parameters = message.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict) or not all(isinstance(v, bool) for v in flags.values()):
        raise _broken("a member of the call has the wrong type", "call-malformed")
    if flags["oneway"] and flags["more"]:
        raise _broken('"oneway" and "more" exclude each other', "call-malformed")
    return Call(match[1], match[2], parameters, **flags)


def parse_reply(message: Mapping[str, Any]) -> Reply:
    """A message as a reply.

    Raises:
        ProtocolError: ``reply-malformed``.
    """
    parameters = message.get("parameters")
    if parameters is None:
        parameters = {}
    error = message.get("error")
    continues = message.get("continues", False)
    if (
        not isinstance(parameters, dict)
        or not isinstance(continues, bool)
        or not (error is None or isinstance(error, str))
        or "method" in message
    ):
        raise _broken("a member of the reply has the wrong type", "reply-malformed")
    return Reply(parameters, error, continues)


def call_message(call: Call) -> dict[str, object]:
    """The wire form of a call."""
    message: dict[str, object] = {"method": call.method, "parameters": call.parameters}
    for name in ("oneway", "more", "upgrade"):
        if getattr(call, name):
            message[name] = True
    return message


def reply_message(reply: Reply) -> dict[str, object]:
    """The wire form of a reply."""
    message: dict[str, object] = {"parameters": reply.parameters}
    if reply.error is not None:
        message["error"] = reply.error
    if reply.continues:
        message["continues"] = True
    return message


def _deeper(raw: bytes, limit: int) -> bool:
    depth = 0
    for bracket in _NOT_BRACKET.sub(b"", _STRING.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            return True
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two members of one name would let two readers see two different messages."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member occurs twice")
    return members


def _broken(message: str, code: str) -> ProtocolError:
    return ProtocolError(message, code=code, where="admin")
