"""Domain XML for lab guests: what accelvisor needs of a VM, and as little else as possible."""

from __future__ import annotations

import json
from dataclasses import dataclass
from uuid import NAMESPACE_DNS, uuid5
from xml.sax.saxutils import escape, quoteattr

from accelvisor.lab.container import GUEST_IMAGES

_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
# Never asked for in a guest, and seconds under emulation: certificates, self-tests, measurements.
_UNUSED = (
    "load_system_certificate_list",
    "jent_mod_init",
    "init_ima",
    "init_encrypted",
    "btf_vmlinux_init",
    "bpf_tcp_ca_kfunc_init",
    "hpet_init",  # its character device; Linux itself has the clock
)
# The console for people; the rest skips what emulated hardware takes long to answer, and what an
# emulated processor takes long to do: five levels of page tables, patching its own code.
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check nokaslr audit=0 "
    "8250.nr_uarts=1 random.trust_cpu=on no5lvl noreplace-smp init_on_alloc=0 lsm= "
    f"cryptomgr.notests ipv6.disable=1 initcall_blacklist={','.join(_UNUSED)}"
)


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """A guest to define. ``functions`` are vfio-user socket paths, present from the start."""

    name: str
    memory_mib: int = 256
    vcpus: int = 1
    # An emulated IOMMU, for guests that drive the function through vfio-pci.
    iommu: bool = False
    # Free PCIe root ports, each a place to hot-plug one function.
    root_ports: int = 3
    functions: tuple[str, ...] = ()
    # More arguments for QEMU itself.
    qemu: tuple[str, ...] = ()
    # Further elements inside <domain>, such as <metadata>.
    extra: str = ""
    # Made from the name by default, so that a domain can be defined again.
    uuid: str = ""
    kernel: str = ""

    def xml(self) -> str:
        """The domain as libvirt takes it."""
        iommu = (
            "<iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu>"
            if self.iommu
            else ""
        )
        ports = "\n    ".join(
            "<controller type='pci' model='pcie-root-port'/>" for _ in range(self.root_ports + 2)
        )
        return f"""\
<domain type='qemu' xmlns:qemu='{_QEMU}'>
  <name>{escape(self.name)}</name>
  <uuid>{self.uuid or uuid5(NAMESPACE_DNS, f"{self.name}.accelvisor-lab")}</uuid>
  <memory unit='MiB'>{self.memory_mib}</memory>
  <vcpu>{self.vcpus}</vcpu>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  {self.extra}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{GUEST_IMAGES}/vmlinux</kernel>
    <initrd>{GUEST_IMAGES}/initrd.img</initrd>
    <cmdline>{KERNEL_ARGUMENTS} hostname={escape(self.name)} {escape(self.kernel)}</cmdline>
  </os>
  <features><acpi/><apic/>{"<ioapic driver='qemu'/>" if self.iommu else ""}</features>
  <cpu mode='maximum'/>
  <clock offset='utc'/>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    {_disk("base", 0)}
    {_disk("layer", 1)}
    <controller type='usb' model='none'/>
    <controller type='pci' index='0' model='pcie-root'/>
    {ports}
    <serial type='pty'><log file={quoteattr(f"/var/log/libvirt/qemu/{self.name}-console.log")}
      append='on'/></serial>
    <console type='pty'/>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <memballoon model='none'/>
    {iommu}
  </devices>
  {self._commandline()}
</domain>
"""

    def _commandline(self) -> str:
        words = list(self.qemu)
        for number, path in enumerate(self.functions):
            device = {
                "driver": "vfio-user-pci",
                "id": f"function{number}",
                "socket": {"type": "unix", "path": path},
            }
            words += ["-device", json.dumps(device)]
        if not words:
            return ""
        arguments = "".join(f"<qemu:arg value={quoteattr(word)}/>" for word in words)
        return f"<qemu:commandline>{arguments}</qemu:commandline>"


def _disk(name: str, number: int) -> str:
    # Read-only and shareable: one file serves every guest, and does not stand in a migration's way.
    return f"""\
<disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='none'/>
      <source file='{GUEST_IMAGES}/{name}.squashfs'/>
      <target dev='vd{chr(ord("a") + number)}' bus='virtio'/>
      <readonly/><shareable/><serial>{name}</serial>
    </disk>"""
