"""Domain XMLs as other tools write them, and tools to compare XML without our own parser."""

from __future__ import annotations

import xml.etree.ElementTree as ET

UUID = "0f6d3a52-8a0e-4c53-9d57-6a3b1b2f4c11"
OTHER = "7c1e9b90-2f2b-4b4e-8f0a-51c7f0b2ad22"
DOMAIN = "37062d46-ed05-4e63-b102-fa45c8ac403f"  # of READY
SOCKET = f"/run/accelvisor/function/{UUID}/libvirt-{DOMAIN}"
OTHER_SOCKET = f"/run/accelvisor/function/{OTHER}/libvirt-{DOMAIN}"

#: As an installer writes it: metadata of its own, no addresses, private memory, a comment.
INSTALLER = """<domain type="kvm">
  <name>web</name>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">
      <libosinfo:os id="http://debian.org/debian/13"/>
    </libosinfo:libosinfo>
  </metadata>
  <!-- keep this one -->
  <memory unit="MiB">2048</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <boot dev="hd"/>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode="host-passthrough"/>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type="file" device="disk">
      <source file="/var/lib/libvirt/images/a &amp; b.qcow2"/>
      <target dev="vda" bus="virtio"/>
    </disk>
    <controller type="pci" model="pcie-root"/>
    <controller type="pci" model="pcie-root-port" index="1"/>
    <controller type="pci" model="pcie-root-port" index="2"/>
    <graphics type="vnc" passwd="s&lt;cret"/>
  </devices>
</domain>
"""

#: As libvirt prints a domain that is ready for functions and has a command line of its own, with
#: another prefix for QEMU's namespace.
READY = """<domain type='qemu' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>db</name>
  <uuid>37062d46-ed05-4e63-b102-fa45c8ac403f</uuid>
  <memory unit='KiB'>524288</memory>
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <os>
    <type arch='x86_64' machine='pc-q35-11.1'>hvm</type>
  </os>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'>
      <target chassis='1' port='0x8'/>
    </controller>
  </devices>
  <q:commandline>
    <q:arg value='-device'/>
    <q:arg value='edu,id=mine'/>
    <q:env name='QEMU_TRACE' value='1'/>
  </q:commandline>
</domain>
"""

BARE = """<domain type='qemu'><name>x</name><memory>65536</memory>\
<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
<os><type machine='q35'>hvm</type></os></domain>"""


def meaning(xml: str) -> str:
    """Canonical XML 2.0 without white space around text: Python's own implementation."""
    return ET.canonicalize(xml, strip_text=True, rewrite_prefixes=True, with_comments=True)
