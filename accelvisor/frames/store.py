"""Where checkpoints are kept, as this room sees it, and which of them may go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """What a store knows of a checkpoint without opening it.

    Args:
        name: in the store.
        function: its UUID.
        digest: of its manifest; ``parent`` of the one that it continues, or empty.
        created_ns: since 1970, as its manifest says.
        size: of the file, in bytes.
        pinned: an operator asked for it: only an operator deletes it.
    """

    name: str
    function: str
    digest: bytes
    parent: bytes
    created_ns: int
    size: int
    pinned: bool = False


class Store(Protocol):
    """Files by name. What :meth:`put` was not told to keep was never there."""

    def list(self) -> Iterable[Entry]: ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """For reading. Raises NotFoundError ``checkpoint-not-found``."""
        ...

    def put(self, name: str) -> AbstractContextManager[BinaryIO]:
        """An empty file, seekable. When the block ends well it is there under its name, durable
        and whole; when it raises there is nothing. Raises ConflictError ``checkpoint-exists``.
        """
        ...

    def delete(self, name: str) -> None:
        """Raises NotFoundError ``checkpoint-not-found``."""
        ...


def surplus(entries: Iterable[Entry], keep: int) -> list[Entry]:
    """What may be deleted so that each function keeps its newest ``keep``.

    Pinned ones stay and are not counted, and whatever a kept one continues stays too, for without
    it that one is worth nothing. Deleting in this order leaves no checkpoint without its parent at
    any moment: a child always goes before what it continues.
    """
    found = list(entries)
    by_digest = {entry.digest: entry for entry in found}
    kept: set[bytes] = {entry.digest for entry in found if entry.pinned}
    by_age = sorted(found, key=lambda entry: (entry.created_ns, entry.name), reverse=True)
    counts: dict[str, int] = {}
    for entry in by_age:
        if not entry.pinned:
            counts[entry.function] = counts.get(entry.function, 0) + 1
            if counts[entry.function] <= keep:
                kept.add(entry.digest)
    for digest in list(kept):
        parent = by_digest[digest].parent
        while parent in by_digest and parent not in kept:
            kept.add(parent)
            parent = by_digest[parent].parent
    return _children_first([entry for entry in reversed(by_age) if entry.digest not in kept])


def _children_first(going: list[Entry]) -> list[Entry]:
    """The oldest first, but none before all that continue it."""
    out: list[Entry] = []
    left = list(going)
    while left:
        needed = {entry.parent for entry in left}
        # Clocks of hosts differ, so age alone does not say who continues whom.
        free = [entry for entry in left if entry.digest not in needed] or left
        out += free
        left = [entry for entry in left if entry not in free]
    return out
