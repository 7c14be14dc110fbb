"""An offer that asks for more room than its function needs is refused before any is made."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from accelvisor.daemon.moving import offers
from accelvisor.errors import DataError
from accelvisor.frames.manifest import Offer, Profile
from accelvisor.function.moving import SECTION_BYTES
from accelvisor.hypervisor.xml import memory_bytes
from accelvisor.limits import GIB, KIB, LIMITS, MIB
from accelvisor.migration import messages as wire
from tests.frames.building import offer

TIB = 1024 * GIB
RAM = 2 * GIB
PROFILE = Profile(
    name="small", cores=2, memory_bytes=64 * MIB, window_bytes=MIB, queues=2, ring_entries=64
)
SECTIONS = {
    "function": LIMITS.manifest_bytes,
    "status": LIMITS.manifest_bytes,
    "state": SECTION_BYTES,
    "window": MIB,
    "memory": 64 * MIB,
    "extents": RAM + LIMITS.manifest_bytes,
}


def judge(ram_bytes: int | None = RAM, **sections: int) -> str:
    """The code of its refusal, or nothing."""
    said: Offer = replace(offer(), kind="both", profile=PROFILE, sections={**SECTIONS, **sections})
    offered = wire.Offered(
        said.function, said.epoch, "small", 2, 1, 2, 64, 64 * MIB, MIB, said.chunks,
        said.payload_bytes, "f",
    )  # fmt: skip
    try:
        offers.require(offered, said, ram_bytes)
    except DataError as error:
        return error.code
    return ""


def test_what_an_honest_source_offers_is_taken() -> None:
    assert judge() == judge(None) == ""


@pytest.mark.parametrize(
    ("section", "nbytes"),
    [
        ("memory", TIB),
        ("memory", 64 * MIB - 1),
        ("window", GIB),
        ("state", SECTION_BYTES + 1),
        ("function", MIB),
        ("status", MIB),
        ("extents", TIB),
        ("extents", RAM + LIMITS.guest_device_bytes + 1),
    ],
)
def test_a_section_that_its_profile_does_not_need_is_refused(section: str, nbytes: int) -> None:
    assert judge(**{section: nbytes}) == "migration-sections"


def test_a_vm_of_unknown_size_is_not_endless() -> None:
    assert judge(None, extents=TIB) == "migration-sections"


@pytest.mark.parametrize(
    ("element", "nbytes"),
    [
        ("<memory unit='KiB'>2097152</memory>", RAM),
        ("<memory>65536</memory>", 65536 * KIB),
        ("<memory unit='ells'>5</memory>", None),
        ("", None),
    ],
)
def test_how_much_memory_a_vm_has(element: str, nbytes: int | None) -> None:
    assert memory_bytes(f"<domain>{element}</domain>") == nbytes
