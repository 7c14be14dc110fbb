"""Element types of tensors: number on the wire, name, size. Names are numpy's."""

from __future__ import annotations

from enum import IntEnum


class DType(IntEnum):
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    INT8 = 8
    INT16 = 9
    INT32 = 10
    INT64 = 11
    UINT8 = 16
    UINT16 = 17
    UINT32 = 18
    UINT64 = 19
    BOOL = 24

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """numpy's name of the type."""
        return self.name.lower()


_ITEMSIZE = {
    DType.FLOAT32: 4, DType.FLOAT64: 8, DType.FLOAT16: 2,
    DType.INT8: 1, DType.INT16: 2, DType.INT32: 4, DType.INT64: 8,
    DType.UINT8: 1, DType.UINT16: 2, DType.UINT32: 4, DType.UINT64: 8,
    DType.BOOL: 1,
}  # fmt: skip


def by_label(label: str) -> DType:
    """The DType of a numpy name. Raises KeyError for a name that the device has no type for."""
    return DType[label.upper()]
