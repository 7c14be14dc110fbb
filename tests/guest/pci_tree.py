"""A /sys/bus/pci/devices made of plain files."""

from __future__ import annotations

import struct
from pathlib import Path

from accelvisor.abi.registers import BAR0_BYTES, DEVICE_ID, VENDOR_ID


def add_device(
    root: Path,
    bdf: str = "0000:00:05.0",
    *,
    vendor: int = VENDOR_ID,
    device: int = DEVICE_ID,
    command: int = 0,
    window_bytes: int = 1 << 18,
    group: int | None = None,
    group_type: str = "DMA",
    driver: str | None = None,
) -> Path:
    """One device's directory under ``root``."""
    directory = root / bdf
    directory.mkdir(parents=True)
    (directory / "vendor").write_text(f"{vendor:#06x}\n")
    (directory / "device").write_text(f"{device:#06x}\n")
    (directory / "revision").write_text("0x01\n")
    (directory / "enable").write_text("0\n")
    config = struct.pack("<HHH", vendor, device, command).ljust(256, b"\0")
    (directory / "config").write_bytes(config)
    (directory / "resource0").write_bytes(bytes(BAR0_BYTES))
    (directory / "resource2").write_bytes(bytes(window_bytes))
    if group is not None:
        target = root.parent / "iommu_groups" / str(group)
        target.mkdir(parents=True, exist_ok=True)
        (target / "type").write_text(group_type + "\n")
        (directory / "iommu_group").symlink_to(target)
    if driver is not None:
        target = root.parent / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (directory / "driver").symlink_to(target)
    return directory
