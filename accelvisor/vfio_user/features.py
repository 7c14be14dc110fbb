"""DEVICE_FEATURE and migration data: bodies, and the feature logic every device shares.

:class:`Features` implements the five features of the specification over a migration machine and a
dirty log, so that a device model only supplies what its arcs do.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import NamedTuple

from accelvisor.vfio_user.dirty import DirtyLog
from accelvisor.vfio_user.messages import Bytes, bad, need
from accelvisor.vfio_user.migration import MigrationMachine
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import (
    FEATURE_INDEX_MASK,
    Feature,
    FeatureFlag,
    MigrationFlag,
    MigState,
)

FEATURE = struct.Struct("<II")  # argsz, flags
MIGRATION = struct.Struct("<Q")  # MigrationFlag
DEVICE_STATE = struct.Struct("<II")  # MigState, data_fd (unused in vfio-user)
LOGGING = struct.Struct("<QII")  # page size, ranges, reserved
RANGE = struct.Struct("<QQ")  # iova, length
REPORT = struct.Struct("<QQQ")  # iova, length, page size
MIG_DATA = struct.Struct("<II")  # argsz, size

#: Ranges in one DMA_LOGGING_START; QEMU sends at most a handful, the kernel allows 128 on its way.
MAX_RANGES = 1024


class FeatureRequest(NamedTuple):
    argsz: int
    flags: int  # FeatureFlag bits alone
    feature: int
    data: bytes


def pack_feature(flags: int, feature: int, data: Bytes = b"", *, argsz: int | None = None) -> bytes:
    size = FEATURE.size + len(data) if argsz is None else argsz
    return FEATURE.pack(size, flags | feature) + data


def parse_feature(body: Bytes) -> FeatureRequest:
    """Also for replies. Raises PayloadError when neither or both of GET and SET are asked for."""
    need(body, FEATURE.size, "DEVICE_FEATURE")
    argsz, word = FEATURE.unpack_from(body)
    flags = word & ~FEATURE_INDEX_MASK
    if flags & ~int(FeatureFlag.GET | FeatureFlag.SET | FeatureFlag.PROBE) or not flags:
        raise bad("DEVICE_FEATURE", f"flags {flags:#x} ask for nothing known")
    both = FeatureFlag.GET | FeatureFlag.SET
    if not flags & FeatureFlag.PROBE and flags & both == both:
        raise bad("DEVICE_FEATURE", "GET and SET exclude each other")
    return FeatureRequest(argsz, flags, word & FEATURE_INDEX_MASK, bytes(body[FEATURE.size :]))


class Report(NamedTuple):
    """One DMA_LOGGING_REPORT request."""

    address: int
    length: int
    page_size: int

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of the answer's bitmap: whole 64-bit words, one bit a page."""
        pages = (self.length + self.page_size - 1) // self.page_size
        return (pages + 63) // 64 * 8


def parse_report(data: Bytes) -> Report:
    need(data, REPORT.size, "DMA_LOGGING_REPORT")
    address, length, page_size = REPORT.unpack_from(data)
    if not page_size or page_size & (page_size - 1):
        raise bad("DMA_LOGGING_REPORT", f"page size {page_size} is no power of two")
    if not length or address + length > 1 << 64:
        raise bad("DMA_LOGGING_REPORT", f"{length} bytes at {address:#x}")
    return Report(address, length, page_size)


def pack_logging(page_size: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    """DMA_LOGGING_START's data: (iova, length) pairs, none for everything."""
    fixed = LOGGING.pack(page_size, len(ranges), 0)
    return fixed + b"".join(RANGE.pack(iova, length) for iova, length in ranges)


def parse_logging(data: Bytes) -> tuple[int, list[tuple[int, int]]]:
    """Page size hint and ranges."""
    need(data, LOGGING.size, "DMA_LOGGING_START")
    page_size, count, _ = LOGGING.unpack_from(data)
    if count > MAX_RANGES:
        raise bad("DMA_LOGGING_START", f"{count} ranges, the limit is {MAX_RANGES}")
    need(data, LOGGING.size + count * RANGE.size, "DMA_LOGGING_START")
    ranges: list[tuple[int, int]] = []
    for i in range(count):
        iova, length = RANGE.unpack_from(data, LOGGING.size + i * RANGE.size)
        if not length or iova + length > 1 << 64:
            raise bad("DMA_LOGGING_START", f"range {i} has {length} bytes at {iova:#x}")
        ranges.append((iova, length))
    return page_size, ranges


def pack_mig_data(data: Bytes = b"", *, size: int | None = None) -> bytes:
    """MIG_DATA_WRITE's request or MIG_DATA_READ's reply; with ``size``, MIG_DATA_READ's request."""
    if size is not None:
        return MIG_DATA.pack(MIG_DATA.size + size, size)
    return MIG_DATA.pack(MIG_DATA.size + len(data), len(data)) + data


def parse_mig_data(body: Bytes) -> tuple[int, int, memoryview]:
    """argsz, size, and the data that followed."""
    need(body, MIG_DATA.size, "MIG_DATA")
    argsz, size = MIG_DATA.unpack_from(body)
    return argsz, size, memoryview(body)[MIG_DATA.size :]


class Features:
    """Answers ``DeviceModel.device_feature`` for the features of the specification.

    Args:
        machine: the device's migration state machine.
        dirty: the device's log of pages it wrote.
        supported: what MIGRATION reports; STOP_COPY is mandatory.
    """

    _GETTABLE = frozenset(
        {Feature.MIGRATION, Feature.MIG_DEVICE_STATE, Feature.DMA_LOGGING_REPORT}
    )
    _SETTABLE = frozenset(
        {Feature.MIG_DEVICE_STATE, Feature.DMA_LOGGING_START, Feature.DMA_LOGGING_STOP}
    )

    def __init__(
        self,
        machine: MigrationMachine,
        dirty: DirtyLog,
        supported: int = MigrationFlag.STOP_COPY | MigrationFlag.P2P | MigrationFlag.PRE_COPY,
    ) -> None:
        self.machine = machine
        self.dirty = dirty
        self._supported = int(supported)

    def handle(self, flags: int, feature: int, data: bytes) -> bytes:
        """The feature's data for GET and SET; nothing for PROBE.

        Raises:
            Refusal: ENOTTY for an unknown feature or method, EINVAL for data that does not fit.
        """
        known = (
            (not flags & FeatureFlag.GET or feature in self._GETTABLE)
            and (not flags & FeatureFlag.SET or feature in self._SETTABLE)
            and (feature in self._GETTABLE or feature in self._SETTABLE)
        )
        if not known:
            raise Refusal(errno.ENOTTY, f"device feature {feature} has no such method")
        if flags & FeatureFlag.PROBE:
            return b""
        if feature == Feature.MIGRATION:
            return MIGRATION.pack(self._supported)
        if feature == Feature.MIG_DEVICE_STATE:
            return self._device_state(flags, data)
        if feature == Feature.DMA_LOGGING_START:
            page_size, ranges = parse_logging(data)
            return pack_logging(self.dirty.start(page_size, ranges), ranges)
        if feature == Feature.DMA_LOGGING_STOP:
            self.dirty.stop()
            return b""
        report = parse_report(data)
        bitmap = self.dirty.report(report.address, report.length, report.page_size)
        return REPORT.pack(*report) + bitmap

    def _device_state(self, flags: int, data: bytes) -> bytes:
        if flags & FeatureFlag.SET:
            need(data, DEVICE_STATE.size, "MIG_DEVICE_STATE")
            wanted, _ = DEVICE_STATE.unpack_from(data)
            try:
                target = MigState(wanted)
            except ValueError as error:
                raise bad("MIG_DEVICE_STATE", f"unknown state {wanted}") from error
            self.machine.request(target)
        return DEVICE_STATE.pack(self.machine.state, 0xFFFF_FFFF)
