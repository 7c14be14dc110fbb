"""The in-tree client: drives a function over its vfio-user socket without QEMU.

Blocking; every call has a deadline. While it waits for its own reply it answers the server's DMA
requests, and :meth:`Client.pump` does so in between. One thread at a time may be in a call.

Errors: Refusal (the device answered with an errno), PayloadError (one answer is wrong; like
Refusal it leaves the connection usable), ProtocolError (the stream is broken), DeadlineError (no
answer in time), UnavailableError (no server, or it went). After the last three it is closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType

from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DeadlineError,
    ProtocolError,
    UnavailableError,
)
from accelvisor.limits import LIMITS
from accelvisor.vfio_user import messages
from accelvisor.vfio_user.client_features import FeatureCalls
from accelvisor.vfio_user.client_session import ClientSession, Outbound, check_read_reply
from accelvisor.vfio_user.dma import DmaRange
from accelvisor.vfio_user.messages import DmaMap, DmaUnmap, IrqRequest, RegionWrite, bad
from accelvisor.vfio_user.model import DeviceInfo, IoFd, IrqInfo, Refusal, RegionInfo
from accelvisor.vfio_user.negotiate import Agreement, Capabilities
from accelvisor.vfio_user.passing import receive, send
from accelvisor.vfio_user.protocol import (
    Command,
    DmaFlag,
    IrqSet,
    RegionFlag,
    UnmapFlag,
)
from accelvisor.vfio_user.requests import Completion
from accelvisor.vfio_user.server import set_receive_timeout
from accelvisor.vfio_user.wire import FrameReader, close_fds

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Client(FeatureCalls):
    """A connection to one function.

    Args:
        target: path of the socket, or a connected socket (the client closes it).
        timeout_s: deadline of each call in seconds, connecting included.
        capabilities: what to propose; None for everything that this client can do.

    Raises:
        UnavailableError: nobody serves the path.
        Refusal: EBUSY when another client is connected.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | socket.socket,
        *,
        timeout_s: float = LIMITS.vfio_reply_s,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.session = ClientSession(capabilities=capabilities)
        self._timeout_s = timeout_s
        self._reader = FrameReader(first=4096)
        self._maps: dict[int, mmap.mmap] = {}
        self._twin: socket.socket | None = None
        self._twin_reader = FrameReader()
        self._closed = False
        self._sock = target if isinstance(target, socket.socket) else _connect(target, timeout_s)
        self._sock.setblocking(True)
        set_receive_timeout(self._sock, timeout_s)
        try:
            self._negotiate()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def agreement(self) -> Agreement:
        """What was negotiated."""
        agreement = self.session.agreement
        if agreement is None:
            raise ConflictError("the version was not negotiated", where="vfio-user client")
        return agreement

    def fileno(self) -> int:
        """The socket on which the server's own requests come, for a poll before :meth:`pump`."""
        return (self._twin or self._sock).fileno()

    @property
    def buffered(self) -> bool:
        """True when a request of the server has been read in part: :meth:`pump` before a poll."""
        return not (self._twin_reader if self._twin is not None else self._reader).is_idle

    def close(self) -> None:
        """End the connection and forget its maps; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._twin_reader.close()
        self._sock.close()
        if self._twin is not None:
            self._twin.close()
        self._forget(self.session.memory.clear())

    # --- information ---------------------------------------------------------------------------

    def device_info(self) -> DeviceInfo:
        body = messages.DEVICE_INFO.pack(messages.DEVICE_INFO.size, 0, 0, 0)
        return messages.parse_device_info(self.call(Command.DEVICE_GET_INFO, body))

    def region_info(self, index: int) -> RegionInfo:
        """The region's description. Its ``fd``, if any, is the caller's to close."""
        argsz = messages.REGION_INFO.size
        for _ in range(2):
            body = messages.REGION_INFO.pack(argsz, 0, index, 0, 0, 0)
            done = self._call(Command.DEVICE_GET_REGION_INFO, body)
            try:
                reply = messages.parse_region_info(done.result())
                if reply.info.index != index or len(done.fds) > 1 or reply.offset:
                    raise bad("DEVICE_GET_REGION_INFO", f"answers for region {reply.info.index}")
            except AccelvisorError:
                close_fds(done.fds)
                raise
            if reply.argsz <= argsz:
                fd = done.fds[0] if done.fds else None
                info = reply.info
                flags = info.flags & ~int(RegionFlag.CAPS)
                return RegionInfo(index, flags, info.size, fd, info.sparse)
            close_fds(done.fds)
            argsz = min(reply.argsz, LIMITS.vfio_transfer_bytes)
        raise bad("DEVICE_GET_REGION_INFO", f"region {index} needs more room each time")

    def irq_info(self, index: int) -> IrqInfo:
        body = messages.IRQ_INFO.pack(messages.IRQ_INFO.size, 0, index, 0)
        return messages.parse_irq_info(self.call(Command.DEVICE_GET_IRQ_INFO, body))

    def region_io_fds(self, index: int) -> tuple[IoFd, ...]:
        """Descriptors that stand for parts of a region; the caller closes each distinct one."""
        argsz = messages.IO_FDS.size + 64 * messages.IO_FD.size
        done = self._call(
            Command.DEVICE_GET_REGION_IO_FDS, messages.IO_FDS.pack(argsz, 0, index, 0)
        )
        try:
            return messages.parse_io_fds(done.result(), done.fds)
        except ProtocolError:
            close_fds(done.fds)
            raise

    # --- regions -------------------------------------------------------------------------------

    def region_read(self, index: int, offset: int, count: int) -> bytes:
        """``count`` bytes of a region, in as many messages as were agreed to be needed."""
        step = self.agreement.peer_max_transfer
        if count <= step:
            return bytes(self._read(index, offset, count))
        parts = [
            bytes(self._read(index, offset + at, min(step, count - at)))
            for at in range(0, count, max(step, 1))
        ]
        return b"".join(parts)

    def region_write(
        self, index: int, offset: int, data: bytes | memoryview, *, posted: bool = False
    ) -> None:
        """Write a region. ``posted`` asks for no reply: an error then stays unheard."""
        step = max(self.agreement.peer_max_transfer, 1)
        for at in range(0, len(data), step):
            part = data[at : at + step]
            body = messages.pack_access(offset + at, index, len(part), part)
            self.call(Command.REGION_WRITE, body, no_reply=posted)

    def region_write_multi(self, writes: list[RegionWrite], *, posted: bool = False) -> None:
        """Several writes of up to 8 bytes in one message. Refusal where it was not negotiated."""
        body = self.session.region_write_multi(writes)
        reply = self.call(Command.REGION_WRITE_MULTI, body, no_reply=posted)
        if not posted and bytes(reply) != messages.MULTI.pack(len(writes)):
            raise bad("REGION_WRITE_MULTI", "the server did not do every write")

    def read32(self, index: int, offset: int) -> int:
        value: int = _U32.unpack(self._read(index, offset, 4))[0]
        return value

    def write32(self, index: int, offset: int, value: int) -> None:
        self.call(Command.REGION_WRITE, messages.ACCESS.pack(offset, index, 4) + _U32.pack(value))

    def read64(self, index: int, offset: int) -> int:
        value: int = _U64.unpack(self._read(index, offset, 8))[0]
        return value

    def map_region(self, index: int) -> mmap.mmap:
        """Map a region whole; the caller closes the mapping.

        Raises:
            Refusal: ENODEV, the region cannot be mapped, or only parts of it.
        """
        info = self.region_info(index)
        if info.fd is None:
            raise Refusal(errno.ENODEV, f"region {index} cannot be mapped")
        try:
            if info.sparse and tuple(info.sparse) != ((0, info.size),):
                raise Refusal(errno.ENODEV, f"only parts of region {index} can be mapped")
            protection = mmap.PROT_READ
            if info.flags & RegionFlag.WRITE:
                protection |= mmap.PROT_WRITE
            return mmap.mmap(info.fd, info.size, mmap.MAP_SHARED, protection)
        finally:
            os.close(info.fd)

    # --- DMA -----------------------------------------------------------------------------------

    def dma_map(
        self,
        address: int,
        size: int,
        *,
        fd: int | None = None,
        offset: int = 0,
        flags: int = DmaFlag.READ | DmaFlag.WRITE,
        memory: memoryview | None = None,
    ) -> None:
        """Let the device reach ``size`` bytes at ``address``.

        With ``fd`` the device may map the file at ``offset``; the caller keeps the descriptor.
        ``memory`` answers its DMA messages; by default ``fd`` is mapped for that.

        Raises:
            Refusal: EEXIST over a present map, or whatever the device answers.
        """
        mapped: mmap.mmap | None = None
        if memory is None and fd is not None:
            mapped = mmap.mmap(fd, size, offset=offset)
            memory = memoryview(mapped)
        try:
            self.session.memory.add(address, size, flags, memory)
        except Refusal:
            _unmap(mapped, memory)
            raise
        if mapped is not None:
            self._maps[address] = mapped
        try:
            body = messages.pack_dma_map(DmaMap(flags, offset, address, size))
            self.call(Command.DMA_MAP, body, () if fd is None else (fd,))
        except BaseException:
            self._forget(self.session.memory.remove(address, size))
            raise

    def dma_unmap(self, address: int, size: int, *, dirty_page_bytes: int = 0) -> bytes:
        """Take maps back; with ``dirty_page_bytes`` returns the bitmap of pages written."""
        flags = UnmapFlag.GET_DIRTY_BITMAP if dirty_page_bytes else 0
        words = (-(-size // dirty_page_bytes) + 63) // 64 * 8 if dirty_page_bytes else 0
        head = messages.DMA_UNMAP.size + (messages.BITMAP.size + words if flags else 0)
        request = DmaUnmap(head, flags, address, size, dirty_page_bytes, words)
        reply = self.call(Command.DMA_UNMAP, messages.pack_dma_unmap(request))
        self._forget(self.session.memory.remove(address, size))
        if not flags:
            return b""
        start = messages.DMA_UNMAP.size + messages.BITMAP.size
        messages.need(reply, start + words, "DMA_UNMAP with bitmap")
        return bytes(reply[start : start + words])

    def dma_unmap_all(self) -> None:
        """Take every map back at once."""
        request = DmaUnmap(messages.DMA_UNMAP.size, UnmapFlag.ALL, 0, 0, 0, 0)
        self.call(Command.DMA_UNMAP, messages.pack_dma_unmap(request))
        self._forget(self.session.memory.clear())

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Answer one DMA request of the server if it comes within ``timeout_s``. True if it did.

        Raises:
            UnavailableError: the server went.
        """
        sock = self._twin or self._sock
        reader = self._twin_reader if self._twin is not None else self._reader
        sock.settimeout(timeout_s)
        try:
            # Only the wait is bounded: a message that has begun is read to its end.
            if reader.is_idle and not sock.recv(1, socket.MSG_PEEK):
                raise self._gone("the server closed the connection")
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            raise self._gone(f"the connection broke: {error.strerror}") from error
        finally:
            if not self._closed:
                sock.settimeout(None)
                set_receive_timeout(sock, self._timeout_s)
        outcome = self._receive(sock, reader)
        if outcome is not None:
            close_fds(outcome.fds)
            raise self._give_up(bad("reply", "nothing was asked"))
        return True

    # --- interrupts and reset ------------------------------------------------------------------

    def set_irqs(
        self,
        index: int,
        flags: int,
        start: int,
        count: int,
        data: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """DEVICE_SET_IRQS as it is; ``fds`` stay the caller's."""
        body = messages.pack_set_irqs(IrqRequest(flags, index, start, count, data))
        self.call(Command.DEVICE_SET_IRQS, body, fds)

    def irq_eventfd(self, index: int, vector: int = 0) -> int:
        """A new non-blocking eventfd, signalled for ``vector``; the caller closes it."""
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            flags = IrqSet.DATA_EVENTFD | IrqSet.ACTION_TRIGGER
            self.set_irqs(index, flags, vector, 1, b"", (fd,))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def irq_disable(self, index: int) -> None:
        """Disable every interrupt of ``index``."""
        self.set_irqs(index, IrqSet.DATA_NONE | IrqSet.ACTION_TRIGGER, 0, 0)

    def reset(self) -> None:
        self.call(Command.DEVICE_RESET)

    # --- one call ------------------------------------------------------------------------------

    def call(
        self, command: int, body: bytes = b"", fds: Sequence[int] = (), *, no_reply: bool = False
    ) -> memoryview:
        """Send a request, return the body of its reply; descriptors beside it are closed."""
        if no_reply:
            _, data = self.session.command(command, body, no_reply=True)
            self._send(data, fds)
            return memoryview(b"")
        done = self._call(command, body, fds)
        if done.fds and not done.errno:
            close_fds(done.fds)
        return done.result()

    def _call(self, command: int, body: bytes = b"", fds: Sequence[int] = ()) -> Completion:
        ident, data = self.session.command(command, body)
        return self._exchange(ident, data, fds)

    def _exchange(self, ident: int, data: bytes, fds: Sequence[int] = ()) -> Completion:
        self._send(data, fds)
        deadline = 0.0
        while True:
            done = self._receive(self._sock, self._reader)
            if done is not None:
                if done.id == ident:
                    return done
                close_fds(done.fds)
            # The server asks instead of answering: only then the clock is worth a look, since each
            # wait is bounded by the socket itself.
            deadline = deadline or time.monotonic() + self._timeout_s
            if time.monotonic() > deadline:
                self.close()
                raise DeadlineError(
                    f"the server asked for {self._timeout_s} s and did not answer",
                    code="vfio-user-deadline", where="vfio-user client",
                    hint="the function hangs: see its log, or restart it",
                )  # fmt: skip

    def _read(self, index: int, offset: int, count: int) -> memoryview:
        body = self.call(Command.REGION_READ, messages.ACCESS.pack(offset, index, count))
        try:
            return check_read_reply(body, offset, index, count)
        except ProtocolError as error:
            raise self._give_up(error) from error

    # --- inside --------------------------------------------------------------------------------

    def _negotiate(self) -> None:
        done = self._exchange(*self.session.version())
        try:
            index = self.session.negotiated(done)
        except AccelvisorError:
            close_fds(done.fds)
            raise
        close_fds(fd for i, fd in enumerate(done.fds) if i != index)
        if index is not None:
            self._twin = socket.socket(fileno=done.fds[index])

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if self._closed:
            raise UnavailableError("the connection is closed", where="vfio-user client")
        try:
            send(self._sock, data, fds)
        except OSError as error:
            raise self._gone(f"the server went: {error.strerror}") from error

    def _receive(self, sock: socket.socket, reader: FrameReader) -> Completion | None:
        """One message: a reply to us, or None after a request of the server was answered."""
        try:
            message = receive(sock, reader)
        except BlockingIOError as error:
            self.close()
            raise DeadlineError(
                f"no reply within {self._timeout_s} s",
                code="vfio-user-deadline", where="vfio-user client",
                hint="the function hangs: see its log, or restart it",
            ) from error  # fmt: skip
        except OSError as error:
            raise self._gone(f"the connection broke: {error.strerror}") from error
        except ProtocolError as error:
            raise self._give_up(error) from error
        if message is None:
            raise self._gone("the server closed the connection")
        try:
            outcome = self.session.receive(message)
        except ProtocolError as error:
            raise self._give_up(error) from error
        if isinstance(outcome, Completion):
            return outcome
        self._reply(sock, outcome)
        return None

    def _reply(self, sock: socket.socket, outbound: Outbound) -> None:
        if outbound.data:
            try:
                send(sock, outbound.data)
            except OSError as error:
                raise self._gone(f"the server went: {error.strerror}") from error

    def _forget(self, ranges: Sequence[DmaRange[memoryview | None]]) -> None:
        for entry in ranges:
            _unmap(self._maps.pop(entry.address, None), entry.item)

    def _give_up(self, error: ProtocolError) -> ProtocolError:
        self.close()
        return error

    def _gone(self, message: str) -> UnavailableError:
        self.close()
        return UnavailableError(
            message, code="vfio-user-gone", where="vfio-user client",
            hint="check that the function runs (accelctl function show)",
        )  # fmt: skip


def _unmap(mapped: mmap.mmap | None, view: memoryview | None) -> None:
    if mapped is not None:
        if view is not None:
            view.release()
        mapped.close()


def _connect(path: str | os.PathLike[str], timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(os.fspath(path))
    except OSError as error:
        sock.close()
        raise UnavailableError(
            f"cannot connect to {os.fspath(path)}: {error.strerror or error}",
            code="vfio-user-gone", where="vfio-user client",
            hint="check that the function runs (accelctl function show)",
        ) from error  # fmt: skip
    return sock


