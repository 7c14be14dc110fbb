"""A whole domain XML from a few options: what ``accelctl vm define`` makes.

The result is an ordinary domain that any libvirt tool can manage, made ready for functions
(:func:`accelvisor.hypervisor.xml.prepare`). Pure: whether KVM can run a guest is an argument.
"""

from __future__ import annotations

import re
import uuid as uuids
from typing import NoReturn
from xml.etree import ElementTree as ET

from accelvisor.errors import UsageError
from accelvisor.hypervisor.port import DomainOptions
from accelvisor.hypervisor.xml import prepare
from accelvisor.hypervisor.xmltree import Document
from accelvisor.limits import LIMITS, MIB

#: What libvirt and the file names that it derives from a domain's name take without surprises.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_MACHINE = re.compile(r"q35|pc-q35-[0-9.]+(-[a-z0-9]+)?")
_READ_ONLY = frozenset({"squashfs", "erofs", "iso"})
_SERIAL_CHARS = 20  # virtio-blk's limit
_MIN_MEMORY = 32 * MIB
_MAX_VCPUS = 255  # without an interrupt-remapping IOMMU, an x86 guest has 8-bit APIC ids
_MAX_PORTS = 16  # each spare port reserves LIMITS.window_bytes of address space


def build(options: DomainOptions, *, kvm: bool) -> str:
    """The domain XML. UsageError (``vm-option``) names the option that is wrong."""
    _check(options)
    kvm = kvm if options.accelerator == "auto" else options.accelerator == "kvm"
    domain = ET.Element("domain", {"type": "kvm" if kvm else "qemu"})
    _text(domain, "name", options.name)
    if options.uuid is not None:
        _text(domain, "uuid", str(uuids.UUID(options.uuid)))
    _text(domain, "memory", str(options.memory_bytes // 1024), unit="KiB")
    backing = _sub(domain, "memoryBacking")
    _sub(backing, "source", type="memfd")
    _sub(backing, "access", mode="shared")
    _text(domain, "vcpu", str(options.vcpus))
    _boot(domain, options)
    features = _sub(domain, "features")
    _sub(features, "acpi")  # without it Linux takes five seconds to let go of a hot-plugged device
    _sub(features, "apic")
    if options.iommu:
        _sub(features, "ioapic", driver="qemu")  # interrupt remapping needs it in userspace
    if kvm:
        _sub(domain, "cpu", mode="host-passthrough")
    else:
        _emulated_cpu(domain)
    _sub(domain, "clock", offset="utc")
    _text(domain, "on_poweroff", "destroy")
    _text(domain, "on_reboot", "restart")
    _text(domain, "on_crash", "destroy")
    _devices(_sub(domain, "devices"), options)
    ET.indent(domain)
    return prepare(str(Document(domain)), spare_ports=options.hotplug_ports)


def _emulated_cpu(domain: ET.Element) -> None:
    """Haswell, less what TCG does not emulate: it has the vector units that matter.

    TCG's widest CPU is an AMD with 40 address bits, on which the windows of hot-plug ports end up
    in addresses that are reserved for HyperTransport (docs/hypervisor.md).
    """
    cpu = _sub(domain, "cpu", mode="custom", match="exact", check="none")
    _text(cpu, "model", "Haswell-noTSX", fallback="forbid")
    for feature in ("pcid", "tsc-deadline", "invpcid"):
        _sub(cpu, "feature", policy="disable", name=feature)


def _boot(domain: ET.Element, options: DomainOptions) -> None:
    system = _sub(domain, "os")
    _text(system, "type", "hvm", arch="x86_64", machine=options.machine)
    if options.kernel is None:
        _sub(system, "boot", dev="hd")
        return
    _text(system, "kernel", options.kernel)
    if options.initrd is not None:
        _text(system, "initrd", options.initrd)
    if options.cmdline is not None:
        _text(system, "cmdline", options.cmdline)


def _devices(devices: ET.Element, options: DomainOptions) -> None:
    for number, path in enumerate(_disks(options)):
        _disk(devices, path, f"vd{chr(ord('a') + number)}")
    _sub(devices, "controller", type="usb", model="none")
    if options.network is not None:
        interface = _sub(devices, "interface", type="network")
        _sub(interface, "source", network=options.network)
        _sub(interface, "model", type="virtio")
    serial = _sub(devices, "serial", type="pty")
    if options.console_log is not None:
        _sub(serial, "log", file=options.console_log, append="on")
    _sub(serial, "target", type="isa-serial", port="0")
    _sub(_sub(devices, "console", type="pty"), "target", type="serial", port="0")
    agent = _sub(devices, "channel", type="unix")
    _sub(agent, "target", type="virtio", name="org.qemu.guest_agent.0")
    random = _sub(devices, "rng", model="virtio")
    _text(random, "backend", "/dev/urandom", model="random")
    _sub(_sub(devices, "video"), "model", type="none")
    # A device that maps guest RAM forbids ballooning; without a balloon nobody waits for it.
    _sub(devices, "memballoon", model="none")
    if options.iommu:
        iommu = _sub(devices, "iommu", model="intel")
        # caching_mode tells QEMU of each map, which is what lets a function follow them.
        _sub(iommu, "driver", intremap="on", caching_mode="on")


def _disk(devices: ET.Element, path: str, target: str) -> None:
    """One virtio disk. Its serial is the image's name, so that a guest can find it by that; a file
    system that can't be written, and one that shall not be, is shared read-only.
    """
    path, shared = _image(path)
    stem, _, suffix = path.rpartition("/")[2].rpartition(".")
    disk = _sub(devices, "disk", type="file", device="disk")
    _sub(disk, "driver", name="qemu", type="qcow2" if suffix == "qcow2" else "raw")
    _sub(disk, "source", file=path)
    _sub(disk, "target", dev=target, bus="virtio")
    if shared or suffix in _READ_ONLY:
        _sub(disk, "readonly")
        _sub(disk, "shareable")
    if _NAME.fullmatch(stem) and len(stem) <= _SERIAL_CHARS:
        _text(disk, "serial", stem)


def _image(disk: str) -> tuple[str, bool]:
    """(path, whether it is to be read-only) of ``PATH[,readonly]``. UsageError."""
    path, comma, word = disk.rpartition(",")
    if not comma or not word.isalpha():
        return disk, False
    if word != "readonly":
        _wrong("disk", f"{word!r} is no option of a disk", "IMAGE or IMAGE,readonly")
    return path, True


def _disks(options: DomainOptions) -> list[str]:
    return [path for path in (options.disk, *options.disks) if path is not None]


def _check(options: DomainOptions) -> None:
    if not _NAME.fullmatch(options.name) or len(options.name) > LIMITS.name_chars:
        _wrong("name", f"{options.name!r} is not a name", "letters, digits and _.+- (at most 64)")
    if options.uuid is not None:
        try:
            uuids.UUID(options.uuid)
        except ValueError:
            _wrong("uuid", f"{options.uuid!r} is not a UUID", "leave it out to get a new one")
    if options.memory_bytes < _MIN_MEMORY or options.memory_bytes % MIB:
        _wrong("memory", f"{options.memory_bytes} bytes", "whole MiB, at least 32")
    if not 1 <= options.vcpus <= _MAX_VCPUS:
        _wrong("vcpus", f"{options.vcpus} virtual CPUs", f"from 1 to {_MAX_VCPUS}")
    if not _MACHINE.fullmatch(options.machine):
        _wrong("machine", f"{options.machine!r} has no PCI Express", "q35")
    if options.accelerator not in ("auto", "kvm", "tcg"):
        _wrong("accelerator", f"{options.accelerator!r} is unknown", "auto, kvm or tcg")
    if not 0 <= options.hotplug_ports <= _MAX_PORTS:
        _wrong("hotplug-ports", f"{options.hotplug_ports} ports", f"from 0 to {_MAX_PORTS}")
    _check_files(options)


def _check_files(options: DomainOptions) -> None:
    named = {"kernel": options.kernel, "initrd": options.initrd, "console-log": options.console_log}
    for option, path in [*named.items(), *(("disk", path) for path in _disks(options))]:
        if path is not None and not path.startswith("/"):
            _wrong(option, f"{path!r} is not an absolute path", "libvirt has no working directory")
    texts = {"cmdline": options.cmdline, "network": options.network}
    for option, text in [*named.items(), *texts.items(), *(("disk", p) for p in _disks(options))]:
        if text is not None and (not text or any(ord(c) < 32 for c in text)):
            _wrong(option, "it is empty or has a control character", "leave it out or mend it")
    for path in _disks(options):
        _image(path)
    if len(_disks(options)) > 26:
        _wrong("disk", f"{len(_disks(options))} disks", "at most 26")
    if options.kernel is None and (options.initrd or options.cmdline):
        _wrong("kernel", "initrd and cmdline need a kernel", "name the kernel, too")
    if options.kernel is None and not _disks(options):
        _wrong("disk", "there is nothing to boot from", "name a disk or a kernel")


def _wrong(option: str, problem: str, hint: str) -> NoReturn:
    raise UsageError(f"{option}: {problem}", code="vm-option", where=option, hint=hint)


def _sub(parent: ET.Element, tag: str, /, **attributes: str) -> ET.Element:
    return ET.SubElement(parent, tag, attributes)


def _text(parent: ET.Element, tag: str, text: str, /, **attributes: str) -> ET.Element:
    element = _sub(parent, tag, **attributes)
    element.text = text
    return element
