"""The laboratory: real hosts with systemd, libvirt and QEMU, and real guests, on one machine.

``with Laboratory(hosts=2) as lab`` builds (and caches) a Debian 13 host image and a small guest
image, boots each host in its own network namespace, installs accelvisor's .deb there as a user
would, and takes everything away again, also after its own death. ``python -m accelvisor.lab``
offers the same from a shell; docs/lab.md tells how.
"""

from __future__ import annotations

from accelvisor.lab.domain import DomainSpec
from accelvisor.lab.guest import Guest
from accelvisor.lab.host import LabHost
from accelvisor.lab.laboratory import Laboratory

__all__ = ["DomainSpec", "Guest", "LabHost", "Laboratory"]
