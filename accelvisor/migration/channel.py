"""TLS over a blocking socket, for bulk data in threads.

Python's ``SSLSocket`` sends each TLS record by itself and asks the kernel twice for each that it
receives. Here TLS works on memory, and the socket moves hundreds of KiB at a time: about three
times the rate for the same cryptography. One thread reads and writes a channel at a time;
:meth:`cut` may be called from any.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from uuid import UUID

from accelvisor.errors import AccelvisorError, UnavailableError
from accelvisor.limits import KIB, LIMITS, MIB
from accelvisor.migration.rates import Watch
from accelvisor.migration.tls import Credentials, refusal

_WHERE = "peer"
#: What the socket is asked for, and what collects before it is given away. Both stay in the cache.
_BATCH = 256 * KIB
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
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._batch = memoryview(bytearray(_BATCH))
        self._tls = credentials.context(server=server).wrap_bio(
            self._in, self._out, server_side=server
        )
        # A handshake is short: it must end within the time, however its bytes drip.
        self.watch = Watch(clock(), stall_s=LIMITS.peer_handshake_s, floor=MIB)
        self.key: bytes | None = None
        try:
            _tune(sock)
            self._handshake()
            self.key = credentials.peer_key(self._tls.getpeercert(binary_form=True))
            self.host = credentials.pins.host_of(self.key, expected)
        except (OSError, AccelvisorError) as error:
            self.close()
            raise refusal(error, "the other end") from error
        self.watch = Watch(clock(), stall_s=stall_s, floor=floor)
        credentials.hold(self)

    def _handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self._fill()
            except ssl.SSLError:
                # The alert that says why.
                with contextlib.suppress(AccelvisorError):
                    self.flush()
                raise
            else:
                self.flush()
                return

    # --- bytes -----------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt ``data`` (taken at once: it may change afterwards) and send when enough is there.

        Raises:
            UnavailableError: ``peer-lost``.
            DeadlineError: ``peer-stalled``.
            AccelvisorError: whatever it was :meth:`cut` with.
        """
        self._tls.write(data)
        if self._out.pending >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send all that was written; raises as :meth:`write`."""
        data = memoryview(self._out.read())
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
        """Fill ``view``; raises as :meth:`write`."""
        at, size = 0, len(view)
        read = self._tls.read
        while at < size:
            try:
                count = read(size - at, view[at:])
            except ssl.SSLWantReadError:
                self._fill()
                continue
            except ssl.SSLError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost(None)
            at += int(count)

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes; raises as :meth:`write`."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def _fill(self) -> None:
        """More bytes from the socket, at least one."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                count = self._sock.recv_into(self._batch)
            except TimeoutError:
                self._look()
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost(None)
            self._in.write(self._batch[:count])
            self.watch.moved(count, self._clock())
            return

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
        if isinstance(cause, ssl.SSLError):
            return refusal(cause, "the other end")
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
