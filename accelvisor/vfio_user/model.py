"""The contract between the vfio-user server and a device model.

Six verbs and four for migration. A model never sees a socket; it sees file descriptors only where
the protocol passes them, and it owns them from the call on (it closes them). A verb that refuses
raises :class:`Refusal` with an errno, which becomes the protocol's error reply; any other exception
is a bug, is logged with its traceback and answered with EIO.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from accelvisor.errors import DataError


class Refusal(DataError):  # noqa: N818 - it is an answer of the protocol, not a failure
    """An errno reply to one request; the connection goes on."""

    code = "vfio-user-refused"

    def __init__(self, number: int, message: str, *, where: str = "vfio-user") -> None:
        super().__init__(f"{message} ({errno.errorcode.get(number, number)})", where=where)
        self.errno = number


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    flags: int  # VFIO_DEVICE_FLAGS_*
    regions: int
    irqs: int


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """``fd`` is a memfd the client may map (offset 0); the model keeps owning it."""

    index: int
    flags: int  # VFIO_REGION_INFO_FLAG_*
    size: int
    fd: int | None = None
    sparse: Sequence[tuple[int, int]] = field(default=())  # (offset, size) areas that may be mapped


@dataclass(frozen=True, slots=True)
class IoFd:
    """A part of a region whose accesses arrive on a descriptor instead of as messages.

    ``fd`` is an eventfd, or a socket with ``ioregion``; ``data`` is datamatch or user data.
    """

    offset: int
    size: int
    fd: int
    flags: int = 0
    data: int = 0
    ioregion: bool = False


@dataclass(frozen=True, slots=True)
class IrqInfo:
    index: int
    flags: int  # VFIO_IRQ_INFO_*
    count: int


class DeviceModel(Protocol):
    """What a vfio-user server drives. All offsets and sizes are in bytes."""

    def device_info(self) -> DeviceInfo: ...

    def region_info(self, index: int) -> RegionInfo: ...

    def irq_info(self, index: int) -> IrqInfo: ...

    def region_read(self, index: int, offset: int, count: int) -> bytes: ...

    def region_write(self, index: int, offset: int, data: bytes) -> None: ...

    def dma_map(
        self, address: int, size: int, flags: int, offset: int, fd: int | None
    ) -> None:
        """``flags``: bit 0 readable, bit 1 writable by the device; no ``fd``: not to be mapped."""

    def dma_unmap(self, address: int, size: int, flags: int) -> None:
        """Unmapping what was never mapped succeeds (a vIOMMU floods those).

        ``flags`` is 0 or ``UnmapFlag.ALL``: every map goes, address and size are 0.
        """

    def set_irqs(
        self, index: int, flags: int, start: int, count: int, data: bytes, fds: Sequence[int]
    ) -> None:
        """Flags are ``IrqSet``, checked: one DATA and one ACTION bit, the range inside the index.

        DATA_EVENTFD brings ``count`` descriptors (the model owns them) or none, which takes the
        range's eventfds away. DATA_NONE with ACTION_TRIGGER, start and count 0 disables the index.
        """
        ...

    def reset(self) -> None: ...

    # --- migration (VFIO v2) -------------------------------------------------------------------

    def device_feature(self, flags: int, feature: int, data: bytes) -> bytes:
        """GET/SET/PROBE of one VFIO device feature; returns its data for GET, and for SET as it
        was taken (``features.Features.handle`` does all of it). The session answers
        DMA_LOGGING_REPORT itself by ``dirty_pages``.
        """
        ...

    def migration_read(self, count: int) -> bytes:
        """At most ``count`` bytes of saved state; fewer mean that it ends here."""
        ...

    def migration_write(self, data: bytes) -> None: ...

    def dirty_pages(self, address: int, size: int, page_size: int) -> bytes:
        """Bitmap (LSB first) of pages the device wrote since the last call; reading clears it.

        Its length is whole 64-bit words: ``(pages + 63) // 64 * 8`` bytes.
        """
        ...


@runtime_checkable
class IoFdModel(Protocol):
    """What a device model may offer beside: descriptors that KVM can signal without the client."""

    def region_io_fds(self, index: int) -> Sequence[IoFd]: ...
