"""A bulk connection for threads: mutual TLS 1.3 to know each other, then sealed records.

Everything works on memory and the socket moves hundreds of KiB at a time; Python's own
``SSLSocket`` would send each 16 KiB by itself and ask the kernel twice for each that it receives.
One thread reads and writes a channel at a time; :meth:`Channel.cut` may be called from any.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from accelvisor.errors import AccelvisorError, UnavailableError
from accelvisor.limits import KIB, LIMITS, MIB
from accelvisor.migration.rates import Watch
from accelvisor.migration.records import (
    LENGTH,
    OVERHEAD,
    RECORD_BYTES,
    SECRET_BYTES,
    SLACK,
    TAG_BYTES,
    Bytes,
    Opener,
    Sealer,
    broken,
    keys,
    record_length,
)
from accelvisor.migration.tls import Credentials, refusal

_WHERE = "peer"
T = TypeVar("T")
#: What the socket is asked for, and what collects before it is given away. Both stay in the cache.
_BATCH = RECORD_BYTES
#: Two of the longest records, and what else came with them.
_ROOM = 2 * (RECORD_BYTES + 2 * OVERHEAD + SLACK) + 8 * KIB
#: What may come along when the rest of a long record is asked for: the next message, no more, so
#: that little of the record after it is left over. Short ones are asked for by the dozen.
_AHEAD = 2 * OVERHEAD + 40
_AT_LEAST = 8 * KIB
_WORTH_WAITING = 32 * KIB
#: How often a waiting thread looks at its watch.
_SLICE_S = 0.2


class Channel:
    """One bulk connection to a host whose key was looked at.

    Args:
        sock: connected; the channel owns it from now on.
        credentials: who we are and whom we let in.
        server: we were connected to.
        clock: seconds, monotonic.
        expected: the host that must be there; None lets in every trusted one.

    Raises:
        As :func:`accelvisor.migration.link.connect`; the handshake is in the constructor.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        *,
        server: bool,
        clock: Callable[[], float],
        expected: UUID | None = None,
        stall_s: float = LIMITS.bulk_stall_s,
        floor: int = LIMITS.bulk_floor_bytes,
    ) -> None:
        self._sock = sock
        self._clock = clock
        self._error: AccelvisorError | None = None
        self._lock = threading.Lock()
        self._out = memoryview(bytearray(_ROOM))
        self._filled = 0
        self._raw = memoryview(bytearray(_ROOM))
        self._at = self._end = 0  # what came and was not opened is _raw[_at:_end]
        self._low = 1  # bytes that must be there for the kernel to wake us
        self._plain = memoryview(b"")  # what was opened and not read
        # A handshake is short: it must end within the time, however its bytes drip.
        self.watch = Watch(clock(), stall_s=LIMITS.peer_handshake_s, floor=MIB)
        self.key: bytes | None = None
        try:
            _tune(sock)
            self._meet(credentials, server, expected)
        except (OSError, AccelvisorError) as error:
            self.close()
            raise refusal(error, "the other end") from error
        self.watch = Watch(clock(), stall_s=stall_s, floor=floor)
        credentials.hold(self)

    # --- TLS -------------------------------------------------------------------------------------

    def _meet(self, credentials: Credentials, server: bool, expected: UUID | None) -> None:
        """Handshake, a look at the key, and the secret of the records."""
        come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = credentials.context(server=server).wrap_bio(come, go, server_side=server)
        self._drive(tls.do_handshake, come, go)
        self.key = credentials.peer_key(tls.getpeercert(binary_form=True))
        self.host = credentials.pins.host_of(self.key, expected)
        if server:
            secret = os.urandom(SECRET_BYTES)
            tls.write(secret)
            self._push(memoryview(go.read()))
        else:
            secret = self._drive(lambda: tls.read(SECRET_BYTES), come, go)
            if len(secret) != SECRET_BYTES:
                raise broken("the records' secret is cut")
        first, second = keys(secret)
        mine, theirs = (second, first) if server else (first, second)
        self._sealer, self._opener = Sealer(mine), Opener(theirs)
        # Records may have come right behind.
        rest = come.read()
        self._raw[: len(rest)] = rest
        self._at, self._end = 0, len(rest)

    def _drive(self, step: Callable[[], T], come: ssl.MemoryBIO, go: ssl.MemoryBIO) -> T:
        """Repeat a step of TLS until it has what it needs."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._push(memoryview(go.read()))
                # Few at a time: what comes behind TLS must fit.
                come.write(self._raw[: self._receive(self._raw[: 4 * KIB])])
            except ssl.SSLError:
                # The alert that says why.
                with contextlib.suppress(AccelvisorError):
                    self._push(memoryview(go.read()))
                raise
            else:
                self._push(memoryview(go.read()))
                return result

    # --- bytes -----------------------------------------------------------------------------------

    def write(self, data: Bytes) -> None:
        """Seal ``data`` (taken at once: it may change afterwards) and send when enough is there.

        Raises:
            UnavailableError: ``peer-lost``.
            DeadlineError: ``peer-stalled``.
            AccelvisorError: whatever it was :meth:`cut` with.
        """
        for start in range(0, len(data), RECORD_BYTES):
            part = data[start : start + RECORD_BYTES]
            if self._filled + len(part) + OVERHEAD + SLACK > _ROOM:
                self.flush()
            self._filled += self._sealer.seal(part, self._out[self._filled :])
            if self._filled >= _BATCH:
                self.flush()

    def flush(self) -> None:
        """Send all that was written; raises as :meth:`write`."""
        filled, self._filled = self._filled, 0
        self._push(self._out[:filled])

    def _push(self, data: memoryview) -> None:
        while data:
            try:
                sent = self._sock.send(data)
            except TimeoutError:
                self._look()
                continue
            except OSError as error:
                raise self._lost(error) from error
            data = data[sent:]
            self.watch.moved(sent, self._clock())
        if self._error is not None:
            raise self._error

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``; raises as :meth:`write`, and ProtocolError ``peer-record``.

        A record that fits is opened in its place.
        """
        while view:
            if not self._plain:
                self._need(LENGTH.size)
                length = record_length(self._raw[self._at : self._at + LENGTH.size])
                self._need(LENGTH.size + length)
                begin = self._at + LENGTH.size
                record = self._raw[begin : begin + length]
                self._at = begin + length
                size = length - TAG_BYTES
                if size <= len(view):
                    self._opener.open(record, view[:size])
                    view = view[size:]
                    continue
                self._plain = memoryview(bytearray(size))
                self._opener.open(record, self._plain)
            count = min(len(view), len(self._plain))
            view[:count] = self._plain[:count]
            self._plain, view = self._plain[count:], view[count:]

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes; raises as :meth:`read_into`."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def _need(self, count: int) -> None:
        """Have at least ``count`` bytes from ``_at`` on."""
        while self._end - self._at < count:
            if self._at == self._end:
                self._at = self._end = 0
            most = max(count + _AHEAD, _AT_LEAST)
            if self._at + most > _ROOM:
                left = self._end - self._at
                self._raw[:left] = bytes(self._raw[self._at : self._end])
                self._at, self._end = 0, left
            self._wake_at(self._at + count - self._end)
            self._end += self._receive(self._raw[self._end : self._at + most])

    def _wake_at(self, count: int) -> None:
        """Let the kernel wake us when all that is missing is there, and not for each packet."""
        count = min(count, _BATCH)
        if count != self._low and (count >= _WORTH_WAITING or self._low > count):
            self._low = count if count >= _WORTH_WAITING else 1
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._low)

    def _receive(self, room: memoryview) -> int:
        """Bytes from the socket into ``room``, at least one; how many."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                count = self._sock.recv_into(room)
            except TimeoutError:
                self._look()
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost(None)
            self.watch.moved(count, self._clock())
            return count

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        self.watch.check(self._clock())

    # --- the end ---------------------------------------------------------------------------------

    def cut(self, error: AccelvisorError) -> None:
        """Have every call, also one that waits, raise ``error``; from any thread, idempotent."""
        with self._lock:
            if self._error is None:
                self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _lost(self, cause: Exception | None) -> AccelvisorError:
        if self._error is not None:
            return self._error
        return UnavailableError(
            f"the bulk connection broke{f': {cause}' if cause else ''}",
            code="peer-lost",
            where=_WHERE,
            hint="the transfer can be resumed",
        )


def _tune(sock: socket.socket) -> None:
    sock.settimeout(_SLICE_S)
    # The buffers' sizes are left to the kernel: it fits them to the path, and only while nobody
    # sets them.
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
