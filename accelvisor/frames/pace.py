"""How slowly chunks may come: an overall deadline, and a least rate in each window of time.

A peer that trickles would hold a reservation for ever. Pure: the time is an argument, from any
clock that never goes back. A transfer that legitimately rests (pre-copy waits for pages to get
dirty) says so with :meth:`Pace.rest`.
"""

from __future__ import annotations

from accelvisor.frames.steps import refuse


class Pace:
    """Watches one transfer.

    Args:
        now_ns: the time at which it begins.
        deadline_ns: it must have ended this long after.
        window_ns: over which the rate is measured.
        least_bytes: that must come in each whole window.
    """

    def __init__(self, now_ns: int, *, deadline_ns: int, window_ns: int, least_bytes: int) -> None:
        self._end = now_ns + deadline_ns
        self._window = window_ns
        self._least = least_bytes
        self._since = now_ns
        self._bytes = 0
        self._resting = False

    def came(self, now_ns: int, count: int) -> None:
        """``count`` bytes came; the rest, if there was one, is over.

        Raises:
            FrameRefused: ``frame-slow``.
        """
        if self._resting:
            self._resting = False
            self._since, self._bytes = now_ns, 0
        # The window is judged by what had come before these bytes did.
        self.check(now_ns)
        self._bytes += count

    def check(self, now_ns: int) -> None:
        """To be asked now and then while nothing comes.

        Raises:
            FrameRefused: ``frame-slow``.
        """
        if now_ns > self._end:
            raise refuse("frame-slow", "the transfer did not end in time")
        if self._resting or now_ns - self._since < self._window:
            return
        if self._bytes < self._least:
            seconds = (now_ns - self._since) / 1e9
            raise refuse(
                "frame-slow",
                f"{self._bytes} bytes came in {seconds:.1f} s, at least {self._least} should have",
            )
        self._since, self._bytes = now_ns, 0

    def rest(self) -> None:
        """Nothing is expected until the next bytes come; the deadline goes on."""
        self._resting = True

    def wake_ns(self, now_ns: int) -> int:
        """When :meth:`check` should be asked next, from the same clock."""
        if self._resting:
            return self._end
        return min(self._end, max(self._since + self._window, now_ns))
