"""What a destination requires of an offer before it makes anything for it.

The control message makes room, the signed offer binds, and both are the source's words: they must
agree with each other, and no section may be larger than a function of that profile can need.
"""

from __future__ import annotations

from accelvisor.errors import DataError
from accelvisor.frames.manifest import Offer, SectionName
from accelvisor.function.moving import SECTION_BYTES
from accelvisor.limits import LIMITS
from accelvisor.migration import messages as wire


def require(offered: wire.Offered, said: Offer, ram_bytes: int | None) -> None:
    """May room be made for this?

    Args:
        ram_bytes: of the VM, by its definition; None where nobody has told.

    Raises:
        DataError: ``migration-offer``, ``migration-sections``.
    """
    _require_same(offered, said)
    _require_sections(said, LIMITS.guest_file_bytes if ram_bytes is None else ram_bytes)


def _require_same(offered: wire.Offered, said: Offer) -> None:
    signed = said.profile
    if (
        offered.epoch != said.epoch
        or offered.memory_bytes != signed.memory_bytes
        or offered.window_bytes != signed.window_bytes
        or offered.queues != signed.queues
        or offered.ring_entries != signed.ring_entries
        or offered.cores != signed.cores
    ):
        raise DataError(
            "the offer is not the one that was signed", code="migration-offer", where="migration"
        )


def _require_sections(said: Offer, ram_bytes: int) -> None:
    """(least, most) bytes of each: what has a size of its own has exactly that."""
    memory, window = said.profile.memory_bytes, said.profile.window_bytes
    bounds: dict[SectionName, tuple[int, int]] = {
        "function": (0, LIMITS.manifest_bytes),
        "status": (0, LIMITS.manifest_bytes),
        "state": (SECTION_BYTES, SECTION_BYTES),
        "window": (window, window),
        "memory": (memory, memory),
        # What the function wrote into its VM's memory: at most each page of it once.
        "extents": (0, ram_bytes + LIMITS.guest_device_bytes),
    }
    wrong: set[SectionName] = bounds.keys() - said.sections.keys()
    for name, nbytes in said.sections.items():
        least, most = bounds[name]
        if not least <= nbytes <= most:
            wrong.add(name)
    if wrong:
        name = min(wrong)
        raise DataError(
            f"the offer has {said.sections.get(name, 'no')} bytes of {name}: no function of its"
            f" size has that, at most {bounds[name][1]}",
            code="migration-sections",
            where="migration",
        )
