"""BAR0 as a driver has mapped it: one load or store for each access."""

from __future__ import annotations


class MappedRegisters:
    """Register access for a transport that has mapped BAR0.

    ``_registers`` is a view of 32-bit elements, each access of which is one 32-bit load or store,
    which a trapped register needs; slices of a mmap go byte by byte.
    """

    _registers: memoryview

    def read32(self, offset: int) -> int:
        """One 32-bit load from BAR0."""
        return self._registers[offset >> 2]

    def write32(self, offset: int, value: int) -> None:
        """One 32-bit store to BAR0."""
        self._registers[offset >> 2] = value

    def read64(self, offset: int) -> int:
        """Two loads, repeated when the upper half changed between."""
        while True:
            high = self.read32(offset + 4)
            low = self.read32(offset)
            if self.read32(offset + 4) == high:
                return high << 32 | low
