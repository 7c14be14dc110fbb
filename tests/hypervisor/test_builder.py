from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from accelvisor.errors import UsageError
from accelvisor.hypervisor import xml
from accelvisor.hypervisor.builder import build
from accelvisor.hypervisor.port import DomainOptions
from accelvisor.limits import MIB
from tests.hypervisor.samples import SOCKET, UUID

SIMPLE = DomainOptions(name="vm1", memory_bytes=512 * MIB, disk="/images/a.qcow2")


def built(kvm: bool = False, **changes: object) -> ET.Element:
    return ET.fromstring(build(dataclasses.replace(SIMPLE, **changes), kvm=kvm))  # type: ignore[arg-type]


def test_a_domain_from_options_is_ready_for_functions() -> None:
    text = build(SIMPLE, kvm=False)
    assert xml.memory_problem(text) is None
    assert len(xml.hotplug_ports(text)) == SIMPLE.hotplug_ports
    assert UUID in xml.add(text, UUID, SOCKET)


def test_the_options_arrive() -> None:
    root = built(
        vcpus=3,
        kernel="/boot/vmlinuz",
        initrd="/boot/initrd",
        cmdline="console=ttyS0 a='<&>'",
        network="default",
        uuid=UUID.upper(),
        disks=("/images/b.raw", "/images/c.img"),
        console_log="/var/log/vm1.log",
        machine="pc-q35-10.1",
    )
    assert root.findtext("name") == "vm1"
    assert root.findtext("uuid") == UUID
    assert root.findtext("memory") == str(512 * 1024)
    assert root.findtext("vcpu") == "3"
    assert root.findtext("os/cmdline") == "console=ttyS0 a='<&>'"
    assert root.findtext("os/kernel") == "/boot/vmlinuz"
    assert root.findtext("os/initrd") == "/boot/initrd"
    assert root.find("os/type").get("machine") == "pc-q35-10.1"  # type: ignore[union-attr]
    assert [
        (d.find("driver").get("type"), d.find("source").get("file"), d.find("target").get("dev"))  # type: ignore[union-attr]
        for d in root.iter("disk")
    ] == [
        ("qcow2", "/images/a.qcow2", "vda"),
        ("raw", "/images/b.raw", "vdb"),
        ("raw", "/images/c.img", "vdc"),
    ]
    assert root.find("devices/interface/source").get("network") == "default"  # type: ignore[union-attr]
    assert root.find("devices/serial/log").get("file") == "/var/log/vm1.log"  # type: ignore[union-attr]


def test_a_disk_is_named_after_its_image_and_read_only_when_it_must_be() -> None:
    root = built(disk="/i/base.squashfs", disks=("/i/data.qcow2", "/i/" + "x" * 21 + ".img"))
    assert [
        (d.findtext("serial"), d.find("readonly") is not None, d.find("shareable") is not None)
        for d in root.iter("disk")
    ] == [("base", True, True), ("data", False, False), (None, False, False)]


def test_a_disk_can_be_shared_read_only() -> None:
    (disk,) = built(disk="/i/a,b.qcow2,readonly").iter("disk")
    assert disk.find("source").get("file") == "/i/a,b.qcow2"  # type: ignore[union-attr]
    assert disk.find("driver").get("type") == "qcow2"  # type: ignore[union-attr]
    assert disk.find("readonly") is not None
    assert disk.find("shareable") is not None


def test_a_disk_whose_name_has_a_comma_is_written_to() -> None:
    (disk,) = built(disk="/i/a,b.qcow2").iter("disk")
    assert disk.find("source").get("file") == "/i/a,b.qcow2"  # type: ignore[union-attr]
    assert disk.find("readonly") is None


@pytest.mark.parametrize("disk", ["/i/a.img,ro", "/i/a.img,cache", ",readonly", "i.img,readonly"])
def test_a_wrong_option_of_a_disk_is_told(disk: str) -> None:
    with pytest.raises(UsageError) as caught:
        built(disk=disk)
    assert (caught.value.code, caught.value.where) == ("vm-option", "disk")


def test_without_a_network_there_is_no_network_card() -> None:
    assert built().find("devices/interface") is None


def test_a_guest_agent_can_be_reached() -> None:
    names = [t.get("name") for t in built().iterfind("devices/channel/target")]
    assert names == ["org.qemu.guest_agent.0"]


@pytest.mark.parametrize(
    ("accelerator", "probed", "kind"),
    [
        ("auto", True, "kvm"),
        ("auto", False, "qemu"),
        ("kvm", False, "kvm"),
        ("tcg", True, "qemu"),
    ],
)
def test_kvm_is_taken_where_it_works(accelerator: str, probed: bool, kind: str) -> None:
    root = built(kvm=probed, accelerator=accelerator)
    assert root.get("type") == kind
    passthrough = root.find("cpu").get("mode") == "host-passthrough"  # type: ignore[union-attr]
    assert passthrough == (kind == "kvm")


def test_an_emulated_cpu_is_no_amd_whose_reserved_addresses_hold_the_windows() -> None:
    assert built().findtext("cpu/model") == "Haswell-noTSX"


def test_an_iommu_brings_what_it_needs() -> None:
    root = built(iommu=True)
    assert root.find("features/ioapic").get("driver") == "qemu"  # type: ignore[union-attr]
    driver = root.find("devices/iommu[@model='intel']/driver")
    assert driver is not None
    assert driver.attrib == {"intremap": "on", "caching_mode": "on"}
    assert built().find("devices/iommu") is None


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "a/b"}),
        ("name", {"name": "-x"}),
        ("name", {"name": "x" * 65}),
        ("name", {"name": "a\n"}),
        ("uuid", {"uuid": "no"}),
        ("memory", {"memory_bytes": 1}),
        ("memory", {"memory_bytes": 64 * MIB + 1}),
        ("vcpus", {"vcpus": 0}),
        ("vcpus", {"vcpus": 256}),
        ("machine", {"machine": "pc"}),
        ("machine", {"machine": "q35,accel=kvm"}),
        ("accelerator", {"accelerator": "xen"}),
        ("hotplug-ports", {"hotplug_ports": -1}),
        ("hotplug-ports", {"hotplug_ports": 17}),
        ("disk", {"disk": "a.img"}),
        ("disk", {"disk": None}),
        ("disk", {"disks": ("/x",) * 26}),
        ("disk", {"disks": ("/x\x01",)}),
        ("kernel", {"kernel": "vmlinuz"}),
        ("kernel", {"cmdline": "quiet"}),
        ("initrd", {"kernel": "/k", "initrd": "i"}),
        ("cmdline", {"kernel": "/k", "cmdline": "a\nb"}),
        ("network", {"network": ""}),
        ("console-log", {"console_log": "log"}),
    ],
)
def test_a_wrong_option_is_named(where: str, changes: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        built(**changes)
    assert (caught.value.code, caught.value.where) == ("vm-option", where)
    assert caught.value.hint
