"""What may be a name: nothing that could be taken for another one's UUID."""

from __future__ import annotations

from uuid import UUID


def is_uuid(text: str) -> bool:
    """Whether it is a UUID, in any of the ways in which one is written."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
