"""A small client of etcd v3: transactions and ranges over its JSON gateway. Standard library only.

etcd's own protocol is gRPC; the gateway (``/v3/kv/...``) maps it to JSON over HTTP, bytes in base64
and 64-bit integers as text (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/). Calls block;
the ledger runs them on threads. Endpoints are tried in order until one answers: a request that
failed at one may still have happened, which its caller finds out by comparing revisions.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from accelvisor.errors import ConfigError, UnavailableError
from accelvisor.limits import LIMITS


@dataclass(frozen=True, slots=True)
class Entry:
    key: bytes
    value: bytes
    revision: int  # of the last change of this key


@dataclass(frozen=True, slots=True)
class Range:
    """Keys from ``key`` to before ``end``, in their order; only ``key`` without an end.

    Args:
        limit: only so many; 0: all.
        last: the last ones, the highest key first.
    """

    key: bytes
    end: bytes = b""
    limit: int = 0
    last: bool = False

    def encode(self) -> dict[str, str]:
        """As the gateway reads it."""
        order = {"sort_order": "DESCEND", "sort_target": "KEY"} if self.last else {}
        named = {"key": _text(self.key), "range_end": _text(self.end), "limit": str(self.limit)}
        return {**named, **order}


def beginning_with(prefix: bytes) -> Range:
    """All keys with that prefix (its last byte must not be 255)."""
    return Range(prefix, prefix[:-1] + bytes([prefix[-1] + 1]))


class EtcdClient:
    """
    Args:
        endpoints: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        tls: for https: trusted CA, own certificate.
        request_s, total_s: seconds for one endpoint and for all.

    Raises:
        ConfigError: ``ledger-endpoint``, one is no such URL.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        request_s: float = LIMITS.etcd_request_s,
        total_s: float = LIMITS.etcd_total_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = [_endpoint(text) for text in endpoints]
        if not self._endpoints:
            raise _bad_endpoint("none is configured")
        self._tls, self._request_s, self._total_s, self._clock = tls, request_s, total_s, clock

    def read(self, ranges: Sequence[Range]) -> list[list[Entry]]:
        """All ranges at one revision, linearizable: a member without its quorum does not answer.

        Raises:
            UnavailableError: ``ledger-unreachable``, no endpoint answered in time.
        """
        asked = [{"requestRange": wanted.encode()} for wanted in ranges]
        answer = self._post("/v3/kv/txn", {"success": asked})
        try:
            found = [
                [_entry(kv) for kv in response["response_range"].get("kvs", ())]
                for response in answer["responses"]
            ]
            if len(found) != len(ranges):
                raise ValueError(f"{len(found)} answers to {len(ranges)} questions")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreachable(f"etcd answered something else: {error!r}") from error
        return found

    def swap(self, expected: Mapping[bytes, int], puts: Mapping[bytes, bytes]) -> bool:
        """Write ``puts`` if the keys in ``expected`` are at those revisions (0: not there).

        Returns:
            False: another was first, nothing was written.

        Raises:
            UnavailableError: ``ledger-unreachable``; it may have been written.
        """
        body = {
            "compare": [
                {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(number)}
                for key, number in expected.items()
            ],
            "success": [
                {"requestPut": {"key": _text(key), "value": _text(value)}}
                for key, value in puts.items()
            ],
        }
        return self._post("/v3/kv/txn", body).get("succeeded") is True

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        until = self._clock() + self._total_s
        failures = []
        for scheme, host, port in self._endpoints:
            left = min(self._request_s, until - self._clock())
            if left <= 0:
                break
            try:
                return self._ask(scheme, host, port, path, data, left)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{host}:{port}: {error or type(error).__name__}")
        raise _unreachable("; ".join(failures) or "no endpoint was left in time")

    def _ask(
        self, scheme: str, host: str, port: int, path: str, data: bytes, seconds: float
    ) -> dict[str, Any]:
        until = self._clock() + seconds
        connection = (
            http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
            if scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=seconds)
        )
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = b""
            # In pieces: the timeout of a socket is for each byte that trickles in.
            while piece := response.read1(64 * 1024):
                raw += piece
                if len(raw) > LIMITS.etcd_answer_bytes:
                    raise ValueError("the answer is too long")
                if self._clock() > until:
                    raise TimeoutError("timed out")
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {raw[:200].decode(errors='replace')}")
        answer = json.loads(raw)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return answer


def _endpoint(text: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _bad_endpoint(f"{text!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise _bad_endpoint(f"{text!r} is not http(s)://HOST:PORT")
    return parts.scheme, parts.hostname, port


def _entry(kv: Mapping[str, str]) -> Entry:
    return Entry(
        base64.b64decode(kv["key"]),
        base64.b64decode(kv.get("value", "")),
        int(kv["mod_revision"]),
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bad_endpoint(why: str) -> ConfigError:
    return ConfigError(f"etcd endpoints: {why}", code="ledger-endpoint", where="config")


def _unreachable(why: str) -> UnavailableError:
    return UnavailableError(
        f"etcd does not answer: {why}",
        code="ledger-unreachable",
        where="ledger",
        hint="until it does, no function can change its host; those that run go on",
    )
