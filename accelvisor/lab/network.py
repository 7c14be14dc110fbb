"""The lab's network: a switch in a network namespace of its own, a namespace per host.

Nothing of it is in the machine's own namespace: no address, no bridge, no rule. So two labs, or a
lab and whatever the machine is connected to, can use the same addresses without ever meeting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accelvisor.errors import SystemFailure
from accelvisor.lab.process import run

if TYPE_CHECKING:
    # Imported where a network is made: taking one away must not need a working .venv.
    from pyroute2 import IPRoute

SUBNET = "10.77.0"
_PREFIX = "avlab"
_RUN = Path("/run/netns")


def address(index: int) -> str:
    """The address of the host with this index, which counts from 1."""
    return f"{SUBNET}.{index}"


def namespace(lab: str, index: int) -> str:
    """The name of a host's network namespace."""
    return f"{_PREFIX}-{lab}-{index}"


def namespace_path(lab: str, index: int) -> Path:
    """Where that namespace can be opened."""
    return _RUN / namespace(lab, index)


def create_switch(lab: str) -> None:
    """The namespace with the bridge that the hosts are connected to."""
    name = _switch(lab)
    _create(name)

    def configure(links: IPRoute) -> None:
        links.link("add", ifname="switch", kind="bridge")
        _up(links, "lo")
        _up(links, "switch")

    _inside(name, configure)


def connect_host(lab: str, index: int) -> None:
    """A host's namespace with one interface, ``eth0``, on the switch."""
    name = namespace(lab, index)
    _create(name)
    port = f"host{index}"

    def plug(links: IPRoute) -> None:
        handle = os.open(_RUN / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            peer = {"ifname": "eth0", "net_ns_fd": handle}
            links.link("add", ifname=port, kind="veth", peer=peer)
        finally:
            os.close(handle)
        bridge = _index(links, "switch")
        links.link("set", index=_index(links, port), master=bridge, state="up")

    def configure(links: IPRoute) -> None:
        links.addr("add", index=_index(links, "eth0"), address=address(index), prefixlen=24)
        _up(links, "lo")
        _up(links, "eth0")

    _inside(_switch(lab), plug)
    _inside(name, configure)


def plug(lab: str, index: int, *, connected: bool) -> None:
    """Plug a host's cable into the switch, or pull it: no packet comes or goes, and nobody is told.
    """

    def configure(links: IPRoute) -> None:
        links.link("set", index=_index(links, f"host{index}"), state="up" if connected else "down")

    _inside(_switch(lab), configure)


def remove(lab: str) -> None:
    """Take away every namespace of this lab; interfaces go with the namespaces they are in."""
    for path in namespaces(lab):
        _remove(path)


def remove_host(lab: str, index: int) -> None:
    """Take away one host's namespace and the cable to the switch."""

    def unplug(links: IPRoute) -> None:
        # The kernel would do it too, but some time after the namespace has gone.
        for port in links.link_lookup(ifname=f"host{index}"):
            links.link("del", index=port)

    if (_RUN / _switch(lab)).exists():
        _inside(_switch(lab), unplug)
    _remove(namespace_path(lab, index))


def namespaces(lab: str) -> list[Path]:
    """The namespaces of this lab that exist."""
    names = [_switch(lab), *(namespace(lab, index) for index in range(1, 10))]
    return [_RUN / name for name in names if (_RUN / name).exists()]


def _create(name: str) -> None:
    from pyroute2 import netns

    netns.create(name)


def _remove(path: Path) -> None:
    """A named namespace is a mount on an empty file, which may be half made."""
    if path.exists():
        # Lazily: a process may be inside still.
        run(["umount", "--lazy", str(path)], timeout=30, check=False)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _switch(lab: str) -> str:
    return f"{_PREFIX}-{lab}-switch"


def _index(links: IPRoute, name: str) -> int:
    found = links.link_lookup(ifname=name)
    if not found:
        raise SystemFailure(f"no interface {name} in the laboratory's network", where="lab")
    return int(found[0])


def _up(links: IPRoute, name: str) -> None:
    links.link("set", index=_index(links, name), state="up")


def _inside(name: str, work: Callable[[IPRoute], None]) -> None:
    """Do the work in a network namespace, in a thread that enters it and then ends.

    pyroute2's own NetNS forks a process, which is no good in a test runner with threads.
    """
    from pyroute2 import IPRoute

    failed: list[BaseException] = []

    def enter() -> None:
        try:
            _set_network_namespace(_RUN / name)
            with IPRoute() as links:
                work(links)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=enter, name=f"network-{name}")
    thread.start()
    thread.join()
    if failed:
        raise SystemFailure(f"network namespace {name}: {failed[0]}", where="lab") from failed[0]


def _set_network_namespace(path: Path) -> None:
    # os.setns comes with Python 3.12 only.
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, clone_newnet) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(handle)
