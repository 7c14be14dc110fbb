"""Bodies of the messages: fixed structs, packed and unpacked. No state, no IO.

Decoders take the body without its header and raise :class:`PayloadError` on bytes that do not hold
what the command needs; a server answers that with EINVAL, a client gives the connection up.
Trailing bytes are let pass where the specification leaves room for them (``argsz`` grows).
Sizes, offsets and addresses are in bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user.model import DeviceInfo, IoFd, IrqInfo, RegionInfo
from accelvisor.vfio_user.protocol import (
    IO_FD_TYPE_IOEVENTFD,
    IO_FD_TYPE_IOREGIONFD,
    REGION_CAP_SPARSE_MMAP,
    RegionFlag,
)

Bytes = bytes | bytearray | memoryview

VERSION = struct.Struct("<HH")  # major, minor
DMA_MAP = struct.Struct("<IIQQQ")  # argsz, flags, offset, address, size
DMA_UNMAP = struct.Struct("<IIQQ")  # argsz, flags, address, size
BITMAP = struct.Struct("<QQ")  # page size, bytes of bitmap that follow
DEVICE_INFO = struct.Struct("<IIII")  # argsz, flags, regions, irqs
REGION_INFO = struct.Struct("<IIIIQQ")  # argsz, flags, index, cap_offset, size, offset
CAPABILITY = struct.Struct("<HHI")  # id, version, next
SPARSE = struct.Struct("<II")  # areas, reserved
AREA = struct.Struct("<QQ")  # offset, size
IO_FDS = struct.Struct("<IIII")  # argsz, flags, index, count
IO_FD = struct.Struct("<QQIIIIQ")  # offset, size, fd index, type, flags, -, datamatch or user data
IRQ_INFO = struct.Struct("<IIII")  # argsz, flags, index, count
IRQ_SET = struct.Struct("<IIIII")  # argsz, flags, index, start, count
ACCESS = struct.Struct("<QII")  # offset, region, count
MULTI = struct.Struct("<Q")  # writes
MULTI_WRITE = struct.Struct("<QII8s")  # offset, region, count, data
DMA_ACCESS = struct.Struct("<QQ")  # address, count

#: Areas in one sparse capability that a client believes; a page each would still be a 4 MiB region.
_MAX_AREAS = 1024


class PayloadError(ProtocolError):
    """A well-framed message whose body is not what its command needs."""

    code = "vfio-user-payload"


class DmaMap(NamedTuple):
    flags: int
    offset: int
    address: int
    size: int


class DmaUnmap(NamedTuple):
    """``page_size`` is 0 unless the dirty bitmap was asked for."""

    argsz: int
    flags: int
    address: int
    size: int
    page_size: int
    bitmap_bytes: int


@dataclass(frozen=True, slots=True)
class IrqRequest:
    flags: int
    index: int
    start: int
    count: int
    data: bytes


class RegionWrite(NamedTuple):
    offset: int
    region: int
    data: bytes


def bad(what: str, why: str) -> PayloadError:
    """The error for a body that its command cannot use."""
    return PayloadError(
        f"{what}: {why}", where="vfio-user", hint="see the vfio-user specification of that command"
    )


def need(body: Bytes, count: int, what: str) -> None:
    """Raises PayloadError when ``body`` has fewer than ``count`` bytes."""
    if len(body) < count:
        raise bad(what, f"{len(body)} bytes, at least {count} are needed")


# --- DMA map ----------------------------------------------------------------------------------


def pack_dma_map(m: DmaMap) -> bytes:
    return DMA_MAP.pack(DMA_MAP.size, m.flags, m.offset, m.address, m.size)


def parse_dma_map(body: Bytes) -> DmaMap:
    need(body, DMA_MAP.size, "DMA_MAP")
    _, flags, offset, address, size = DMA_MAP.unpack_from(body)
    return DmaMap(flags, offset, address, size)


def pack_dma_unmap(m: DmaUnmap) -> bytes:
    fixed = DMA_UNMAP.pack(m.argsz, m.flags, m.address, m.size)
    return fixed + BITMAP.pack(m.page_size, m.bitmap_bytes) if m.page_size else fixed


def parse_dma_unmap(body: Bytes, with_bitmap: int) -> DmaUnmap:
    """``with_bitmap`` is the flag that says a bitmap request follows the fixed part."""
    need(body, DMA_UNMAP.size, "DMA_UNMAP")
    argsz, flags, address, size = DMA_UNMAP.unpack_from(body)
    page_size = bitmap_bytes = 0
    if flags & with_bitmap:
        need(body, DMA_UNMAP.size + BITMAP.size, "DMA_UNMAP with bitmap")
        page_size, bitmap_bytes = BITMAP.unpack_from(body, DMA_UNMAP.size)
        if not page_size:
            raise bad("DMA_UNMAP with bitmap", "page size 0")
    return DmaUnmap(argsz, flags, address, size, page_size, bitmap_bytes)


# --- device, region and interrupt information -------------------------------------------------


def pack_device_info(info: DeviceInfo) -> bytes:
    return DEVICE_INFO.pack(DEVICE_INFO.size, info.flags, info.regions, info.irqs)


def parse_device_info(body: Bytes) -> DeviceInfo:
    need(body, DEVICE_INFO.size, "DEVICE_GET_INFO")
    _, flags, regions, irqs = DEVICE_INFO.unpack_from(body)
    return DeviceInfo(flags, regions, irqs)


def pack_region_info(info: RegionInfo, argsz: int) -> bytes:
    """The reply body for a client that offered ``argsz`` bytes.

    When the capabilities do not fit, the fixed part goes alone with the size that would be needed;
    ``cap_offset`` is valid even then, because QEMU checks it before it asks again.
    """
    chain = b""
    if info.sparse:
        areas = b"".join(AREA.pack(offset, size) for offset, size in info.sparse)
        head = CAPABILITY.pack(REGION_CAP_SPARSE_MMAP, 1, 0) + SPARSE.pack(len(info.sparse), 0)
        chain = head + areas
    full = REGION_INFO.size + len(chain)
    flags = info.flags | RegionFlag.CAPS if chain else info.flags
    cap_offset = REGION_INFO.size if chain else 0
    fixed = REGION_INFO.pack(full, flags, info.index, cap_offset, info.size, 0)
    return fixed + chain if argsz >= full else fixed


class RegionReply(NamedTuple):
    """``argsz`` larger than the body means: ask again with room for that many bytes."""

    argsz: int
    info: RegionInfo
    offset: int  # of the region in its descriptor


def parse_region_info(body: Bytes) -> RegionReply:
    need(body, REGION_INFO.size, "DEVICE_GET_REGION_INFO")
    argsz, flags, index, cap_offset, size, offset = REGION_INFO.unpack_from(body)
    sparse: tuple[tuple[int, int], ...] = ()
    if flags & RegionFlag.CAPS and argsz <= len(body):
        sparse = _parse_capabilities(memoryview(body)[:argsz], cap_offset)
    return RegionReply(argsz, RegionInfo(index, flags, size, None, sparse), offset)


def _parse_capabilities(body: memoryview, at: int) -> tuple[tuple[int, int], ...]:
    """Walk the chain; each link must lead forwards, so that a loop cannot hold the reader."""
    sparse: tuple[tuple[int, int], ...] = ()
    last = REGION_INFO.size - 1
    while at:
        if at <= last:
            raise bad("region capabilities", f"link to {at} leads backwards")
        last = at
        if at + CAPABILITY.size > len(body):
            raise bad("region capabilities", f"link to {at} leads out of the reply")
        ident, _, following = CAPABILITY.unpack_from(body, at)
        if ident == REGION_CAP_SPARSE_MMAP:
            sparse = _parse_sparse(body, at + CAPABILITY.size)
        at = following
    return sparse


def _parse_sparse(body: memoryview, at: int) -> tuple[tuple[int, int], ...]:
    need(body, at + SPARSE.size, "sparse areas")
    count, _ = SPARSE.unpack_from(body, at)
    if count > _MAX_AREAS:
        raise bad("sparse areas", f"{count} areas, the limit is {_MAX_AREAS}")
    at += SPARSE.size
    need(body, at + count * AREA.size, "sparse areas")
    return tuple(AREA.unpack_from(body, at + i * AREA.size) for i in range(count))


def pack_irq_info(info: IrqInfo) -> bytes:
    return IRQ_INFO.pack(IRQ_INFO.size, info.flags, info.index, info.count)


def parse_irq_info(body: Bytes) -> IrqInfo:
    need(body, IRQ_INFO.size, "DEVICE_GET_IRQ_INFO")
    _, flags, index, count = IRQ_INFO.unpack_from(body)
    return IrqInfo(index, flags, count)


def pack_io_fds(index: int, entries: Sequence[IoFd], argsz: int) -> tuple[bytes, tuple[int, ...]]:
    """Reply body and descriptors; entries that share a descriptor share its index.

    Like every argsz reply it shrinks to the fixed part, without descriptors, when it does not fit.
    """
    fds: list[int] = []
    parts: list[bytes] = []
    for e in entries:
        if e.fd not in fds:
            fds.append(e.fd)
        kind = IO_FD_TYPE_IOREGIONFD if e.ioregion else IO_FD_TYPE_IOEVENTFD
        parts.append(IO_FD.pack(e.offset, e.size, fds.index(e.fd), kind, e.flags, 0, e.data))
    full = IO_FDS.size + len(parts) * IO_FD.size
    fixed = IO_FDS.pack(full, 0, index, len(parts))
    if argsz < full:
        return fixed, ()
    return fixed + b"".join(parts), tuple(fds)


def parse_io_fds(body: Bytes, fds: Sequence[int]) -> tuple[IoFd, ...]:
    need(body, IO_FDS.size, "DEVICE_GET_REGION_IO_FDS")
    argsz, _, _, count = IO_FDS.unpack_from(body)
    if argsz > len(body):
        return ()
    need(body, IO_FDS.size + count * IO_FD.size, "DEVICE_GET_REGION_IO_FDS")
    entries: list[IoFd] = []
    for i in range(count):
        offset, size, at, kind, flags, _, data = IO_FD.unpack_from(
            body, IO_FDS.size + i * IO_FD.size
        )
        if at >= len(fds):
            raise bad("DEVICE_GET_REGION_IO_FDS", f"names descriptor {at} of {len(fds)}")
        entries.append(IoFd(offset, size, fds[at], flags, data, kind == IO_FD_TYPE_IOREGIONFD))
    return tuple(entries)


# --- interrupts -------------------------------------------------------------------------------


def pack_set_irqs(r: IrqRequest) -> bytes:
    size = IRQ_SET.size + len(r.data)
    return IRQ_SET.pack(size, r.flags, r.index, r.start, r.count) + r.data


def parse_set_irqs(body: Bytes) -> IrqRequest:
    # argsz is not compared with the body: QEMU counts the eventfds in it that travel beside.
    need(body, IRQ_SET.size, "DEVICE_SET_IRQS")
    _, flags, index, start, count = IRQ_SET.unpack_from(body)
    return IrqRequest(flags, index, start, count, bytes(body[IRQ_SET.size :]))


# --- data -------------------------------------------------------------------------------------


def pack_access(offset: int, region: int, count: int, data: Bytes = b"") -> bytes:
    """REGION_READ and REGION_WRITE, both directions."""
    return ACCESS.pack(offset, region, count) + data


def parse_access(body: Bytes, what: str) -> tuple[int, int, int, memoryview]:
    """Offset, region, count and the data that followed."""
    need(body, ACCESS.size, what)
    offset, region, count = ACCESS.unpack_from(body)
    return offset, region, count, memoryview(body)[ACCESS.size :]


def pack_write_multi(writes: Sequence[RegionWrite]) -> bytes:
    """Each write has 1 to 8 bytes. Raises PayloadError for a longer one."""
    parts = [MULTI.pack(len(writes))]
    for w in writes:
        if len(w.data) > 8:
            raise bad("REGION_WRITE_MULTI", f"{len(w.data)} bytes in one write, 8 fit")
        parts.append(MULTI_WRITE.pack(w.offset, w.region, len(w.data), w.data))
    return b"".join(parts)


def parse_write_multi(body: Bytes) -> list[RegionWrite]:
    need(body, MULTI.size, "REGION_WRITE_MULTI")
    (count,) = MULTI.unpack_from(body)
    if len(body) - MULTI.size != count * MULTI_WRITE.size:
        raise bad("REGION_WRITE_MULTI", f"{len(body)} bytes do not hold {count} writes")
    writes: list[RegionWrite] = []
    for offset, region, size, data in MULTI_WRITE.iter_unpack(bytes(body[MULTI.size :])):
        if size > 8:
            raise bad("REGION_WRITE_MULTI", f"{size} bytes in one write, 8 fit")
        writes.append(RegionWrite(offset, region, data[:size]))
    return writes


def parse_dma_access(body: Bytes, what: str) -> tuple[int, int, memoryview]:
    """Address, count and the data that followed (DMA_READ and DMA_WRITE)."""
    need(body, DMA_ACCESS.size, what)
    address, count = DMA_ACCESS.unpack_from(body)
    return address, count, memoryview(body)[DMA_ACCESS.size :]
