"""Cards that are cut once, on two real hosts: a function for each VM, in order, and elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelvisor.lab import LabHost, Laboratory
from tests.lab.moving import MovingVm, trust_each_other
from tests.lab.test_operator import Command, lines
from tests.lab.user import accelctl, seen, selftest

#: As libvirt is reached between hosts of a laboratory, and a card beside the one of all tests.
CONFIGURED = """
[migration]
libvirt_uri = "qemu+tcp://{address}/system"
[cards.card0]
[cards.cut]
memory = "1GiB"
"""
CONFIG = "/etc/accelvisor/conf.d/90-static.toml"


@pytest.fixture(scope="module")
def hosts(lab: Laboratory) -> Iterator[tuple[LabHost, LabHost]]:
    """Two that trust each other, with a card of one function, and of two."""
    lab.add_hosts(2)
    one, other = lab.hosts[:2]
    trust_each_other(one, other)
    for host, number in ((one, 1), (other, 2)):
        host.push(CONFIGURED.encode(), CONFIG)
        host.run(["systemctl", "restart", "accelvisor"])
        accelctl(host, "card", "set", "cut", "--functions", str(number))
    yield one, other
    for host in (one, other):
        accelctl(host, "card", "set", "cut", "--functions", "0")
        host.run(["rm", CONFIG])
        host.run(["systemctl", "restart", "accelvisor"])


@pytest.fixture
def vms(hosts: tuple[LabHost, LabHost]) -> Iterator[tuple[MovingVm, ...]]:
    made = tuple(MovingVm(name, hosts) for name in ("first", "second", "third"))
    yield made
    for vm in made:
        vm.clear()


def card(host: LabHost) -> dict[str, Any]:
    return dict(accelctl(host, "card", "show", "cut")["card"])


def holders(host: LabHost) -> list[str]:
    """Names of the domains that have a function of the card."""
    functions = accelctl(host, "function", "list")["functions"]
    return [function["domain"] for function in functions if function["card"] == "cut"]


def test_each_vm_gets_one_in_order_here_or_elsewhere(
    hosts: tuple[LabHost, LabHost], vms: tuple[MovingVm, ...]
) -> None:
    here, there = hosts
    first, second, _ = vms
    refused = accelctl(here, "card", "set", "cut", "--functions", "2", check=False)
    assert refused["parameters"]["code"] == "card-enabled"
    refused = accelctl(here, "function", "create", "small", "--card", "cut", check=False)
    assert refused["parameters"]["code"] == "card-enabled"

    said = here.run(["accelctl", "attach", "first", "--card", "any", "--persistent", "--json"])
    uuid = lines(said.stdout)[-1]["assigned"]["function"]
    selftest(first.boot())
    refused = accelctl(here, "attach", "first", "--card", "any", check=False)
    assert refused["parameters"]["code"] == "one-function-per-vm"

    for words in (("deny",), ("wait", "--timeout", "1")):
        command = ["attach", "third", "--card", "any", "--on-exhaustion", *words]
        refused = here.run(["accelctl", *command, "--json"], check=False)
        assert refused.returncode == 1
        assert "no-function-free" in refused.stdout

    second.boot()
    words = ["attach", "second", "--card", "any", "--live", "--on-exhaustion", "migrate"]
    here.run(["accelctl", *words, "--json"], timeout=300)
    assert second.here is there
    assert holders(there) == ["second"]
    there.wait(lambda: len(seen(second.guest)) == 1, deadline_s=60, what="the function there")
    selftest(second.guest)

    words = ["attach", "third", "--card", "any", "--on-exhaustion", "wait"]
    with Command(here, *words) as waiting:
        waiting.until(lambda said: said["assigned"] is None)
        accelctl(here, "detach", uuid, "first")
        assert waiting.until(lambda said: said["assigned"] is not None)
        assert waiting.end() == 0
    assert holders(here) == ["third"]

    before = [card(host) for host in hosts]
    for host in hosts:
        host.run(["systemctl", "restart", "accelvisor"])
    assert [card(host) for host in hosts] == before
    assert [holders(host) for host in hosts] == [["third"], ["second"]]
    shown = here.run(["accelctl", "card", "show", "cut", "--config-space"]).stdout
    assert shown.count("\n") > 256, "4096 bytes, 16 in a line, for lspci -F"
