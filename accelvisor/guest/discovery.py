"""Which functions this VM has, and the way to each.

The way is chosen so: what the caller or ``ACCELGUEST_DRIVER`` asks for; else vfio when the device
is behind an IOMMU that translates (sysfs DMA would be blocked there); else sysfs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelvisor.abi.registers import DEVICE_ID, VENDOR_ID
from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.guest.sysfs import DEVICES
from accelvisor.guest.transport import Transport

DRIVERS = ("sysfs", "vfio")
ENVIRONMENT = "ACCELGUEST_DRIVER"


@dataclass(frozen=True, slots=True)
class Device:
    """One function as the guest's kernel sees it."""

    bdf: str
    revision: int
    kernel_driver: str  # empty when no driver is bound
    iommu_group: int | None
    iommu_type: str  # as the kernel spells it: DMA, DMA-FQ, identity, auto; empty without a group

    @property
    def translated(self) -> bool:
        """Whether an IOMMU stands between the device and the VM's memory."""
        return self.iommu_group is not None and self.iommu_type != "identity"


def find(root: Path = DEVICES) -> list[Device]:
    """All functions of this VM, by PCI address."""
    if not root.is_dir():
        return []
    found = []
    for directory in sorted(root.iterdir()):
        if (_hex(directory / "vendor"), _hex(directory / "device")) == (VENDOR_ID, DEVICE_ID):
            found.append(_describe(directory))
    return found


def choose(device: Device, asked: str | None, environment: Mapping[str, str]) -> str:
    """The driver for ``device``: ``sysfs`` or ``vfio``.

    Raises:
        UsageError: no such driver.
    """
    name = asked or environment.get(ENVIRONMENT, "")
    if name and name not in DRIVERS:
        raise UsageError(
            f"unknown driver {name!r}",
            code="driver-unknown",
            where=ENVIRONMENT if not asked else "driver",
            hint=f"one of {', '.join(DRIVERS)}",
        )
    if name:
        return name
    # Bound to vfio-pci already: somebody prepared it, and sysfs would be refused.
    return "vfio" if device.translated or device.kernel_driver == "vfio-pci" else "sysfs"


def select(bdf: str | None = None, *, root: Path = DEVICES) -> Device:
    """The function at ``bdf``, or the only one.

    Raises:
        NotFoundError: there is none.
        ConflictError: there are several and none was named.
    """
    devices = find(root)
    if bdf is not None:
        wanted = bdf if bdf.count(":") == 2 else f"0000:{bdf}"
        for device in devices:
            if device.bdf == wanted:
                return device
        raise NotFoundError(
            f"there is no function at {bdf}",
            code="device-not-found",
            where="pci",
            hint=_have(devices),
        )
    if not devices:
        raise NotFoundError(
            "this VM has no accelerator function",
            code="device-not-found",
            where="pci",
            hint="attach one on the host: accelctl attach FUNCTION DOMAIN",
        )
    if len(devices) > 1:
        raise ConflictError(
            f"this VM has {len(devices)} functions",
            code="device-ambiguous",
            where="pci",
            hint="name one by its PCI address: " + ", ".join(d.bdf for d in devices),
        )
    return devices[0]


def discover(
    bdf: str | None = None,
    *,
    driver: str | None = None,
    root: Path = DEVICES,
    environment: Mapping[str, str] = os.environ,
) -> Transport:
    """Open the way to a function.

    Args:
        bdf: PCI address; None for the only function of this VM.
        driver: ``sysfs`` or ``vfio``; None to choose.

    Raises:
        NotFoundError, ConflictError, PermissionDenied, UnavailableError, SystemFailure.
    """
    device = select(bdf, root=root)
    if choose(device, driver, environment) == "vfio":
        from accelvisor.guest.vfio import VfioTransport

        return VfioTransport(device.bdf, root=root)
    from accelvisor.guest.sysfs import SysfsTransport

    return SysfsTransport(device.bdf, root=root)


def _have(devices: list[Device]) -> str:
    if not devices:
        return "this VM has no function at all"
    return "this VM has " + ", ".join(d.bdf for d in devices)


def _hex(path: Path) -> int:
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return -1


def _describe(directory: Path) -> Device:
    driver, group = directory / "driver", directory / "iommu_group"
    number: int | None = None
    kind = ""
    if group.exists():
        number = int(group.resolve().name)
        try:
            kind = (group / "type").read_text().strip()
        except OSError:
            pass
    return Device(
        bdf=directory.name,
        revision=max(_hex(directory / "revision"), 0),
        kernel_driver=driver.resolve().name if driver.exists() else "",
        iommu_group=number,
        iommu_type=kind,
    )
