"""Completion status codes: what a guest program can be told. Never renumbered."""

from __future__ import annotations

from enum import IntEnum


class CommandStatus(IntEnum):
    """0 is success; below 0x100 the command was refused and the context goes on; from 0x100 on it
    is a *fault*: the context stops, later commands of its queue complete with ``CONTEXT_STOPPED``.
    ABORTED alone is neither: the command was not begun.
    """

    OK = 0x000
    # refused: nothing was changed
    UNKNOWN_COMMAND = 0x001
    NO_CONTEXT = 0x002
    CONTEXT_EXISTS = 0x003
    TOO_MANY_CONTEXTS = 0x004
    OUT_OF_MEMORY = 0x005
    TOO_MANY_OBJECTS = 0x006
    BAD_HANDLE = 0x007
    BAD_DESCRIPTOR = 0x008  # shape, dtype, layout or name out of range
    PROGRAM_INVALID = 0x009  # the detail text (QUERY FAULT) says where
    BINDING_MISMATCH = 0x00A  # a tensor does not fit the program's slot
    BUFFER_TOO_SMALL = 0x00B
    IN_USE = 0x00C
    LIMIT = 0x00D
    BAD_DEPENDENCY = 0x00E  # depends on a command that is neither running nor known as complete
    LINK_DOWN = 0x00F  # a transfer over a link that is not up, or not the function's
    # faults: the context stops
    BAD_ADDRESS = 0x100  # DMA outside the map or the window
    BUS_MASTER_OFF = 0x101
    DMA_DENIED = 0x102  # the map does not allow that direction
    NUMERIC = 0x103
    DEVICE_ERROR = 0x104  # a bug of the device: reported, never hidden
    CONTEXT_STOPPED = 0x105
    ABORTED = 0x106  # what it depended on failed
    REVOKED = 0x107  # the function's part of the card was taken away

    @property
    def is_fault(self) -> bool:
        """Whether the context stopped. One that only depended on what failed goes on."""
        return self >= 0x100 and self is not CommandStatus.ABORTED
