"""The function's view of its VM's RAM: the client's DMA maps, and nothing else.

Maps live in the state memfd; this module keeps a sorted index of them. Every access looks its range
up again, so an unmap takes effect at once, and checks direction and the bus-master bit (QEMU does
not gate DMA through a mapped memfd by it).

A client may truncate a file that it gave us, and touching a vanished page kills the process. So a
file is only mapped when it is sealed against shrinking (QEMU's memfd backend seals); any other is
read and written by preadv and pwritev, which answer with a short count. Maps without a file are
reached by messages to the client.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.pauses import Pauses
from accelvisor.function.state import State
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal

READABLE = 1
WRITABLE = 2
_LIVE = 1 << 31
_TOP = 1 << 64
_RECORD = struct.Struct("<QQQII")  # address, size, offset, flags, descriptor slot + 1
#: Copies at least this large go through numpy, which lets other threads run meanwhile.
_LARGE = 64 * 1024
#: Maps that a check walks before it lets go of the lock: a fraction of a millisecond.
_PORTION = 512
_NO_FILE = -1


class DmaFault(Exception):  # noqa: N818 - a status on its way to the guest, not an error of ours
    """A transfer that may not or cannot happen. ``status`` is what the command completes with."""

    def __init__(self, status: CommandStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Remote(Protocol):
    """DMA by message, for maps without a file. Raises DmaFault when the client refuses."""

    def read(self, address: int, count: int) -> Pauses[bytes]: ...

    def write(self, address: int, data: bytes) -> Pauses[None]: ...


class Piece(NamedTuple):
    """A contiguous part of one map."""

    address: int
    nbytes: int
    slot: int  # descriptor slot, -1 without a file
    offset: int  # byte in the file


class File:
    """One file of the client's, however many maps lie in it."""

    def __init__(self, fd: int) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refusal(errno.EINVAL, "a DMA map's descriptor is no regular file", where="dma")
        self.fd = fd
        self.size = info.st_size
        self.key = (info.st_dev, info.st_ino, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        self.writable = self.key[2] == os.O_RDWR
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        self.sealed = bool(seals & fcntl.F_SEAL_SHRINK)

    def view(self) -> memoryview | None:
        """The whole file mapped, or None when it may shrink under us."""
        if self._view is None and self.sealed and self.size:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            try:
                self._map = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED, access)
            except OSError:
                return None  # sealed against writing, or no address space left: preadv then
            self._view = memoryview(self._map)
        return self._view

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset``. Raises DmaFault when the file has shrunk."""
        view = self.view()
        if view is not None:
            copy(target, view[offset : offset + len(target)])
            return
        done = 0
        while done < len(target):
            count = _io(os.preadv, self.fd, target[done:], offset + done)
            if not count:
                raise DmaFault(CommandStatus.BAD_ADDRESS, "the client's memory file has shrunk")
            done += count

    def write_from(self, offset: int, source: memoryview) -> None:
        """Store ``source`` at byte ``offset``. Raises DmaFault when the file has shrunk."""
        view = self.view()
        if view is not None:
            copy(view[offset : offset + len(source)], source)
            return
        # pwritev would let a shrunken file grow again; the client's file keeps its size.
        if os.fstat(self.fd).st_size < offset + len(source):
            raise DmaFault(CommandStatus.BAD_ADDRESS, "the client's memory file has shrunk")
        done = 0
        while done < len(source):
            done += _io(os.pwritev, self.fd, source[done:], offset + done)

    def close(self) -> None:
        """Unmap; the descriptor is the caller's to close."""
        if self._view is not None and self._map is not None:
            self._view.release()
            self._map.close()
            self._view = self._map = None


def _io(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, view: memoryview, offset: int
) -> int:
    try:
        return call(fd, [view], offset)
    except OSError as error:
        text = f"the client's memory file answers {errno.errorcode.get(error.errno or 0)}"
        raise DmaFault(CommandStatus.BAD_ADDRESS, text) from error


def copy(target: memoryview, source: memoryview) -> None:
    """memcpy between two byte views of equal length; large ones without the interpreter's lock."""
    if len(source) < _LARGE:
        target[:] = source
        return
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class AddressMap:
    """DMA maps in address order over the records of the state memfd.

    ``files`` maps descriptor slots to :class:`File`; the device fills it as descriptors arrive.
    """

    def __init__(self, state: State, files: dict[int, File]) -> None:
        self._state = state
        self._files = files
        self._starts: list[int] = []
        self._maps: list[tuple[int, int, int, int, int, int]] = []
        self._free: list[int] = []
        self._fresh = 0
        self._used_slots: dict[int, int] = {}
        found = []
        for index in range(state.u32[s.N_DMA_TOP]):
            address, nbytes, offset, flags, slot_plus_1 = _RECORD.unpack_from(
                state.u8, s.DMA_AT + index * s.DMA_BYTES
            )
            if flags & _LIVE:
                found.append((address, nbytes, offset, flags & ~_LIVE, slot_plus_1 - 1, index))
        self._adopt(sorted(found))

    def _adopt(self, found: list[tuple[int, int, int, int, int, int]]) -> None:
        self._maps = found
        self._starts = [m[0] for m in found]
        taken = {m[5] for m in found}
        self._fresh = max(taken, default=-1) + 1
        self._free = [i for i in range(self._fresh - 1, -1, -1) if i not in taken]
        for entry in found:
            self._used_slots[entry[4]] = self._used_slots.get(entry[4], 0) + 1

    def __len__(self) -> int:
        return len(self._maps)

    def entries(self) -> list[tuple[int, int, int, int, int, int]]:
        """(address, bytes, offset, flags, slot, record) of every map, in address order."""
        return list(self._maps)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of every map."""
        return iter([(m[0], m[1]) for m in self._maps])

    def uses(self, slot: int) -> bool:
        """Whether a map lies in the file of this descriptor slot."""
        return self._used_slots.get(slot, 0) > 0

    def has_file(self, address: int) -> bool:
        """Whether the map at an address, if there is one, lies in a file."""
        at = bisect_right(self._starts, address) - 1
        return at < 0 or self._maps[at][4] != _NO_FILE

    def map(self, address: int, size: int, flags: int, offset: int, slot: int) -> None:
        """Add a map. ``slot`` is -1 without a file. The very same map again is taken as a repeat
        (a message handled twice because a worker died).

        Raises:
            Refusal: EINVAL for a bad range, EEXIST for an overlap, ENOSPC beyond the limit.
        """
        if size <= 0 or address < 0 or address + size > _TOP or not flags & 3:
            raise Refusal(errno.EINVAL, f"map of {size} bytes at {address:#x}", where="dma")
        file = self._files.get(slot)
        if slot >= 0:
            if file is None or offset + size > file.size:
                raise Refusal(errno.EINVAL, "the map exceeds its file", where="dma")
            if flags & WRITABLE and not file.writable:
                raise Refusal(errno.EACCES, "a writable map of a read-only file", where="dma")
        at = bisect_right(self._starts, address)
        if at and self._maps[at - 1][:5] == (address, size, offset, flags & 3, slot):
            return
        if at and self._starts[at - 1] + self._maps[at - 1][1] > address:
            raise Refusal(errno.EEXIST, f"{address:#x} is mapped already", where="dma")
        if at < len(self._starts) and self._starts[at] < address + size:
            raise Refusal(errno.EEXIST, f"{address:#x} overlaps a map", where="dma")
        if len(self._maps) >= min(s.DMA_RECORDS, LIMITS.dma_maps):
            raise Refusal(errno.ENOSPC, "too many DMA maps", where="dma")
        if self._free:
            index = self._free.pop()
        else:
            index = self._fresh
            self._fresh += 1
            self._state.u32[s.N_DMA_TOP] = self._fresh  # a new worker looks no further
        record = s.DMA_AT + index * s.DMA_BYTES
        _RECORD.pack_into(self._state.u8, record, address, size, offset, 0, slot + 1)
        self._state.u32[record // 4 + 6] = flags & 3 | _LIVE
        self._starts.insert(at, address)
        self._maps.insert(at, (address, size, offset, flags & 3, slot, index))
        self._used_slots[slot] = self._used_slots.get(slot, 0) + 1

    def unmap(self, address: int, size: int) -> list[tuple[int, int]]:
        """Remove every map inside the range (VFIO type 1 v2: a range may cover many maps and
        holes, it may not cut one). Returns the (address, bytes) removed, none is fine.

        Raises:
            Refusal: EINVAL, the range is impossible or would cut a map.
        """
        if size <= 0 or address < 0 or address + size > _TOP:
            raise Refusal(errno.EINVAL, f"unmap of {size} bytes at {address:#x}", where="dma")
        first = bisect_right(self._starts, address)
        if first and self._starts[first - 1] == address:
            first -= 1
        elif first and self._starts[first - 1] + self._maps[first - 1][1] > address:
            raise Refusal(errno.EINVAL, f"unmap at {address:#x} cuts a map", where="dma")
        end = bisect_right(self._starts, address + size - 1)
        if end > first and self._starts[end - 1] + self._maps[end - 1][1] > address + size:
            raise Refusal(errno.EINVAL, f"unmap up to {address + size:#x} cuts a map", where="dma")
        return self._remove(first, end)

    def clear(self) -> None:
        """Remove every map."""
        self._remove(0, len(self._maps))
        self._state.u32[s.N_DMA_TOP] = self._fresh = 0
        self._free.clear()

    def _remove(self, first: int, end: int) -> list[tuple[int, int]]:
        gone = self._maps[first:end]
        for entry in gone:
            record = s.DMA_AT + entry[5] * s.DMA_BYTES
            self._state.u32[record // 4 + 6] = 0
            self._state.zero(record, s.DMA_BYTES)
            self._free.append(entry[5])
            left = self._used_slots[entry[4]] - 1
            if left:
                self._used_slots[entry[4]] = left
            else:
                del self._used_slots[entry[4]]
        del self._starts[first:end]
        del self._maps[first:end]
        return [(entry[0], entry[1]) for entry in gone]

    def pieces(self, address: int, count: int, needed: int) -> list[Piece]:
        """The maps that cover a range, cut to it.

        Raises:
            DmaFault: BAD_ADDRESS where nothing is mapped, DMA_DENIED where a map lacks ``needed``.
        """
        return list(self._walk(address, count, needed))

    def single(self, address: int, count: int, needed: int) -> Piece | None:
        """The piece that is all of the range, when one map with a file allows and covers it."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or not count:
            return None
        start, size, offset, flags, slot, _ = self._maps[at]
        inside = address - start
        if slot < 0 or flags & needed != needed or inside + count > size:
            return None
        return Piece(address, count, slot, offset + inside)

    def covered(self, address: int, count: int, needed: int, most: int) -> tuple[int, int]:
        """(bytes, maps) at the start of a range that ``most`` maps cover. Raises as ``pieces``."""
        done = walked = 0
        for piece in self._walk(address, count, needed):
            done += piece.nbytes
            walked += 1
            if walked == most:
                break
        return done, walked

    def _walk(self, address: int, count: int, needed: int) -> Iterator[Piece]:
        starts, maps = self._starts, self._maps
        if address + count > _TOP:
            raise DmaFault(CommandStatus.BAD_ADDRESS, f"{count} bytes at {address:#x} wrap around")
        at = bisect_right(starts, address) - 1
        while count > 0:
            if not 0 <= at < len(maps):
                raise DmaFault(CommandStatus.BAD_ADDRESS, f"nothing is mapped at {address:#x}")
            start, size, offset, flags, slot, _ = maps[at]
            inside = address - start
            if not 0 <= inside < size:
                raise DmaFault(CommandStatus.BAD_ADDRESS, f"nothing is mapped at {address:#x}")
            if flags & needed != needed:
                way = "read" if needed == READABLE else "write"
                raise DmaFault(
                    CommandStatus.DMA_DENIED, f"the map at {address:#x} may not be {way}"
                )
            take = min(count, size - inside)
            yield Piece(address, take, slot, offset + inside)
            address += take
            count -= take
            at += 1


class Dma:
    """Transfers between the VM's RAM and byte views.

    Args:
        lock: held while maps change and while a piece is resolved and copied, so that an unmap
            that was answered is never followed by another access.
        bus_master: asked before each transfer.
        wrote: told (address, bytes) after each write to the VM's RAM.
        writing: told (slot, offset, bytes) before each write to a file; False forbids it.
    """

    def __init__(
        self,
        maps: AddressMap,
        files: dict[int, File],
        remote: Remote,
        bus_master: Callable[[], bool],
        wrote: Callable[[int, int], None],
        lock: threading.Lock,
        writing: Callable[[int, int, int], bool] = lambda slot, offset, nbytes: True,
    ) -> None:
        self._maps = maps
        self._files = files
        self._remote = remote
        self._bus_master = bus_master
        self._wrote = wrote
        self._writing = writing
        self._lock = lock

    def check(self, spans: Iterable[tuple[int, int]], write: bool) -> Pauses[None]:
        """Refuse a list of spans as a whole before any byte moves. In portions of maps walked: a
        long list, or one span over many small maps, keeps neither a map nor the engine waiting.
        Raises DmaFault.
        """
        self._master()
        needed = WRITABLE if write else READABLE
        budget = _PORTION
        for address, count in spans:
            while count:
                with self._lock:
                    done, walked = self._maps.covered(address, count, needed, budget)
                address += done
                count -= done
                budget -= walked
                if not budget:
                    budget = _PORTION
                    yield None

    def stride(self, address: int, count: int) -> int:
        """How much of a range to move in one step at most: what goes by message goes singly."""
        chunk = LIMITS.vfio_dma_chunk_bytes
        if count <= chunk or not self._maps.uses(_NO_FILE):
            return count
        with self._lock:
            return count if self._maps.has_file(address) else chunk

    def read(self, address: int, target: memoryview) -> Pauses[None]:
        """VM RAM -> ``target``. What lies in files is there without a pause. Raises DmaFault."""
        if self.read_files(address, target):
            return
        chunk = LIMITS.vfio_dma_chunk_bytes
        for at in range(0, len(target), chunk):
            part = target[at : at + chunk]
            if not self.read_files(address + at, part):
                part[:] = yield from self._remote.read(address + at, len(part))

    def write(self, address: int, source: memoryview) -> Pauses[None]:
        """``source`` -> VM RAM. What lies in files is there without a pause. Raises DmaFault."""
        if self.write_files(address, source):
            return
        chunk = LIMITS.vfio_dma_chunk_bytes
        for at in range(0, len(source), chunk):
            part = source[at : at + chunk]
            if not self.write_files(address + at, part):
                # Marked before as well: a write whose command is aborted meanwhile still happens.
                self._wrote(address + at, len(part))
                yield from self._remote.write(address + at, bytes(part))
                self._wrote(address + at, len(part))

    def read_files(self, address: int, target: memoryview) -> bool:
        """As ``read``, without a pause; False, and nothing moved, when a part has no file."""
        self._master()
        at = 0
        with self._lock:
            one = self._maps.single(address, len(target), READABLE)
            if one is not None:
                self._files[one.slot].read_into(one.offset, target)
                return True
            pieces = self._maps.pieces(address, len(target), READABLE)
            if any(piece.slot < 0 for piece in pieces):
                return False
            for piece in pieces:
                part = target[at : at + piece.nbytes]
                self._files[piece.slot].read_into(piece.offset, part)
                at += piece.nbytes
        return True

    def write_files(self, address: int, source: memoryview) -> bool:
        """As ``write``, without a pause; False, and nothing moved, when a part has no file."""
        self._master()
        at = 0
        with self._lock:
            one = self._maps.single(address, len(source), WRITABLE)
            if one is not None:
                self._store(one, source)
                return True
            pieces = self._maps.pieces(address, len(source), WRITABLE)
            if any(piece.slot < 0 for piece in pieces):
                return False
            for piece in pieces:
                part = source[at : at + piece.nbytes]
                self._store(piece, part)
                at += piece.nbytes
        return True

    def _store(self, piece: Piece, source: memoryview) -> None:
        if not self._writing(piece.slot, piece.offset, piece.nbytes):
            raise DmaFault(CommandStatus.BAD_ADDRESS, "beyond what can be tracked of one file")
        self._files[piece.slot].write_from(piece.offset, source)
        self._wrote(piece.address, piece.nbytes)

    def _master(self) -> None:
        if not self._bus_master():
            raise DmaFault(CommandStatus.BUS_MASTER_OFF, "the guest has bus mastering off")

