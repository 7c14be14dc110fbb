"""Numbers of the vfio-user protocol and of the parts of <linux/vfio.h> that it carries.

Names are the specification's without their ``VFIO_USER_`` / ``VFIO_`` prefix, so that a reader can
search for them there. Nothing here has behaviour. All integers are little-endian on the wire: the
specification says host order, and every host that we run on is little-endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

VERSION_MAJOR = 0
#: QEMU proposes 0.0, libvfio-user's clients 0.1; the difference changes no message.
VERSION_MINOR = 1

HEADER = struct.Struct("<HHIII")  # id, command, size of the whole message, flags, errno
HEADER_BYTES = HEADER.size

TYPE_MASK = 0xF
TYPE_COMMAND = 0x0
TYPE_REPLY = 0x1
FLAG_NO_REPLY = 0x10
FLAG_ERROR = 0x20


class Command(IntEnum):
    """What a message asks for. Number 14 was an early DIRTY_PAGES and stays unused."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    DEVICE_GET_INFO = 4
    DEVICE_GET_REGION_INFO = 5
    DEVICE_GET_REGION_IO_FDS = 6
    DEVICE_GET_IRQ_INFO = 7
    DEVICE_SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    DMA_READ = 11  # server to client
    DMA_WRITE = 12  # server to client
    DEVICE_RESET = 13
    REGION_WRITE_MULTI = 15
    DEVICE_FEATURE = 16
    MIG_DATA_READ = 17
    MIG_DATA_WRITE = 18


class DmaFlag(IntFlag):
    """Flags of DMA_MAP. The last two are libvfio-user's hints about how the fd may be used."""

    READ = 1 << 0
    WRITE = 1 << 1
    MMAP = 1 << 2
    FILE_IO = 1 << 3


class UnmapFlag(IntFlag):
    """Flags of DMA_UNMAP, after ``struct vfio_iommu_type1_dma_unmap``."""

    GET_DIRTY_BITMAP = 1 << 0
    ALL = 1 << 1  # address and size are zero: every map goes


class DeviceFlag(IntFlag):
    RESET = 1 << 0
    PCI = 1 << 1


class RegionFlag(IntFlag):
    READ = 1 << 0
    WRITE = 1 << 1
    MMAP = 1 << 2
    CAPS = 1 << 3


class PciRegion(IntEnum):
    """Region indices of a PCI device."""

    BAR0 = 0
    BAR1 = 1
    BAR2 = 2
    BAR3 = 3
    BAR4 = 4
    BAR5 = 5
    ROM = 6
    CONFIG = 7
    VGA = 8


PCI_REGIONS = 9


class PciIrq(IntEnum):
    """Interrupt indices of a PCI device."""

    INTX = 0
    MSI = 1
    MSIX = 2
    ERR = 3
    REQ = 4


PCI_IRQS = 5


class IrqInfoFlag(IntFlag):
    EVENTFD = 1 << 0
    MASKABLE = 1 << 1
    AUTOMASKED = 1 << 2
    NORESIZE = 1 << 3


class IrqSet(IntFlag):
    """Flags of DEVICE_SET_IRQS: one DATA bit and one ACTION bit."""

    DATA_NONE = 1 << 0
    DATA_BOOL = 1 << 1
    DATA_EVENTFD = 1 << 2
    ACTION_MASK = 1 << 3
    ACTION_UNMASK = 1 << 4
    ACTION_TRIGGER = 1 << 5


IRQ_DATA_MASK = IrqSet.DATA_NONE | IrqSet.DATA_BOOL | IrqSet.DATA_EVENTFD
IRQ_ACTION_MASK = IrqSet.ACTION_MASK | IrqSet.ACTION_UNMASK | IrqSet.ACTION_TRIGGER

FEATURE_INDEX_MASK = 0xFFFF


class FeatureFlag(IntFlag):
    GET = 1 << 16
    SET = 1 << 17
    PROBE = 1 << 18


class Feature(IntEnum):
    MIGRATION = 1
    MIG_DEVICE_STATE = 2
    DMA_LOGGING_START = 6
    DMA_LOGGING_STOP = 7
    DMA_LOGGING_REPORT = 8


class MigrationFlag(IntFlag):
    STOP_COPY = 1 << 0
    P2P = 1 << 1
    PRE_COPY = 1 << 2


class MigState(IntEnum):
    """Device states of VFIO migration v2."""

    ERROR = 0
    STOP = 1
    RUNNING = 2
    STOP_COPY = 3
    RESUMING = 4
    RUNNING_P2P = 5
    PRE_COPY = 6
    PRE_COPY_P2P = 7


REGION_CAP_SPARSE_MMAP = 1
REGION_CAP_TYPE = 2

IO_FD_TYPE_IOEVENTFD = 0
IO_FD_TYPE_IOREGIONFD = 1

PAGE_BYTES = 4096
