"""Initial RAM file systems: a writer of the kernel's newc cpio format, and nothing more of cpio.

Own code since it is shorter than calling the tool with the right lists and owners, and since the
same input must give the same bytes (the archive is cached by what it is made of).
"""

from __future__ import annotations

import stat

_TRAILER = "TRAILER!!!"


class Archive:
    """Collects entries in order; ``finish`` gives the archive. All belongs to root, time is 0."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._inode = 0

    def directory(self, name: str) -> None:
        """An empty directory."""
        self._entry(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, content: bytes, *, executable: bool = False) -> None:
        """A regular file."""
        self._entry(name, stat.S_IFREG | (0o755 if executable else 0o644), content)

    def symlink(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def character_device(self, name: str, major: int, minor: int) -> None:
        """A device node, for what must exist before /dev is mounted (the console)."""
        self._entry(name, stat.S_IFCHR | 0o600, b"", rdev=(major, minor))

    def finish(self) -> bytes:
        """The whole archive."""
        self._entry(_TRAILER, 0, b"")
        return bytes(self._out)

    def _entry(
        self, name: str, mode: int, content: bytes, *, rdev: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        path = name.encode() + b"\0"
        fields = (
            self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, *rdev, len(path), 0,
        )  # fmt: skip
        self._out += b"070701" + b"".join(b"%08X" % field for field in fields)
        self._append(path)
        self._append(content)

    def _append(self, block: bytes) -> None:
        self._out += block
        # Header plus name, and each content, end on a multiple of four.
        self._out += bytes(-len(self._out) % 4)
