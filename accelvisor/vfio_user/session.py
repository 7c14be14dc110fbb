"""The server's side of one connection, without IO: a :class:`Message` in, a :class:`Reply` out.

Anything that can read messages can drive it: ``server.py``'s blocking loop, or a function's worker
that peeks at its socket and journals. What a request may carry is checked here, against the
device's own description, before the model sees it, so that every model gets the same protection:
indices in range, accesses inside their region, sizes within what was agreed, descriptors counted.

Three kinds of trouble have three answers. A request that is wrong or that the model refuses gets
an errno reply and the connection goes on. Bytes that cannot be followed raise ProtocolError: the
caller closes. A model that fails otherwise has a bug: logged with its traceback, answered EIO.
"""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Callable
from typing import NamedTuple

from accelvisor.vfio_user import features, messages
from accelvisor.vfio_user.contract import Description, describe
from accelvisor.vfio_user.messages import PayloadError, bad
from accelvisor.vfio_user.model import DeviceModel, IoFdModel, Refusal
from accelvisor.vfio_user.negotiate import (
    PHASES,
    Agreement,
    Capabilities,
    Event,
    Phase,
    answer_version,
    own_capabilities,
)
from accelvisor.vfio_user.protocol import (
    FLAG_NO_REPLY,
    HEADER,
    HEADER_BYTES,
    IRQ_ACTION_MASK,
    IRQ_DATA_MASK,
    PAGE_BYTES,
    TYPE_REPLY,
    Command,
    DeviceFlag,
    DmaFlag,
    Feature,
    FeatureFlag,
    IrqSet,
    RegionFlag,
    UnmapFlag,
)
from accelvisor.vfio_user.wire import (
    Message,
    broken,
    close_fds,
    command_name,
    encode_error,
    encode_reply,
)

log = logging.getLogger(__name__)

_DMA_FLAGS = int(DmaFlag.READ | DmaFlag.WRITE | DmaFlag.MMAP | DmaFlag.FILE_IO)
_DMA_ACCESS = int(DmaFlag.READ | DmaFlag.WRITE)
_UNMAP_FLAGS = int(UnmapFlag.GET_DIRTY_BITMAP | UnmapFlag.ALL)
_DISABLE = int(IrqSet.DATA_NONE | IrqSet.ACTION_TRIGGER)
_IRQ_DATA = int(IRQ_DATA_MASK)
_IRQ_ACTION = int(IRQ_ACTION_MASK)
_READ = int(RegionFlag.READ)
_WRITE = int(RegionFlag.WRITE)
_END = 1 << 64

#: Header and access in one: register accesses are the messages that a guest waits for.
_ACCESS_REPLY = struct.Struct(HEADER.format + messages.ACCESS.format.lstrip("<"))
_ACCESS_END = _ACCESS_REPLY.size
_PACK_ACCESS = _ACCESS_REPLY.pack
_UNPACK_ACCESS = messages.ACCESS.unpack_from
_REGION_READ = int(Command.REGION_READ)
_REGISTER_ACCESS = frozenset({_REGION_READ, int(Command.REGION_WRITE)})


class Reply(NamedTuple):
    """What to send: one whole message and descriptors beside its first byte.

    The descriptors stay the model's; ``close_after`` lists those that the sender closes once sent.
    ``close`` asks to close the connection after sending.
    """

    data: bytes
    fds: tuple[int, ...] = ()
    close: bool = False
    close_after: tuple[int, ...] = ()


class _Answer(NamedTuple):
    body: bytes
    fds: tuple[int, ...] = ()
    close_after: tuple[int, ...] = ()


_EMPTY = _Answer(b"")


def _number(error: Exception, message: Message) -> int:
    """The errno that a handler's exception is answered with."""
    if isinstance(error, Refusal | PayloadError):
        log.debug("%s: %s", command_name(message.command), error)
        return error.errno if isinstance(error, Refusal) else errno.EINVAL
    log.error("the device model failed in %s", command_name(message.command), exc_info=error)
    return errno.EIO


class ServerSession:
    """Drives a device model from requests.

    Args:
        model: checked against the contract now (``contract.describe``), so that a model that
            could not answer later fails at load.
        capabilities: what this end offers; None for all that it can do.
        agreement: of a connection that an earlier session negotiated (a restarted worker).
        twin: makes the socket pair's other end for a client that wants server-to-client
            commands on a socket of their own; returns the descriptor to send (closed after).

    Raises:
        CallerError: the model breaks its contract.
    """

    def __init__(
        self,
        model: DeviceModel,
        *,
        capabilities: Capabilities | None = None,
        agreement: Agreement | None = None,
        twin: Callable[[], int] | None = None,
    ) -> None:
        self.model = model
        self.device: Description = describe(model)
        self.agreement = agreement
        self.phase = Phase.READY if agreement else Phase.GREETING
        self._capabilities = capabilities or own_capabilities()
        self._twin = twin
        self._io_fds = model if isinstance(model, IoFdModel) else None
        self._max_transfer = agreement.own_max_transfer if agreement else 0
        # Bytes of each region that may be read and written: what a register access needs to know.
        regions = self.device.regions
        self._readable = tuple(r.size if r.flags & _READ else 0 for r in regions)
        self._writable = tuple(r.size if r.flags & _WRITE else 0 for r in regions)
        self._handlers: dict[int, Callable[[Message], _Answer]] = {
            Command.DMA_MAP: self._dma_map,
            Command.DMA_UNMAP: self._dma_unmap,
            Command.DEVICE_GET_INFO: self._get_info,
            Command.DEVICE_GET_REGION_INFO: self._get_region_info,
            Command.DEVICE_GET_REGION_IO_FDS: self._get_region_io_fds,
            Command.DEVICE_GET_IRQ_INFO: self._get_irq_info,
            Command.DEVICE_SET_IRQS: self._set_irqs,
            Command.REGION_READ: self._region_read,
            Command.REGION_WRITE: self._region_write,
            Command.DEVICE_RESET: self._reset,
            Command.REGION_WRITE_MULTI: self._region_write_multi,
            Command.DEVICE_FEATURE: self._feature,
            Command.MIG_DATA_READ: self._mig_data_read,
            Command.MIG_DATA_WRITE: self._mig_data_write,
        }

    def handle(self, message: Message) -> Reply | None:
        """Answer one request; None when it asked for no reply. Takes the message's descriptors.

        Raises:
            ProtocolError: a reply to nothing: the connection cannot go on.
        """
        if message.command in _REGISTER_ACCESS and not message.flags and not message.fds:
            reply = self._register_access(message)
            if reply is not None:
                return reply
        try:
            if message.is_reply:
                raise broken(f"a reply to no request: {message!r}")
            if self.phase is not Phase.READY or message.command == Command.VERSION:
                return self._negotiate(message)
            answer = self._guard(message)
        finally:
            message.close()
        if message.flags & FLAG_NO_REPLY:
            if isinstance(answer, _Answer):
                close_fds(answer.close_after)
            return None
        if isinstance(answer, int):
            return Reply(encode_error(message.id, message.command, answer))
        data = encode_reply(message.id, message.command, answer.body)
        return Reply(data, answer.fds, False, answer.close_after)

    def release(self) -> None:
        """The client is gone: it maps nothing and hears no interrupt any more (the specification's
        rule for a client's disconnection); the device's own state stays.
        """
        calls: list[Callable[[], None]] = [lambda: self.model.dma_unmap(0, 0, int(UnmapFlag.ALL))]
        for irq in self.device.irqs:
            if irq.count:
                calls.append(lambda i=irq.index: self.model.set_irqs(i, _DISABLE, 0, 0, b"", ()))  # type: ignore[misc]
        for call in calls:
            try:
                call()
            except Refusal as refusal:
                log.warning("the device model refused to let go of its client: %s", refusal)
            except Exception:
                log.exception("the device model failed to let go of its client")

    # --- frame of every request ----------------------------------------------------------------

    def _guard(self, message: Message) -> _Answer | int:
        """The handler's answer or an errno."""
        handler = self._handlers.get(message.command)
        if handler is None:
            log.info("unsupported %s", command_name(message.command))
            return errno.EOPNOTSUPP
        agreement = self.agreement
        if agreement is not None and len(message.fds) > agreement.own_max_fds:
            return errno.EINVAL
        try:
            return handler(message)
        except Exception as error:
            return _number(error, message)

    def _register_access(self, message: Message) -> Reply | None:
        """A good REGION_READ or REGION_WRITE in as few steps as there can be: a guest's vCPU
        stands still meanwhile. None where anything is unusual; :meth:`_guard` sorts it out.
        """
        size = message.size
        if size < _ACCESS_END:
            return None
        raw = message.raw
        offset, region, count = _UNPACK_ACCESS(raw, HEADER_BYTES)
        reading = message.command == _REGION_READ
        limits = self._readable if reading else self._writable
        # Before the negotiation the largest transfer is 0, which no access passes.
        if not (
            0 < count <= self._max_transfer
            and region < len(limits)
            and offset + count <= limits[region]
            and (reading or size == _ACCESS_END + count)
        ):
            return None
        try:
            if reading:
                data = self.model.region_read(region, offset, count)
                if len(data) != count:
                    raise ValueError(f"region_read gave {len(data)} bytes of {count}")
            else:
                self.model.region_write(region, offset, raw[_ACCESS_END:])
                data = b""
        except Exception as error:
            number = _number(error, message)
            return Reply(encode_error(message.id, message.command, number))
        length = _ACCESS_END + len(data)
        head = _PACK_ACCESS(
            message.id, message.command, length, TYPE_REPLY, 0, offset, region, count
        )
        return Reply(head + data)

    def _negotiate(self, message: Message) -> Reply | None:
        body = b""
        agreement: Agreement | None = None
        event = Event.COMMAND
        if message.command == Command.VERSION:
            event = Event.VERSION_REFUSED
            try:
                body, agreement = answer_version(
                    message.body, self._capabilities, twin=self._twin is not None
                )
                event = Event.VERSION_AGREED
            except PayloadError as error:
                log.warning("version refused: %s", error)
        move = PHASES[self.phase, event]
        self.phase = move.phase
        if move.refusal:
            data = encode_error(message.id, message.command, move.refusal)
            return Reply(data, (), move.close)
        self.agreement = agreement
        self._max_transfer = agreement.own_max_transfer if agreement else 0
        fds = (self._twin(),) if self._twin and agreement and agreement.twin_socket else ()
        return Reply(encode_reply(message.id, message.command, body), fds, False, fds)

    # --- information ---------------------------------------------------------------------------

    def _get_info(self, message: Message) -> _Answer:
        messages.need(message.body, messages.DEVICE_INFO.size, "DEVICE_GET_INFO")
        return _Answer(messages.pack_device_info(self.device.info))

    def _get_region_info(self, message: Message) -> _Answer:
        body = message.body
        messages.need(body, messages.REGION_INFO.size, "DEVICE_GET_REGION_INFO")
        argsz, _, index, *_ = messages.REGION_INFO.unpack_from(body)
        if argsz < messages.REGION_INFO.size:
            raise bad("DEVICE_GET_REGION_INFO", f"argsz {argsz}")
        info = self.device.region(index)
        if info.fd is not None and self.agreement and not self.agreement.peer_max_fds:
            # A client that takes no descriptors cannot map: every access comes as a message.
            info = self.device.unmapped(index)
        fds = () if info.fd is None else (info.fd,)
        return _Answer(messages.pack_region_info(info, argsz), fds)

    def _get_region_io_fds(self, message: Message) -> _Answer:
        messages.need(message.body, messages.IO_FDS.size, "DEVICE_GET_REGION_IO_FDS")
        argsz, flags, index, _ = messages.IO_FDS.unpack_from(message.body)
        if argsz < messages.IO_FDS.size or flags:
            raise bad("DEVICE_GET_REGION_IO_FDS", f"argsz {argsz}, flags {flags:#x}")
        self.device.region(index)
        entries = self._io_fds.region_io_fds(index) if self._io_fds is not None else ()
        body, fds = messages.pack_io_fds(index, entries, argsz)
        if self.agreement is not None and len(fds) > self.agreement.peer_max_fds:
            raise Refusal(errno.ENOSPC, f"{len(fds)} descriptors for region {index}")
        return _Answer(body, fds)

    def _get_irq_info(self, message: Message) -> _Answer:
        messages.need(message.body, messages.IRQ_INFO.size, "DEVICE_GET_IRQ_INFO")
        _, _, index, _ = messages.IRQ_INFO.unpack_from(message.body)
        return _Answer(messages.pack_irq_info(self.device.irq(index)))

    # --- regions -------------------------------------------------------------------------------

    def _region_read(self, message: Message) -> _Answer:
        raw = message.raw
        if len(raw) < HEADER_BYTES + messages.ACCESS.size:
            raise bad("REGION_READ", f"{len(raw)} bytes")
        offset, region, count = messages.ACCESS.unpack_from(raw, HEADER_BYTES)
        self._check_access(offset, region, count, _READ)
        data = self.model.region_read(region, offset, count) if count else b""
        if len(data) != count:
            raise ValueError(f"region_read gave {len(data)} bytes, {count} were asked for")
        return _Answer(messages.ACCESS.pack(offset, region, count) + data)

    def _region_write(self, message: Message) -> _Answer:
        offset, region, count, data = messages.parse_access(message.body, "REGION_WRITE")
        if len(data) != count:
            raise bad("REGION_WRITE", f"{count} bytes announced, {len(data)} sent")
        self._check_access(offset, region, count, _WRITE)
        if count:
            self.model.region_write(region, offset, bytes(data))
        return _Answer(messages.ACCESS.pack(offset, region, count))

    def _region_write_multi(self, message: Message) -> _Answer:
        if self.agreement is None or not self.agreement.write_multiple:
            raise Refusal(errno.EOPNOTSUPP, "REGION_WRITE_MULTI was not negotiated")
        writes = messages.parse_write_multi(message.body)
        for w in writes:
            self._check_access(w.offset, w.region, len(w.data), _WRITE)
        for w in writes:
            if w.data:
                self.model.region_write(w.region, w.offset, w.data)
        return _Answer(messages.MULTI.pack(len(writes)))

    def _check_access(self, offset: int, region: int, count: int, need: int) -> None:
        info = self.device.region(region)
        if count > self._max_transfer:
            raise bad("region access", f"{count} bytes, {self._max_transfer} were agreed")
        if offset + count > info.size or not info.flags & need:
            raise bad("region access", f"{count} bytes at {offset:#x} of region {region}")

    # --- DMA maps ------------------------------------------------------------------------------

    def _dma_map(self, message: Message) -> _Answer:
        m = messages.parse_dma_map(message.body)
        fds = message.fds
        if not m.size or m.address + m.size > _END or (m.address | m.size) % PAGE_BYTES:
            raise bad("DMA_MAP", f"{m.size} bytes at {m.address:#x}")
        if m.flags & ~_DMA_FLAGS or len(fds) > 1:
            raise bad("DMA_MAP", f"flags {m.flags:#x}, {len(fds)} descriptors")
        if fds and (m.offset % PAGE_BYTES or m.offset + m.size >= 1 << 63):
            raise bad("DMA_MAP", f"file offset {m.offset:#x}")
        taken = message.take_fds()
        fd = taken[0] if taken else None
        self.model.dma_map(m.address, m.size, m.flags & _DMA_ACCESS, m.offset, fd)
        return _EMPTY

    def _dma_unmap(self, message: Message) -> _Answer:
        body = message.body
        m = messages.parse_dma_unmap(body, UnmapFlag.GET_DIRTY_BITMAP)
        if m.flags & ~_UNMAP_FLAGS or m.flags == _UNMAP_FLAGS or m.address + m.size > _END:
            raise bad("DMA_UNMAP", f"flags {m.flags:#x}, {m.size} bytes at {m.address:#x}")
        if m.flags & UnmapFlag.ALL and (m.address or m.size):
            raise bad("DMA_UNMAP", "ALL with an address or a size")
        fixed = messages.DMA_UNMAP.size
        if not m.page_size:
            self.model.dma_unmap(m.address, m.size, m.flags)
            return _Answer(bytes(body[:fixed]))
        report = features.Report(m.address, m.size, m.page_size)
        if not m.size or m.page_size & (m.page_size - 1):
            raise bad("DMA_UNMAP", f"bitmap of {m.size} bytes in pages of {m.page_size}")
        needed = fixed + messages.BITMAP.size + report.bitmap_bytes
        if m.bitmap_bytes < report.bitmap_bytes or report.bitmap_bytes > self._max_transfer:
            # Refused before anything is read: reading clears.
            raise bad("DMA_UNMAP", f"the bitmap needs {report.bitmap_bytes} bytes")
        bitmap = self.model.dirty_pages(*report)
        self.model.dma_unmap(m.address, m.size, 0)
        head = messages.DMA_UNMAP.pack(needed, m.flags, m.address, m.size)
        return _Answer(head + messages.BITMAP.pack(m.page_size, len(bitmap)) + bitmap)

    # --- interrupts and reset ------------------------------------------------------------------

    def _set_irqs(self, message: Message) -> _Answer:
        r = messages.parse_set_irqs(message.body)
        info = self.device.irq(r.index)
        data_kind, action = r.flags & _IRQ_DATA, r.flags & _IRQ_ACTION
        if r.flags & ~(_IRQ_DATA | _IRQ_ACTION) or not (
            data_kind.bit_count() == 1 and action.bit_count() == 1
        ):
            raise bad("DEVICE_SET_IRQS", f"flags {r.flags:#x}")
        if r.start + r.count > info.count:
            raise bad("DEVICE_SET_IRQS", f"{r.count} from {r.start} of {info.count}")
        if not r.count and not (r.flags == _DISABLE and r.start == 0):
            raise bad("DEVICE_SET_IRQS", "count 0 with an action")
        fds = message.fds
        data = r.data[: r.count] if data_kind == IrqSet.DATA_BOOL else b""
        if data_kind == IrqSet.DATA_BOOL and len(r.data) < r.count:
            raise bad("DEVICE_SET_IRQS", f"{len(r.data)} booleans for {r.count}")
        if len(fds) != (r.count if data_kind == IrqSet.DATA_EVENTFD and fds else 0):
            raise bad("DEVICE_SET_IRQS", f"{len(fds)} descriptors for {r.count}")
        self.model.set_irqs(r.index, r.flags, r.start, r.count, data, message.take_fds())
        return _EMPTY

    def _reset(self, message: Message) -> _Answer:
        if not self.device.info.flags & DeviceFlag.RESET:
            raise Refusal(errno.EOPNOTSUPP, "the device has no reset")
        self.model.reset()
        return _EMPTY

    # --- features and migration ----------------------------------------------------------------

    def _feature(self, message: Message) -> _Answer:
        r = features.parse_feature(message.body)
        fixed = features.FEATURE.size
        if r.feature == Feature.DMA_LOGGING_REPORT and r.flags == FeatureFlag.GET:
            report = features.parse_report(r.data)
            needed = fixed + features.REPORT.size + report.bitmap_bytes
            if report.bitmap_bytes > self._max_transfer:
                raise bad("DMA_LOGGING_REPORT", f"a bitmap of {report.bitmap_bytes} bytes")
            head = features.FEATURE.pack(needed, r.flags | r.feature)
            head += features.REPORT.pack(*report)
            if r.argsz < needed:
                # The bitmap is not even read: reading clears, and the client asks again.
                return _Answer(head)
            return _Answer(head + self.model.dirty_pages(*report))
        data = self.model.device_feature(r.flags, r.feature, r.data)
        if not r.flags & FeatureFlag.GET or r.flags & FeatureFlag.PROBE:
            # "The reply payload must be the same as the request payload for setting or probing",
            # but for what the device changed (the page size of DMA logging).
            data = r.data if len(data) != len(r.data) else data
            return _Answer(features.pack_feature(r.flags, r.feature, data, argsz=r.argsz))
        full = fixed + len(data)
        if r.argsz < full:
            return _Answer(features.FEATURE.pack(full, r.flags | r.feature))
        return _Answer(features.pack_feature(r.flags, r.feature, data))

    def _mig_data_read(self, message: Message) -> _Answer:
        argsz, size, _ = features.parse_mig_data(message.body)
        if size > self._max_transfer or argsz < features.MIG_DATA.size + size:
            raise bad("MIG_DATA_READ", f"{size} bytes, argsz {argsz}")
        data = self.model.migration_read(size)
        if len(data) > size:
            raise ValueError(f"migration_read gave {len(data)} bytes, {size} were asked for")
        return _Answer(features.pack_mig_data(data))

    def _mig_data_write(self, message: Message) -> _Answer:
        _, size, data = features.parse_mig_data(message.body)
        if size > self._max_transfer or len(data) != size:
            raise bad("MIG_DATA_WRITE", f"{size} bytes announced, {len(data)} sent")
        self.model.migration_write(bytes(data))
        return _EMPTY
