"""The guest's way to a function: registers, window, DMA memory, interrupts.

A transport is dumb: it moves bits and knows nothing of commands. The rules that survive a migration
(absent registers, epochs) live one layer up, in :mod:`accelvisor.guest.registers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class DmaBuffer(Protocol):
    """Memory of the guest that the device can reach."""

    @property
    def address(self) -> int:
        """Where the device finds the first byte (guest-physical, or an IOVA behind an IOMMU)."""
        ...

    @property
    def view(self) -> memoryview:
        """The same bytes for this process, writable, format ``B``."""
        ...

    def release(self) -> None:
        """Give the memory back. The device must no longer use it. Safe to call twice."""
        ...


@runtime_checkable
class ScatteredBuffer(Protocol):
    """A DMA buffer that is contiguous for the process but not for the device."""

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """(address, bytes) in order; the bytes add up to the view's length."""
        ...


class Transport(Protocol):
    """One function as one process sees it. Offsets are bytes; registers are little-endian."""

    @property
    def window(self) -> memoryview:
        """BAR2, writable, format ``B``."""
        ...

    def read32(self, offset: int) -> int:
        """One 32-bit load from BAR0. Never raises for an absent device: it reads 0 or all-ones."""
        ...

    def write32(self, offset: int, value: int) -> None:
        """One 32-bit store to BAR0; lost while the device is absent."""
        ...

    def read64(self, offset: int) -> int:
        """A 64-bit register of BAR0."""
        ...

    def allocate_dma(self, nbytes: int) -> DmaBuffer:
        """Device-reachable memory of at least ``nbytes``, zeroed, page aligned.

        Raises:
            CapacityError: there is not enough memory, or it may not be locked.
            PermissionDenied: this process may not learn physical addresses.
        """
        ...

    def wait_interrupt(self, timeout_s: float) -> bool:
        """Wait for the function's interrupt; False after ``timeout_s`` seconds without one.

        Drivers without interrupts sleep a part of the time and return False.
        """
        ...

    def close(self) -> None:
        """Let go of the device. Safe to call twice."""
        ...


def segments_of(buffer: DmaBuffer) -> Sequence[tuple[int, int]]:
    """(address, bytes) of each piece of ``buffer`` that is contiguous for the device."""
    if isinstance(buffer, ScatteredBuffer):
        return buffer.segments
    return ((buffer.address, len(buffer.view)),)


def slice_segments(
    segments: Sequence[tuple[int, int]], offset: int, nbytes: int
) -> list[tuple[int, int]]:
    """The segments that cover ``nbytes`` from byte ``offset`` on."""
    out: list[tuple[int, int]] = []
    for address, size in segments:
        if nbytes <= 0:
            break
        if offset >= size:
            offset -= size
            continue
        take = min(size - offset, nbytes)
        out.append((address + offset, take))
        nbytes -= take
        offset = 0
    return out
