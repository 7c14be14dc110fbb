"""The device model's contract, checked when a session is made and not when a guest finds out.

:func:`describe` asks a model for everything that it says about itself and refuses what no client
could use. The answers are constant for a model's life, so a session keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelvisor.errors import CallerError
from accelvisor.vfio_user.messages import bad
from accelvisor.vfio_user.model import DeviceInfo, DeviceModel, IrqInfo, RegionInfo
from accelvisor.vfio_user.protocol import PAGE_BYTES, RegionFlag

_VERBS = (
    "device_info", "region_info", "irq_info", "region_read", "region_write", "dma_map",
    "dma_unmap", "set_irqs", "reset", "device_feature", "migration_read", "migration_write",
    "dirty_pages",
)  # fmt: skip

#: No device of ours comes near; a model that says more has a bug.
_MAX_INDICES = 1024


@dataclass(frozen=True, slots=True)
class Description:
    """What a device model says about itself."""

    info: DeviceInfo
    regions: tuple[RegionInfo, ...]
    irqs: tuple[IrqInfo, ...]

    def region(self, index: int) -> RegionInfo:
        """Raises PayloadError for an index that the device has not."""
        if index >= len(self.regions):
            raise bad("region", f"index {index}, the device has {len(self.regions)}")
        return self.regions[index]

    def unmapped(self, index: int) -> RegionInfo:
        """The region as a client sees it that can take no descriptor."""
        info = self.region(index)
        return replace(info, flags=info.flags & ~int(RegionFlag.MMAP), fd=None, sparse=())

    def irq(self, index: int) -> IrqInfo:
        """Raises PayloadError for an index that the device has not."""
        if index >= len(self.irqs):
            raise bad("interrupt", f"index {index}, the device has {len(self.irqs)}")
        return self.irqs[index]


def describe(model: DeviceModel) -> Description:
    """Ask ``model`` for its description and check it.

    Raises:
        CallerError: code ``device-model``, the model breaks the contract of ``DeviceModel``.
    """
    missing = [verb for verb in _VERBS if not callable(getattr(model, verb, None))]
    if missing:
        raise _broken(model, f"lacks {', '.join(missing)}")
    info = model.device_info()
    if not 0 <= info.regions <= _MAX_INDICES or not 0 <= info.irqs <= _MAX_INDICES:
        raise _broken(model, f"has {info.regions} regions and {info.irqs} interrupts")
    # Plain integers: operations on IntFlag would cost more than the rest of a register read.
    info = replace(info, flags=int(info.flags))
    regions = tuple(_plain(model.region_info(i)) for i in range(info.regions))
    found = (model.irq_info(i) for i in range(info.irqs))
    irqs = tuple(replace(irq, flags=int(irq.flags)) for irq in found)
    for i, region in enumerate(regions):
        problem = _region_problem(i, region)
        if problem:
            raise _broken(model, f"region {i} {problem}")
    for i, irq in enumerate(irqs):
        if irq.index != i or not 0 <= irq.count < 1 << 32:
            raise _broken(model, f"interrupt {i} says index {irq.index}, count {irq.count}")
    return Description(info, regions, irqs)


def _plain(region: RegionInfo) -> RegionInfo:
    return replace(region, flags=int(region.flags), sparse=tuple(region.sparse))


def _region_problem(index: int, region: RegionInfo) -> str:
    if region.index != index:
        return f"says that it is {region.index}"
    if not 0 <= region.size < 1 << 63:
        return f"has {region.size} bytes"
    if region.flags & RegionFlag.CAPS:
        return "sets CAPS itself, which follows from sparse areas"
    mappable = bool(region.flags & RegionFlag.MMAP)
    if mappable != (region.fd is not None):
        return "has the MMAP flag or a descriptor, but not both"
    if region.sparse and not mappable:
        return "has sparse areas and cannot be mapped"
    if mappable and (not region.size or region.size % PAGE_BYTES):
        return f"is mappable and has {region.size} bytes"
    end = 0
    for offset, size in region.sparse:
        if offset < end or size <= 0 or (offset | size) % PAGE_BYTES:
            return f"has a sparse area of {size} bytes at {offset:#x}"
        end = offset + size
    return "has a sparse area past its end" if end > region.size else ""


def _broken(model: DeviceModel, why: str) -> CallerError:
    return CallerError(
        f"the device model {type(model).__name__} {why}",
        code="device-model",
        where="vfio-user",
        hint="see accelvisor.vfio_user.model.DeviceModel",
    )
