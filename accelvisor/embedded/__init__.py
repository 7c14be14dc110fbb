"""The whole product on one machine without root, QEMU or systemd (docs/architecture.md section 8).

The same daemon and the same function processes as on a host; the in-tree vfio-user client stands
where the VM would be, its RAM being a memfd.
"""

from accelvisor.embedded.host import EmbeddedHost

__all__ = ["EmbeddedHost"]
