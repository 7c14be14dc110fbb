"""What the device wrote into its VM's RAM while the VM moves, as one piece for the destination.

QEMU copies RAM by its own log, which does not see writes through the memfd. So the pages that the
device wrote since tracking began are taken once more when the VM stands still, and written at the
destination after QEMU loaded its own. Nothing in the piece is believed: the destination writes only
to files that its own client gave it, within their size.

Layout, little-endian: a header; DMA windows (address, bytes, flags); for each file its size, sample
maps (address, offset, bytes) by which it is told from others of that size, runs of pages (first,
count); then the pages of all files in that order.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelvisor.function import state as s
from accelvisor.function.dma import DmaFault, File
from accelvisor.function.endpoints import memfd
from accelvisor.function.track import Run
from accelvisor.limits import MIB
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import PAGE_BYTES

if TYPE_CHECKING:
    from accelvisor.function.device import Device

_MAGIC = 0x4D41_5256_4143_0001
_HEADER = struct.Struct("<QII")  # magic and version, windows, files
_TRIPLE = struct.Struct("<QQQ")
_FILE = struct.Struct("<QII")  # bytes, samples, runs
_RUN = struct.Struct("<QQ")
#: What a saved function brings whose VM's RAM is none of its business: no window, no file.
NOTHING = _HEADER.pack(_MAGIC, 0, 0)
#: Windows that are listed; of a guest behind an IOMMU with more of them none is checked.
_MOST_WINDOWS = 65_536
_SAMPLES = 16
#: Below this a PC's chipset decides what is memory, and its own state may come after ours.
_LEGACY_BYTES = MIB


@dataclass(frozen=True, slots=True)
class _Part:
    """One file's share of the piece."""

    nbytes: int
    samples: tuple[tuple[int, int, int], ...]
    runs: tuple[Run, ...]

    @property
    def content(self) -> int:
        return sum(count for _, count in self.runs) * PAGE_BYTES


def save(device: Device) -> int:
    """The piece, in a sealed memfd that the caller closes. The device stands still.

    Raises:
        Refusal: a file of the client's cannot be read any more.
    """
    parts = []
    files = []
    for slot in device.track.slots():
        file = device.descriptors.files.get(slot)
        if file is None:
            raise Refusal(errno.EIO, "the client's memory went while it moved", where="ram")
        runs = tuple(device.track.runs(slot))
        samples = tuple(
            (address, offset, size)
            for address, size, offset, _, owner, _ in device.maps.entries()
            if owner == slot
        )[:_SAMPLES]
        parts.append(_Part(file.size, samples, runs))
        files.append(file)
    head = _pack(windows(device), parts)
    fd = memfd("ram", max(1, len(head) + sum(part.content for part in parts)))
    with mmap.mmap(fd, 0) as mapped, memoryview(mapped) as view:
        view[: len(head)] = head
        at = len(head)
        for part, file in zip(parts, files, strict=True):
            for first, count in part.runs:
                size = min(count * PAGE_BYTES, file.size - first * PAGE_BYTES)
                file.read_into(first * PAGE_BYTES, view[at : at + size])
                at += count * PAGE_BYTES
    return fd


def windows(device: Device) -> list[tuple[int, int, int]]:
    """(address, bytes, flags) of what the device may reach in files of the client's, neighbours
    together; empty when there are too many to list.
    """
    found: list[tuple[int, int, int]] = []
    last = (-1, -1)  # slot, offset where the last one ended
    for address, size, offset, flags, slot, _ in device.maps.entries():
        if slot < 0:
            continue
        before = found[-1] if found else (0, 0, 0)
        if last == (slot, offset) and before[0] + before[1] == address and before[2] == flags:
            found[-1] = (before[0], before[1] + size, flags)
        else:
            found.append((address, size, flags))
        last = (slot, offset + size)
    return found if len(found) <= _MOST_WINDOWS else []


def load(device: Device, fd: int) -> int:
    """Write the piece in ``fd`` into the client's files; returns how many bytes.

    Raises:
        Refusal: the piece is damaged, or this VM's memory is another than the source's.
    """
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        listed, parts, at = _parse(view)
        _check_windows(device, listed)
        done = 0
        for part in parts:
            file = _match(device, part)
            for first, count in part.runs:
                here = min(count * PAGE_BYTES, file.size - first * PAGE_BYTES)
                try:
                    file.write_from(first * PAGE_BYTES, view[at : at + here])
                except DmaFault as fault:
                    raise _bad(str(fault)) from fault
                at += count * PAGE_BYTES
                done += here
        return done


def _pack(listed: Sequence[tuple[int, int, int]], parts: Sequence[_Part]) -> bytes:
    out = bytearray(_HEADER.pack(_MAGIC, len(listed), len(parts)))
    for window in listed:
        out += _TRIPLE.pack(*window)
    for part in parts:
        out += _FILE.pack(part.nbytes, len(part.samples), len(part.runs))
        for sample in part.samples:
            out += _TRIPLE.pack(*sample)
        for run in part.runs:
            out += _RUN.pack(*run)
    return bytes(out)


def _parse(view: memoryview) -> tuple[list[tuple[int, int, int]], list[_Part], int]:
    """(windows, files, where the content begins); everything in it is within bounds."""
    at = 0

    def take(form: struct.Struct, count: int) -> list[tuple[int, ...]]:
        nonlocal at
        end = at + form.size * count
        if end > len(view):
            raise _bad("it is cut short")
        found = list(form.iter_unpack(view[at:end]))
        at = end
        return found

    magic, count, files = take(_HEADER, 1)[0]
    if magic != _MAGIC or count > _MOST_WINDOWS or files > s.FD_SLOTS:
        raise _bad("its header is impossible")
    listed = [(a, n, f) for a, n, f in take(_TRIPLE, count)]
    parts = []
    for _ in range(files):
        nbytes, samples, runs = take(_FILE, 1)[0]
        if samples > _SAMPLES or nbytes > 1 << 62:
            raise _bad("a file's record is impossible")
        known = tuple((a, o, n) for a, o, n in take(_TRIPLE, samples))
        pages = -(-nbytes // PAGE_BYTES)
        marked = []
        end = 0
        for first, length in take(_RUN, runs):
            if not length or first < end or first + length > pages:
                raise _bad("a run of pages leaves its file")
            end = first + length
            marked.append((first, length))
        parts.append(_Part(nbytes, known, tuple(marked)))
    if at + sum(part.content for part in parts) != len(view):
        raise _bad("its length is another than its runs'")
    return listed, parts, at


def _match(device: Device, part: _Part) -> File:
    """Which of the client's files here is that file there."""
    files = device.descriptors.files
    slots = {slot for slot, file in files.items() if file.size == part.nbytes and file.writable}
    for address, offset, size in part.samples:
        if len(slots) < 2:
            break
        here = device.maps.single(address, size, 0)
        if here is not None:
            slots &= {here.slot} if here.offset == offset else set()
    if len(slots) != 1:
        raise Refusal(
            errno.EINVAL,
            f"{len(slots)} of the VM's memory files have {part.nbytes} bytes, as the source's had",
            where="ram",
        )
    return files[slots.pop()]


def _check_windows(device: Device, listed: Sequence[tuple[int, int, int]]) -> None:
    for start, length, flags in listed:
        address = max(start, _LEGACY_BYTES)
        size = start + length - address
        if size <= 0:
            continue
        try:
            if all(piece.slot >= 0 for piece in device.maps.pieces(address, size, flags & 3)):
                continue
            why = "has no file here"
        except DmaFault as fault:
            why = str(fault)
        raise Refusal(
            errno.EINVAL,
            f"the device could reach {size} bytes at {address:#x} at the source: {why}",
            where="ram",
        )


def _bad(why: str) -> Refusal:
    return Refusal(errno.EINVAL, f"the written pages of RAM are damaged: {why}", where="ram")
