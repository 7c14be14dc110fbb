"""What a user of a laboratory host does: accelctl's verbs, and a look into a guest."""

from __future__ import annotations

import json
from typing import Any

from accelvisor.lab import Guest, LabHost
from accelvisor.lab.container import GUEST_IMAGES
from accelvisor.lab.domain import KERNEL_ARGUMENTS

#: What ``lspci -d`` takes for our functions.
DEVICE = "acce:0001"


def accelctl(host: LabHost, *words: str, check: bool = True, input: str | None = None) -> Any:
    """One command's JSON; with ``check=False`` the error's."""
    said = host.run(["accelctl", *words, "--json"], check=check, timeout=120, input=input)
    text = said.stdout.strip()
    return json.loads(text) if text else {}


def define(host: LabHost, name: str, *options: str) -> None:
    """A domain from options alone, that boots the laboratory's guest."""
    accelctl(
        host, "vm", "define", name,
        "--memory", "256MiB",
        "--kernel", f"{GUEST_IMAGES}/vmlinux",
        "--initrd", f"{GUEST_IMAGES}/initrd.img",
        "--cmdline", f"{KERNEL_ARGUMENTS} hostname={name}",
        "--disk", f"{GUEST_IMAGES}/base.squashfs,readonly",
        "--disk", f"{GUEST_IMAGES}/layer.squashfs,readonly",
        "--console-log", f"/var/log/libvirt/qemu/{name}-console.log",
        *options,
    )  # fmt: skip


def start(host: LabHost, name: str) -> Guest:
    """Start it, and wait until programs can be run in it."""
    accelctl(host, "vm", "start", name)
    guest = host.guest(name)
    guest.wait_ready()
    return guest


def seen(guest: Guest) -> list[str]:
    """PCI addresses of the functions that the guest sees."""
    listed = guest.run(["lspci", "-D", "-d", DEVICE]).stdout
    return [line.split()[0] for line in listed.splitlines()]


def state(host: LabHost, function: str) -> str:
    """Of a function, in accelvisord's words."""
    return str(accelctl(host, "function", "show", function)["function"]["state"])


def wait_for_state(host: LabHost, function: str, wanted: str, *, deadline_s: float = 15.0) -> None:
    """Wait until accelvisord says so."""
    what = f"function {wanted}"
    host.wait(lambda: state(host, function) == wanted, deadline_s=deadline_s, what=what)


def selftest(guest: Guest, *options: str) -> None:
    """The guest's own test of a function; it fails loudly."""
    guest.run(["accelguest", "selftest", *options], timeout=120)
