"""Canonical msgpack: each value has exactly one encoding, and any other is refused.

What is signed must not have two readings, and two programs that hash the same value must get the
same bytes. So: maps have text keys in ascending order, integers take the shortest form, there are
no floats and no extension types, text is valid UTF-8, and size, depth and the number of values are
bounded. The format underneath is https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgpack

from accelvisor.errors import DataError
from accelvisor.limits import LIMITS

#: Integers of 64 bits, signed or not; maps with text keys.
Value: TypeAlias = "bool | int | str | bytes | Sequence[Value] | Mapping[str, Value] | None"

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


class _RefusedError(ValueError):
    """Raised inside msgpack's hooks; leaves this module as DataError."""


def encode(value: Value) -> bytes:
    """The one encoding of ``value``; the order in which a map was filled does not matter.

    Raises:
        DataError: ``document-invalid``, it holds what has no canonical form, or is nested too
            deeply.
    """
    out = bytes(msgpack.packb(_sorted(value, 0), use_bin_type=True))
    if len(out) > LIMITS.document_bytes:
        raise _invalid(f"it is longer than {LIMITS.document_bytes} bytes")
    return out


def decode(
    data: bytes | bytearray | memoryview,
    *,
    max_bytes: int = LIMITS.document_bytes,
    max_values: int = LIMITS.document_values,
    max_depth: int = LIMITS.document_depth,
) -> Any:
    """The value whose canonical encoding ``data`` is; arrays become lists.

    Raises:
        DataError: ``document-invalid``: too long, too deep, too many values, not msgpack, or not
            in canonical form. Nothing is kept of it.
    """
    if len(data) > max_bytes:
        raise _invalid(f"it is longer than {max_bytes} bytes")
    data = bytes(data)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=_map,
            ext_hook=_no_extension,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_ext_len=0,
            max_array_len=max_values,
            max_map_len=max_values,
        )
    except _RefusedError as error:
        raise _invalid(str(error)) from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # UnicodeDecodeError is a ValueError, and so are msgpack's own about lengths and leftovers.
        raise _invalid(f"it is no msgpack ({type(error).__name__})") from error
    _Walk(max_values, max_depth).value(value, 0)
    # The hooks saw keys and extensions. What is left is an integer or a length in a longer form.
    if bytes(msgpack.packb(value, use_bin_type=True)) != data:
        raise _invalid("a number or a length is not in its shortest form")
    return value


def _map(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    last: str | None = None
    # Once through: msgpack without its C extension gives a generator.
    for key, value in pairs:
        if not isinstance(key, str):
            raise _RefusedError("a key is no text")
        # Python compares text by code point, which is the order of its UTF-8 bytes too.
        if last is not None and key <= last:
            raise _RefusedError("keys are repeated or out of order")
        out[key] = value
        last = key
    return out


def _no_extension(code: int, data: bytes) -> Any:
    raise _RefusedError("it holds an extension type")


class _Walk:
    """Looks at every decoded value once; msgpack's own depth limit came before."""

    def __init__(self, most: int, depth: int) -> None:
        self._left = most
        self._depth = depth

    def value(self, value: Any, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise _invalid("it holds too many values")
        if depth > self._depth:
            raise _invalid("it is nested too deeply")
        # type, not isinstance: msgpack makes no subclasses, and a Timestamp must not pass.
        kind = type(value)
        if kind is dict:
            for item in value.values():
                self.value(item, depth + 1)
        elif kind is list:
            for item in value:
                self.value(item, depth + 1)
        elif kind not in (str, bytes, int, bool, type(None)):
            raise _invalid(f"it holds a {kind.__name__}")


def _sorted(value: Value, depth: int) -> Any:
    if depth > LIMITS.document_depth:
        raise _invalid("it is nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise _invalid("a number does not fit 64 bits")
        return int(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _invalid("a key is no text")
        return {_text(key): _sorted(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, Sequence):
        return [_sorted(item, depth + 1) for item in value]
    raise _invalid(f"it holds a {type(value).__name__}")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid("a text is not Unicode") from None
    return str(value)


def _invalid(why: str) -> DataError:
    return DataError(
        f"the document is not in canonical form: {why}",
        code="document-invalid",
        where="frames",
        hint="it was damaged, or not written by accelvisor",
    )
