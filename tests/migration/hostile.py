"""A receiver of bulk data, and whoever may say anything to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelvisor.frames.chunks import Coding, Header
from accelvisor.limits import KIB, LIMITS
from accelvisor.migration.bulk import MESSAGE, State, Type
from accelvisor.migration.channel import Channel
from accelvisor.migration.receiver import Receiver
from tests.migration.hosts import channels, close

MEMORY = 5
WINDOW = 4


@contextmanager
def victim(limits: object = LIMITS) -> Iterator[tuple[Receiver, Channel]]:
    """A receiver that offers 8 KiB of memory, and the connection to it."""
    receiver = Receiver({MEMORY: memoryview(bytearray(8 * KIB))}, limits=limits)  # type: ignore[arg-type]
    [near], far = channels()
    receiver.attach(far)
    State.read(near)
    try:
        yield receiver, near
    finally:
        receiver.close()
        close([near])


def chunk(
    index: int = 0,
    kind: int = MEMORY,
    coding: int = Coding.RAW,
    offset: int = 0,
    length: int = 4096,
    stored: int | None = None,
) -> bytes:
    header = Header(index, kind, coding, offset, length).pack()
    size = (length if coding == Coding.RAW else 0) if stored is None else stored
    return MESSAGE.pack(Type.CHUNK, header + size.to_bytes(4, "little"))
