"""What a host keeps of its verifications: the audit chain, and the nonces that were used.

The audit chain is a file that is only ever appended to; each record is on disk before the refusal
that it tells of is raised. A record that a crash cut short is cut off at the next start, and one
that could not be written at once: the next one follows what is whole.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accelvisor.daemon import atomic
from accelvisor.daemon.database import Database
from accelvisor.errors import SystemFailure
from accelvisor.frames import audit
from accelvisor.frames.audit import Event, Head
from accelvisor.frames.verify import UsedNonces

_NONCES = ("CREATE TABLE IF NOT EXISTS nonces (nonce BLOB PRIMARY KEY, until INTEGER) STRICT",)


class AuditFile:
    """Is an :class:`accelvisor.frames.audit.Sink`. Thread-safe.

    Raises:
        DataError: ``audit-damaged``, ``audit-broken``: what is there is not what was written.
        SystemFailure: ``audit-io``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._lost = False
        try:
            data = path.read_bytes() if path.exists() else b""
            records = list(audit.unpack(data))
            _, self.head = audit.verify(records)
            self._bytes = sum(len(audit.pack(record)) for record in records)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self._bytes)
        except OSError as error:
            raise _failed(path, error) from error

    def record(self, event: Event) -> None:
        """Append it; what passed need not be on disk at once, what was refused is.

        Raises:
            SystemFailure: ``audit-io``: it is not there, the next may be; ``audit-lost``: nothing
                more is recorded until a restart.
        """
        with self._lock:
            if self._lost:
                raise self._closed()
            record, head = self.head.append(event)
            data = audit.pack(record)
            try:
                atomic.write_all(self._fd, data, self._bytes)
                if event.code != "passed":
                    os.fdatasync(self._fd)
            except OSError as error:
                self._take_back()
                raise _failed(self.path, error) from error
            self._bytes += len(data)
            self.head = head

    def _take_back(self) -> None:
        """Of a record that failed nothing may stay: the next one would not follow it."""
        try:
            os.ftruncate(self._fd, self._bytes)
        except OSError as error:
            self._lost = True
            raise self._closed() from error

    def _closed(self) -> SystemFailure:
        return SystemFailure(
            "the audit log ends in a record that could not be written nor taken back",
            code="audit-lost",
            where=str(self.path),
            hint="nothing is loaded without it: mend the file system, then restart accelvisord",
        )

    def known(self) -> Head:
        """The chain's end, to be compared later."""
        return self.head

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)


class Nonces:
    """Is an :class:`accelvisor.frames.verify.UsedNonces`: nonces in a table until they expire.

    Raises:
        SystemFailure: ``audit-io``.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        # As :func:`_failed` for all of it: without the file nothing is loaded, whatever is wrong.
        self._db = Database(
            path, (_NONCES,), failed=partial(_failed, path),
            newer=lambda version: _failed(path, f"they are of version {version}"),
        )  # fmt: skip

    def seen(self, nonce: bytes) -> bool:
        """Whether it was used."""
        return bool(self._db.execute("SELECT 1 FROM nonces WHERE nonce = ?", (nonce,)))

    def use(self, nonce: bytes, until_ns: int) -> bool:
        """Use it up; False when it was used before."""
        self._db.execute("DELETE FROM nonces WHERE until < ?", (self._clock_ns(),))
        new = "INSERT OR IGNORE INTO nonces VALUES (?, ?) RETURNING 1"
        return bool(self._db.execute(new, (nonce, until_ns)))

    def close(self) -> None:
        self._db.close()


class FunctionNonces:
    """Nonces of one function: a move has one nonce, which each of its functions may use once."""

    def __init__(self, nonces: UsedNonces, function: str) -> None:
        self._nonces = nonces
        self._function = function.encode()

    def seen(self, nonce: bytes) -> bool:
        """Whether the function used it."""
        return self._nonces.seen(self._own(nonce))

    def use(self, nonce: bytes, until_ns: int) -> bool:
        """Use it up; False when the function used it before."""
        return self._nonces.use(self._own(nonce), until_ns)

    def _own(self, nonce: bytes) -> bytes:
        return hashlib.sha256(nonce + self._function).digest()


def _failed(path: Path, error: object) -> SystemFailure:
    return SystemFailure(
        f"the records of verifications cannot be kept: {error}",
        code="audit-io",
        where=str(path),
        hint="nothing is loaded without them: free some space, or mend the file system",
    )
