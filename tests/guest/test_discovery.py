"""Finding functions and choosing the way to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.guest.discovery import choose, discover, find, select
from accelvisor.guest.sysfs import SysfsTransport

from .pci_tree import add_device


def test_only_functions_are_found(tmp_path: Path) -> None:
    root = tmp_path / "devices"
    add_device(root, "0000:00:07.0")
    add_device(root, "0000:00:05.0")
    add_device(root, "0000:00:06.0", vendor=0x8086)
    (root / "0000:00:08.0").mkdir()  # half gone: being unplugged
    assert [d.bdf for d in find(root)] == ["0000:00:05.0", "0000:00:07.0"]
    assert find(tmp_path / "absent") == []


def test_a_device_knows_its_iommu(tmp_path: Path) -> None:
    root = tmp_path / "devices"
    add_device(root, "0000:00:05.0", group=4)
    add_device(root, "0000:00:06.0", group=5, group_type="identity")
    add_device(root, "0000:00:07.0")
    devices = find(root)
    assert [(d.iommu_group, d.translated) for d in devices] == [
        (4, True), (5, False), (None, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("group_type", "driver", "asked", "environment", "wanted"),
    [
        (None, None, None, {}, "sysfs"),
        ("DMA", None, None, {}, "vfio"),
        ("DMA-FQ", None, None, {}, "vfio"),
        ("identity", None, None, {}, "sysfs"),
        ("identity", "vfio-pci", None, {}, "vfio"),
        ("DMA", None, "sysfs", {}, "sysfs"),
        (None, None, None, {"ACCELGUEST_DRIVER": "vfio"}, "vfio"),
        (None, None, "sysfs", {"ACCELGUEST_DRIVER": "vfio"}, "sysfs"),
    ],
)
def test_the_way_that_fits_is_chosen(
    tmp_path: Path,
    group_type: str | None,
    driver: str | None,
    asked: str | None,
    environment: dict[str, str],
    wanted: str,
) -> None:
    root = tmp_path / "devices"
    add_device(
        root,
        group=None if group_type is None else 1,
        group_type=group_type or "",
        driver=driver,
    )
    assert choose(find(root)[0], asked, environment) == wanted


def test_an_unknown_driver_in_the_environment_is_named(tmp_path: Path) -> None:
    add_device(tmp_path)
    with pytest.raises(UsageError) as caught:
        choose(find(tmp_path)[0], None, {"ACCELGUEST_DRIVER": "magic"})
    assert caught.value.where == "ACCELGUEST_DRIVER"


def test_none_several_and_the_wrong_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        select(root=tmp_path)
    add_device(tmp_path, "0000:00:05.0")
    assert select(root=tmp_path).bdf == "0000:00:05.0"
    assert select("00:05.0", root=tmp_path).bdf == "0000:00:05.0"
    add_device(tmp_path, "0000:00:06.0")
    with pytest.raises(ConflictError, match="2 functions") as caught:
        select(root=tmp_path)
    assert "0000:00:06.0" in caught.value.hint
    with pytest.raises(NotFoundError) as missing:
        select("0000:00:09.0", root=tmp_path)
    assert "0000:00:05.0" in missing.value.hint


def test_discover_opens_the_transport(tmp_path: Path) -> None:
    add_device(tmp_path)
    transport = discover(root=tmp_path, environment={})
    assert isinstance(transport, SysfsTransport)
    transport.close()
