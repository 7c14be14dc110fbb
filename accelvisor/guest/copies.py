"""Bytes to and from tensors, by the way that costs least.

    pinned       the bytes lie in a DMA buffer already: the device fetches them, we copy nothing
    window       through a span of BAR2: no allocation, the choice for small copies
    bounce       through kept DMA buffers, larger than the window's share

Window and bounce copies are cut in chunks with two in flight, so that the guest copies one while
the device copies the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from accelvisor.abi import commands
from accelvisor.abi.commands import SEGMENT, Memory, Space, Transfer
from accelvisor.abi.registers import PAGE
from accelvisor.errors import AccelvisorError
from accelvisor.guest.errors import DeviceInTransition
from accelvisor.guest.staging import DmaPool, SharedBuffer, Span, Staging, pieces
from accelvisor.guest.transport import DmaBuffer

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

_SEGMENTS = PAGE // SEGMENT.size  # a list fills one page, which is contiguous on any transport
_BOUNCE_BYTES = 1 << 20
_IN_FLIGHT = 2
_UNSTEADY_LOOKS = 200  # with naps of up to 20 ms between: about 4 s


class Landing(Protocol):
    """Memory for one command, as guest and device see it."""

    view: memoryview
    memory: Memory

    def release(self) -> None:
        """Give it back; the device is done with it."""
        ...


class WindowLanding:
    """A span of the window."""

    __slots__ = ("_span", "memory", "view")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.view = span.view
        self.memory = Memory(Space.WINDOW, Transfer(0), span.offset, span.nbytes, 0)

    def release(self) -> None:
        """Give the span back."""
        self._span.release()


class DmaLanding:
    """Part of a DMA buffer, with its segment list when it is scattered.

    ``done`` is called at release, for example to give the buffer back to its pool.
    """

    __slots__ = ("_done", "_list", "_pool", "memory", "view")

    def __init__(
        self,
        pool: DmaPool,
        buffer: DmaBuffer,
        offset: int,
        nbytes: int,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._done = done
        self._list: DmaBuffer | None = None
        self.view = buffer.view[offset : offset + nbytes]
        segments = pieces(buffer, offset, nbytes)
        if len(segments) == 1:
            self.memory = Memory(Space.GUEST, Transfer(0), segments[0][0], nbytes, 0)
            return
        self._list = page = pool.take(PAGE)
        for i, segment in enumerate(segments):
            SEGMENT.pack_into(page.view, i * SEGMENT.size, *segment)
        self.memory = Memory(
            Space.GUEST, Transfer.SCATTER, page.address, nbytes, len(segments)
        )

    def release(self) -> None:
        """Give the list and the buffer back."""
        self.view.release()
        if self._list is not None:
            self._pool.give(self._list)
            self._list = None
        if self._done is not None:
            done, self._done = self._done, None
            done()


def cut(buffer: DmaBuffer, offset: int, nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of parts of ``buffer``: each of at most ``most`` bytes, and of no more
    segments than one page lists.
    """
    end = offset + nbytes
    while offset < end:
        size = min(most, end - offset)
        segments = pieces(buffer, offset, size)
        if len(segments) > _SEGMENTS:
            size = sum(n for _, n in segments[:_SEGMENTS])
        yield offset, size
        offset += size


class Copies:
    """The copies of one context.

    Args:
        bounce_from: copies of at least this many bytes go by DMA when the transport can do it.
    """

    def __init__(
        self, function: Function, staging: Staging, pool: DmaPool, bounce_from: int | None = None
    ) -> None:
        self._function = function
        self._staging = staging
        self._pool = pool
        capacity = staging.spans.capacity
        # A quarter, so that two chunks in flight leave room for bindings and answers.
        self._window_chunk = max(min(capacity // 4, _BOUNCE_BYTES) // PAGE * PAGE, PAGE)
        self.bounce_from = self._window_chunk * 2 if bounce_from is None else bounce_from
        self._dma_refused: AccelvisorError | None = None

    def landing(self, nbytes: int) -> Landing:
        """Memory of ``nbytes`` for one command: in the window if it fits, else by DMA."""
        if nbytes <= self._staging.spans.capacity // 2:
            return self._window(nbytes)
        return self._bounce(nbytes)

    def filled(self, data: bytes | bytearray) -> Landing:
        """Memory for one command that holds ``data``, also after the window was away meanwhile.

        Raises:
            DeviceReset, DeviceBroken, DeviceInTransition: the window went away for good.
        """
        landing = self.landing(len(data))
        self._fill(landing, data)
        return landing

    def fetch(self, landing: Landing, target: memoryview) -> None:
        """Take what the device left in the first bytes of the landing. Raises as :meth:`filled`."""
        if isinstance(landing, DmaLanding):
            target[:] = landing.view[: len(target)]
            return

        def get() -> None:
            target[:] = landing.view[: len(target)]

        self._steadily(get)

    def write(self, handle: int, offset: int, source: memoryview) -> None:
        """Copy ``source`` (contiguous bytes) into a tensor from byte ``offset`` on, and wait.

        Raises:
            CommandRefused, DeviceFault, CommandTimeout, DeviceReset.
        """
        self._run(source, handle, offset, commands.copy_in, inward=True)

    def read(self, handle: int, offset: int, target: memoryview) -> None:
        """Copy a tensor's bytes from ``offset`` on into ``target``, and wait. Raises as write."""
        self._run(target, handle, offset, commands.copy_out, inward=False)

    def direct(
        self, handle: int, offset: int, buffer: SharedBuffer, at: int, nbytes: int, *, inward: bool
    ) -> None:
        """Copy between a tensor and a DMA buffer that the caller owns, from its byte ``at`` on.

        Each command holds the buffer, so one that times out keeps it in place.
        """
        encode = commands.copy_in if inward else commands.copy_out
        flying: deque[tuple[int, Landing]] = deque()
        try:
            for start, size in cut(buffer, at, nbytes, 1 << 30):
                buffer.hold()
                try:
                    landing = DmaLanding(self._pool, buffer, start, size, buffer.release)
                except BaseException:
                    buffer.release()
                    raise
                entry = encode(0, handle, offset + start - at, landing.memory)
                flying.append((self._submit(entry, landing), landing))
                if len(flying) > 8:
                    self._finish(flying)
            while flying:
                self._finish(flying)
        except BaseException:
            self._leave(flying)
            raise

    # --- inside ----------------------------------------------------------------------------------

    def _run(
        self,
        data: memoryview,
        handle: int,
        offset: int,
        encode: Callable[[int, int, int, Memory], bytes],
        *,
        inward: bool,
    ) -> None:
        total = len(data)
        make, chunk = self._choose(total)
        generation = self._function.generation
        flying: deque[tuple[int, Landing, int]] = deque()
        at = 0
        try:
            while at < total or flying:
                if at < total and len(flying) < _IN_FLIGHT:
                    size = min(chunk, total - at)
                    landing = make(size)
                    if inward:
                        self._fill(landing, data[at : at + size])
                    entry = encode(0, handle, offset + at, landing.memory)
                    flying.append((self._submit(entry, landing), landing, at))
                    at += size
                    continue
                cookie, landing, start = flying[0]
                completion = self._function.queue.wait(cookie, self._function.timeout_s)
                flying.popleft()
                try:
                    if completion.status == 0 and not inward:
                        self.fetch(landing, data[start : start + len(landing.view)])
                finally:
                    landing.release()
                self._function.check(completion)
                gone = self._function.stale(generation)
                if gone is not None:  # restarted by another thread: the bytes may be anybody's
                    raise gone
        except BaseException:
            self._leave((cookie, landing) for cookie, landing, _ in flying)
            raise

    def _fill(self, landing: Landing, data: bytes | bytearray | memoryview) -> None:
        def put() -> None:
            landing.view[:] = data

        try:
            if isinstance(landing, DmaLanding):
                put()
            else:
                self._steadily(put)
        except BaseException:
            landing.release()
            raise

    def _steadily(self, act: Callable[[], None]) -> None:
        """Do ``act`` while the window is there before and after; again, until that held."""
        staging, queue = self._staging, self._function.queue
        for looks in range(_UNSTEADY_LOOKS):
            if staging.steady():
                act()
                if staging.steady():
                    return
            queue.look(locked=False)  # waits while the device is away; raises if it was reset
            staging.plant()
            if looks:
                queue.nap(min(looks * 0.001, 0.02))
        raise DeviceInTransition(
            "the window forgets what is written into it", where="window", hint="reset the function"
        )


    def _submit(self, entry: bytes, landing: Landing) -> int:
        try:
            return self._function.queue.submit(entry, self._function.timeout_s)
        except AccelvisorError:  # it was not submitted; after anything else nobody knows
            landing.release()
            raise

    def _finish(self, flying: deque[tuple[int, Landing]]) -> None:
        cookie, landing = flying[0]
        completion = self._function.queue.wait(cookie, self._function.timeout_s)
        flying.popleft()
        landing.release()
        self._function.check(completion)

    def _leave(self, flying: deque[tuple[int, Landing]] | Iterator[tuple[int, Landing]]) -> None:
        """Nobody waits for these any more, but their memory stays taken until they complete."""
        for cookie, landing in flying:
            self._function.queue.abandon(cookie, landing.release)

    def _choose(self, total: int) -> tuple[Callable[[int], Landing], int]:
        if total >= self.bounce_from and self._dma_refused is None:
            try:
                # A first buffer tells whether this process may do DMA at all.
                self._pool.give(self._pool.take(min(total, _BOUNCE_BYTES)))
                return self._bounce, _BOUNCE_BYTES
            except AccelvisorError as error:
                self._dma_refused = error  # the window serves as well, in smaller steps
        return self._window, self._window_chunk

    def _window(self, nbytes: int) -> Landing:
        return WindowLanding(self._staging.take(nbytes, self._function.reclaim))

    def _bounce(self, nbytes: int) -> Landing:
        buffer = self._pool.take(nbytes)
        if len(pieces(buffer, 0, nbytes)) > _SEGMENTS:
            self._pool.give(buffer)
            raise AccelvisorError(
                f"{nbytes} bytes are in too many pieces", code="dma-scattered", where="dma"
            )
        return DmaLanding(self._pool, buffer, 0, nbytes, lambda: self._pool.give(buffer))
