"""File descriptors that the client gave us: which slot each has, here and in the holder.

The holder keeps a duplicate of each under the same slot number, so that a replaced worker gets them
back. Clients send a descriptor with each map, thousands of times the same file behind an emulated
IOMMU: regular files are recognised by device, inode and access mode, and kept once.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Mapping

from accelvisor.errors import ProtocolError
from accelvisor.function.channel import DROP, KEEP, pack
from accelvisor.function.dma import File
from accelvisor.function.state import FD_SLOTS


class Descriptors:
    """Slots of the current connection.

    Args:
        tell: sends a message with descriptors to the holder.
        held: what the holder kept of a predecessor: slot -> descriptor (owned from here on).
    """

    def __init__(
        self, tell: Callable[[bytes, tuple[int, ...]], None], held: Mapping[int, int]
    ) -> None:
        self._tell = tell
        self.fds: dict[int, int] = {}
        self.files: dict[int, File] = {}
        self._slots: dict[tuple[int, int, int], int] = {}
        for slot, fd in held.items():
            self._adopt(slot, fd)

    def keep(self, fd: int) -> int:
        """Take ownership of a received descriptor; returns its slot.

        Raises:
            ProtocolError: the client uses too many different files at once.
        """
        if stat.S_ISREG(os.fstat(fd).st_mode):
            known = self._slots.get(File(fd).key)
            if known is not None:
                os.close(fd)
                return known
        for slot in range(FD_SLOTS):
            if slot not in self.fds:
                self._tell(pack(KEEP, slot), (fd,))
                self._adopt(slot, fd)
                return slot
        os.close(fd)
        raise ProtocolError(
            f"more than {FD_SLOTS} different descriptors at once",
            code="vfio-user-descriptors",
            where="vfio-user",
            hint="use few memory backends",
        )

    def drop(self, slot: int) -> None:
        """Close a slot here and in the holder; an empty one is left alone."""
        fd = self.fds.pop(slot, None)
        if fd is None:
            return
        file = self.files.pop(slot, None)
        if file is not None:
            del self._slots[file.key]
            file.close()
        os.close(fd)
        self._tell(pack(DROP, slot), ())

    def _adopt(self, slot: int, fd: int) -> None:
        self.fds[slot] = fd
        if stat.S_ISREG(os.fstat(fd).st_mode):
            file = File(fd)
            self.files[slot] = file
            self._slots[file.key] = slot


def teller(channel: socket.socket) -> Callable[[bytes, tuple[int, ...]], None]:
    """Sends to the holder over ``channel``; a holder that is gone is noticed elsewhere."""

    def tell(data: bytes, fds: tuple[int, ...]) -> None:
        try:
            if fds:
                socket.send_fds(channel, [data], list(fds))
            else:
                channel.send(data)
        except OSError:
            pass

    return tell
