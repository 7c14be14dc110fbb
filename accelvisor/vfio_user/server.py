"""A blocking vfio-user server for one device on a UNIX socket: one client at a time.

One thread serves; a second, the *doorman*, only accepts. A client that comes while another is
connected waits a moment (its predecessor may be on its way out) and is then answered EBUSY to its
VERSION and closed, so that it never hangs. A client that breaks the protocol costs its own
connection and nothing else; after each one every map, interrupt and descriptor of it is gone.

Server-initiated DMA goes through :class:`Connection` and only between requests: QEMU's answer
needs the lock that it holds while it waits for ours, so asking inside a request would hang the
guest until the time is up. A device model schedules such work with :meth:`Server.defer`.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from accelvisor.errors import ConflictError, DeadlineError, ProtocolError
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.listen import Listener, listen
from accelvisor.vfio_user.messages import DMA_ACCESS, bad, parse_dma_access
from accelvisor.vfio_user.model import DeviceModel
from accelvisor.vfio_user.negotiate import Capabilities
from accelvisor.vfio_user.passing import receive, send
from accelvisor.vfio_user.protocol import Command
from accelvisor.vfio_user.requests import Requests, chunks
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import FrameReader, Message, close_fds, encode_error

log = logging.getLogger(__name__)

Task = Callable[["Connection"], None]

#: Requests that a client may pipeline while it owes the answer to our DMA request.
_MAX_BACKLOG = 4096
#: How long a new client waits for its predecessor to be cleaned up before it is told "busy".
_HANDOVER_S = 0.5
_TIMEVAL = struct.Struct("@ll")


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """Let a blocking receive fail with BlockingIOError after ``seconds``; 0 waits for ever.

    The kernel keeps the time, so that the common path costs no extra poll as settimeout would.
    """
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    if seconds > 0 and not whole and not micros:
        micros = 1
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, micros))


class Connection:
    """One client, from its connect to its end."""

    def __init__(
        self,
        sock: socket.socket,
        model: DeviceModel,
        *,
        capabilities: Capabilities | None = None,
        twin_socket: bool = False,
        reply_s: float = LIMITS.vfio_reply_s,
    ) -> None:
        self.session = ServerSession(
            model, capabilities=capabilities, twin=self._make_twin if twin_socket else None
        )
        self._sock = sock
        self._reply_s = reply_s
        self._reader = FrameReader()
        self._requests = Requests()
        self._backlog: deque[Message] = deque()
        self._tasks: deque[Task] = deque()
        self._in_request = False
        # Where our own requests go: the client's socket, or a second one if it was negotiated.
        self._ask_sock = sock
        self._ask_reader = self._reader

    def serve(self) -> None:
        """Answer requests until the client goes.

        Raises:
            ProtocolError: the client broke the protocol.
            OSError: of the socket.
        """
        if not self._greet():
            return
        while True:
            message = self._backlog.popleft() if self._backlog else None
            if message is None:
                message = receive(self._sock, self._reader)
                if message is None:
                    return
            if not self._answer(message):
                return
            while self._tasks:
                self._tasks.popleft()(self)

    def defer(self, task: Task) -> None:
        """Run ``task(connection)`` after the current request has been answered."""
        self._tasks.append(task)

    def close(self) -> None:
        """Release everything that the client had; may be called twice."""
        for message in self._backlog:
            message.close()
        self._backlog.clear()
        self._tasks.clear()
        self._reader.close()
        self._ask_reader.close()
        self.session.release()
        if self._ask_sock is not self._sock:
            self._ask_sock.close()
        self._sock.close()

    def dma_read(self, address: int, size: int) -> bytes:
        """Read client memory by DMA_READ messages of at most 64 KiB.

        Raises:
            Refusal: the client refused (EFAULT: not mapped).
            ConflictError: called inside a request.
            DeadlineError: no answer in time.
            ProtocolError: the answer is not one.
        """
        parts: list[bytes] = []
        for at, count in chunks(address, size, self._peer_transfer()):
            body = self._ask(Command.DMA_READ, DMA_ACCESS.pack(at, count))
            got_at, got, data = parse_dma_access(body, "DMA_READ")
            if (got_at, got, len(data)) != (at, count, count):
                raise bad("DMA_READ", f"{len(data)} bytes at {got_at:#x} for {count} at {at:#x}")
            parts.append(bytes(data))
        return b"".join(parts)

    def dma_write(self, address: int, data: bytes) -> None:
        """Write client memory by DMA_WRITE messages. Raises like :meth:`dma_read`."""
        view = memoryview(data)
        for at, count in chunks(address, len(data), self._peer_transfer()):
            start = at - address
            body = DMA_ACCESS.pack(at, count) + view[start : start + count]
            self._ask(Command.DMA_WRITE, body)

    # --- inside --------------------------------------------------------------------------------

    def _greet(self) -> bool:
        """Negotiate. A client that says nothing must not keep others out: it gets a deadline."""
        set_receive_timeout(self._sock, self._reply_s)
        try:
            message = receive(self._sock, self._reader)
        except BlockingIOError as error:
            raise DeadlineError(
                f"a client connected and did not say VERSION in {self._reply_s} s",
                code="vfio-user-deadline", where="vfio-user", hint="the client hangs",
            ) from error  # fmt: skip
        set_receive_timeout(self._sock, 0)
        return message is not None and self._answer(message)

    def _answer(self, message: Message) -> bool:
        """Handle one message; False when the connection is to be closed."""
        self._in_request = True
        try:
            reply = self.session.handle(message)
        finally:
            self._in_request = False
        if reply is None:
            return True
        try:
            send(self._sock, reply.data, reply.fds)
        finally:
            close_fds(reply.close_after)
        return not reply.close

    def _peer_transfer(self) -> int:
        agreement = self.session.agreement
        if agreement is None:
            raise ConflictError("DMA before the version was negotiated", where="vfio-user")
        return agreement.peer_max_transfer

    def _ask(self, command: int, body: bytes) -> memoryview:
        if self._in_request:
            raise ConflictError(
                "DMA messages cannot be sent inside a request",
                code="vfio-user-dma-in-request", where="vfio-user",
                hint="use Server.defer: QEMU cannot answer while it waits for our reply",
            )  # fmt: skip
        deadline = time.monotonic() + self._reply_s
        ident, data = self._requests.begin(command, body)
        try:
            send(self._ask_sock, data)
            while True:
                message = self._next_for_us(deadline)
                if not message.is_reply and self._ask_sock is self._sock:
                    self._queue(message)
                    continue
                completion = self._requests.finish(message)
                if completion.id == ident:
                    close_fds(completion.fds)
                    return completion.result()
        finally:
            set_receive_timeout(self._ask_sock, 0)

    def _next_for_us(self, deadline: float) -> Message:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise BlockingIOError
            set_receive_timeout(self._ask_sock, left)
            message = receive(self._ask_sock, self._ask_reader)
        except BlockingIOError as error:
            raise DeadlineError(
                f"the client did not answer a DMA request in {self._reply_s} s",
                code="vfio-user-deadline", where="vfio-user",
                hint="the client hangs, or waits for a reply of ours",
            ) from error  # fmt: skip
        if message is None:
            raise ConnectionResetError("the client went while it owed a DMA reply")
        return message

    def _queue(self, message: Message) -> None:
        if len(self._backlog) >= _MAX_BACKLOG:
            message.close()
            raise ProtocolError(
                f"{_MAX_BACKLOG} requests while a DMA reply is owed",
                code="vfio-user-framing", where="vfio-user", hint="the client floods",
            )  # fmt: skip
        self._backlog.append(message)

    def _make_twin(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ask_sock = ours
        self._ask_reader = FrameReader()
        return theirs.detach()


class Server:
    """Serves ``model`` at ``path`` until :meth:`stop`.

    Args:
        path: where to listen, or a ready :class:`Listener` (the server closes it).
        mode, group: of the socket, see :func:`accelvisor.vfio_user.listen.listen`.
        twin_socket: offer clients a socket of their own for our DMA requests.
        reply_s: seconds to wait for a client's answer to one DMA request.
    """

    def __init__(
        self,
        model: DeviceModel,
        path: str | os.PathLike[str] | Listener,
        *,
        mode: int = 0o600,
        group: int | None = None,
        capabilities: Capabilities | None = None,
        twin_socket: bool = False,
        reply_s: float = LIMITS.vfio_reply_s,
    ) -> None:
        self._model = model
        self._capabilities = capabilities
        self._twin_socket = twin_socket
        self._reply_s = reply_s
        # A model that breaks its contract fails here and not at the first client.
        ServerSession(model)
        if not isinstance(path, Listener):
            path = listen(path, mode=mode, group=group)
        self._listener = path
        self._door: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None

    @property
    def path(self) -> str:
        return str(self._listener.path)

    @property
    def connection(self) -> Connection | None:
        """The connected client, if any."""
        return self._connection

    def defer(self, task: Task) -> None:
        """Called by the model inside a request: run ``task`` once that request is answered.

        Raises:
            ConflictError: no client is connected.
        """
        if self._connection is None:
            raise ConflictError("no client is connected", where="vfio-user")
        self._connection.defer(task)

    def serve_forever(self) -> None:
        """Serve one client after the other in this thread until :meth:`stop`."""
        doorman = threading.Thread(target=self._accept, name="vfio-user-doorman", daemon=True)
        doorman.start()
        try:
            while (sock := self._door.get()) is not None:
                self._serve(sock)
                self._free.set()
        finally:
            self.stop()
            doorman.join()
            self._drain()
            self._listener.close()

    def stop(self) -> None:
        """Close the door and the connection; from any thread, any number of times."""
        self._stopping.set()
        self._door.put(None)
        self._free.set()
        with self._lock:
            for sock in (self._listener.socket, self._socket):
                if sock is not None:
                    try:
                        sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass

    # --- inside --------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        connection = Connection(
            sock, self._model,
            capabilities=self._capabilities, twin_socket=self._twin_socket, reply_s=self._reply_s,
        )  # fmt: skip
        with self._lock:
            self._connection, self._socket = connection, sock
        try:
            if not self._stopping.is_set():
                connection.serve()
        except (ProtocolError, DeadlineError) as error:
            log.warning("closing a vfio-user client: %s", error)
        except OSError as error:
            log.info("a vfio-user client went: %s", error)
        except Exception:
            log.exception("a vfio-user connection failed")
        finally:
            with self._lock:
                self._connection = self._socket = None
            connection.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.socket.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # Out of descriptors: they come back when the client goes.
                log.warning("accepting a vfio-user client failed: %s", error)
                self._stopping.wait(0.1)
                continue
            if self._free.wait(_HANDOVER_S) and not self._stopping.is_set():
                self._free.clear()
                self._door.put(sock)
            else:
                turn_away(sock)

    def _drain(self) -> None:
        while not self._door.empty():
            sock = self._door.get()
            if sock is not None:
                sock.close()


def turn_away(sock: socket.socket, number: int = errno.EBUSY, wait_s: float = 0.5) -> None:
    """Answer a client that cannot be served with an errno (EBUSY) to its VERSION, and close."""
    reader = FrameReader(limit=4096)
    try:
        set_receive_timeout(sock, wait_s)
        message = receive(sock, reader)
        if message is not None:
            message.close()
            send(sock, encode_error(message.id, message.command, number))
    except (OSError, ProtocolError) as error:
        log.info("turned a vfio-user client away: %s", error)
    finally:
        reader.close()
        sock.close()
