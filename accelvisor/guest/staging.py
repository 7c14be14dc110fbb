"""Memory that guest and device both see, handed out in spans.

Two kinds. *Window staging* lies in BAR2: always there, no address translation, but small and shared
by all processes of the guest; so that processes need not talk to each other, each queue owns an
equal part. *DMA buffers* are guest RAM: as large as wanted, but they cost a locked allocation, so
they are kept and used again.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence

from accelvisor.abi.registers import PAGE
from accelvisor.errors import CapacityError, UsageError
from accelvisor.guest.registers import Identity
from accelvisor.guest.transport import DmaBuffer, Transport, segments_of, slice_segments

ALIGN = 64
_BEACONS = 0x7FFFFFFE


class Spans:
    """First-fit allocator over ``[start, end)``; neighbours that come free are joined.

    Offsets and sizes are bytes, rounded to cache lines so that two spans never share one.
    """

    def __init__(self, start: int, end: int) -> None:
        self._free: list[tuple[int, int]] = [(start, end)] if end > start else []
        self.capacity = max(end - start, 0)

    @property
    def largest(self) -> int:
        """The largest span that could be had now."""
        return max((end - start for start, end in self._free), default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of a free span of ``nbytes``, now taken; None when there is none."""
        size = _rounded(nbytes)
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, end)
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Return what :meth:`take` gave, with the same ``nbytes``."""
        start, end = offset, offset + _rounded(nbytes)
        joined = []
        for s, e in self._free:
            if e == start:
                start = s
            elif s == end:
                end = e
            else:
                joined.append((s, e))
        insort(joined, (start, end))
        self._free = joined


def _rounded(nbytes: int) -> int:
    return max(nbytes + ALIGN - 1, ALIGN) // ALIGN * ALIGN


class Span:
    """A taken part of the window. ``offset`` is from the window's start, in bytes."""

    __slots__ = ("_pool", "nbytes", "offset", "view")

    def __init__(self, pool: Staging, offset: int, nbytes: int) -> None:
        self._pool: Staging | None = pool
        self.offset = offset
        self.nbytes = nbytes
        self.view = pool.window[offset : offset + nbytes]

    def release(self) -> None:
        """Give it back. Only after the device's last use of it. Safe to call twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.view.release()
            with pool.lock:
                pool.taken.discard(self)
                pool.spans.give(self.offset, self.nbytes)


class Staging:
    """One queue's part of the window's staging memory."""

    def __init__(self, window: memoryview, identity: Identity, queue: int) -> None:
        self.window = window
        share = (identity.window_bytes - identity.staging_offset) // identity.queues
        share = share // PAGE * PAGE
        start = identity.staging_offset + queue * share
        self.spans = Spans(start + ALIGN, start + share)
        self.taken: set[Span] = set()
        self.lock = threading.Lock()  # spans come back from whichever thread sees the completion
        self._words = window.cast("I")
        self._beacon_at = start >> 2 if share else -1
        self._beacon = 1
        self.plant()

    def take(self, nbytes: int, wait: Callable[[], bool] | None = None) -> Span:
        """A span of ``nbytes``.

        Args:
            wait: called while there is no room; returns False when waiting is in vain.

        Raises:
            CapacityError: no room, and none will come free.
        """
        while True:
            with self.lock:
                offset = self.spans.take(nbytes)
                if offset is not None:
                    span = Span(self, offset, nbytes)
                    self.taken.add(span)
                    return span
            if nbytes > self.spans.capacity or wait is None or not wait():
                raise CapacityError(
                    f"{nbytes} bytes of window staging wanted, "
                    f"{self.spans.largest} of {self.spans.capacity} are free",
                    code="staging-full",
                    where="staging",
                    hint="wait for launches in flight, or give the function a larger window",
                )

    def steady(self) -> bool:
        """Whether the window is there now and was not emptied since this was last true.

        A word of it holds a number that is neither zero nor all ones, another one after each look:
        an absent window shows the wrong one and keeps no new one, an emptied one lost the old one.
        A register would say the same for the price of an exit from the VM.
        """
        at = self._beacon_at
        if at < 0:
            return True
        with self.lock:
            words, old = self._words, self._beacon
            if words[at] != old:
                return False
            words[at] = new = old % _BEACONS + 1
            if words[at] != new:
                return False
            self._beacon = new
        return True

    def plant(self) -> None:
        """After :meth:`steady` was false and the reason is known: begin again."""
        if self._beacon_at >= 0:
            with self.lock:
                self._words[self._beacon_at] = self._beacon

    def close(self) -> None:
        """Take the window away from spans that are still out, so that it can be unmapped."""
        for span in list(self.taken):
            span.release()
        self._words.release()

    def forked(self) -> None:
        """In a forked child: as :meth:`close`, whoever held the lock in the parent."""
        self.lock = threading.Lock()
        self.close()


class SharedBuffer:
    """A DMA buffer that its owner and the commands that use it hold; the last one releases it.

    Itself a DMA buffer; :meth:`release` is called once for the owner and once for each
    :meth:`hold`.
    """

    def __init__(self, buffer: DmaBuffer) -> None:
        self._buffer = buffer
        self._users = 1
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Where the device finds the first byte."""
        return self._buffer.address

    @property
    def view(self) -> memoryview:
        """The bytes, for this process."""
        return self._buffer.view

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """(address, bytes) of each piece that is contiguous for the device."""
        return segments_of(self._buffer)

    def hold(self) -> None:
        """One more user.

        Raises:
            UsageError: it was released by all.
        """
        with self._lock:
            if not self._users:
                raise UsageError("the memory was released", code="dma-released", where="dma")
            self._users += 1

    def release(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._buffer.release()


class DmaPool:
    """DMA buffers, kept for the next user: allocating one costs locked pages and look-ups."""

    def __init__(self, transport: Transport, keep: int = 4) -> None:
        self._transport = transport
        self._keep = keep
        self._idle: list[DmaBuffer] = []
        self._lock = threading.Lock()  # buffers come back from whichever thread reaps
        self._closed = False

    def take(self, nbytes: int) -> DmaBuffer:
        """A buffer of at least ``nbytes``; its contents are whatever was there."""
        with self._lock:
            fits = [i for i, b in enumerate(self._idle) if len(b.view) >= nbytes]
            if fits:
                return self._idle.pop(min(fits, key=lambda i: len(self._idle[i].view)))
        return self._transport.allocate_dma((nbytes + PAGE - 1) // PAGE * PAGE)

    def give(self, buffer: DmaBuffer) -> None:
        """Return a buffer that the device no longer uses."""
        with self._lock:
            kept = not self._closed and len(self._idle) < self._keep
            if kept:
                self._idle.append(buffer)
        if not kept:
            buffer.release()

    def close(self) -> None:
        """Release what is idle, and what comes back from now on."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for buffer in idle:
            buffer.release()


def pieces(buffer: DmaBuffer, offset: int, nbytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of a part of ``buffer``, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for address, size in slice_segments(segments_of(buffer), offset, nbytes):
        if joined and joined[-1][0] + joined[-1][1] == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    return joined
