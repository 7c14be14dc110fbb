"""Interrupt causes, their mask, and the MSI that they raise.

Rules by which no interrupt is lost: the MSI is sent when (1) a cause that was clear is set and not
masked, (2) a mask write uncovers a cause, (3) an acknowledgement leaves another unmasked cause set,
(4) a vector is attached while causes are pending, (5) a worker starts and finds causes pending,
since its predecessor may have died between the cause and the message. A guest that clears a cause
and *then* looks at its rings therefore never misses one; it must tolerate an MSI without a cause.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from accelvisor.function import state as s
from accelvisor.function.state import State

_ONE = (1).to_bytes(8, "little")


def take_eventfd(fd: int) -> bool:
    """Whether a client's descriptor is an eventfd, which is made non-blocking: a write to anything
    else may fail or wait.
    """
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]":
            return False
        os.set_blocking(fd, False)
    except OSError:
        return False
    return True


def _write_eventfd(fd: int) -> None:
    os.write(fd, _ONE)


class Interrupts:
    """Thread-safe: the engine sets causes, the register file acknowledges them."""

    def __init__(self, state: State, send: Callable[[int], None] = _write_eventfd) -> None:
        self._state = state
        self._u32 = state.u32
        self._send = send
        self._lock = threading.Lock()
        self._fd: int | None = None

    def set_cause(self, bits: int) -> None:
        """Add causes; sends the MSI for those that were clear and are not masked."""
        u32 = self._u32
        with self._lock:
            fresh = bits & ~u32[s.R_CAUSE]
            u32[s.R_CAUSE] |= bits
            if fresh & ~u32[s.R_MASK]:
                self._raise()

    def acknowledge(self, bits: int) -> None:
        """Clear the causes in ``bits``."""
        u32 = self._u32
        with self._lock:
            u32[s.R_CAUSE] &= ~bits & 0xFFFF_FFFF
            if bits and u32[s.R_CAUSE] & ~u32[s.R_MASK]:
                self._raise()

    def set_mask(self, mask: int) -> None:
        """Replace the mask; a set bit keeps that cause silent."""
        u32 = self._u32
        with self._lock:
            uncovered = u32[s.R_CAUSE] & u32[s.R_MASK] & ~mask
            u32[s.R_MASK] = mask
            if uncovered:
                self._raise()

    def attach(self, fd: int | None) -> None:
        """The vector's eventfd (owned by the caller), or None while the guest has MSI off."""
        with self._lock:
            self._fd = fd
            if fd is not None and self._u32[s.R_CAUSE] & ~self._u32[s.R_MASK]:
                self._raise()

    def again(self) -> None:
        """Send the MSI once more if a cause is pending: the last one may have been lost with a VM
        that was stopped before it was delivered.
        """
        with self._lock:
            if self._u32[s.R_CAUSE] & ~self._u32[s.R_MASK]:
                self._raise()

    def clear(self) -> None:
        """Forget causes and mask, as a reset does."""
        with self._lock:
            self._u32[s.R_CAUSE] = 0
            self._u32[s.R_MASK] = 0

    def trigger(self) -> None:
        """Send the MSI whatever the causes say (SET_IRQS with an action but without a vector)."""
        with self._lock:
            self._raise()

    def _raise(self) -> None:
        if self._fd is None:
            return  # the cause stays pending; attach() looks again
        try:
            self._send(self._fd)
        except BlockingIOError:
            pass  # the counter is full: the guest's interrupt is pending more than once over
        except OSError:
            self._fd = None  # a vector that cannot be signalled is as good as none
            return
        self._state.count("interrupts")
