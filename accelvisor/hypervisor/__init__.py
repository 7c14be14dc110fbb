"""libvirt and QEMU: domains, their XML, hot-plug, events, the hook.

The only room that imports libvirt, and only when a verb needs it: everything that decides
(:mod:`~accelvisor.hypervisor.xml`, :mod:`~accelvisor.hypervisor.hotplug`,
:mod:`~accelvisor.hypervisor.qmp`) is pure and works, and is tested, without it.
"""
