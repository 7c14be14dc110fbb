"""What tests of moves between two hosts share: trust, a VM that trains, what must hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelvisor.errors import AccelvisorError
from accelvisor.lab import Guest, LabHost
from tests.lab.user import accelctl, define, seen, start

HERE = Path(__file__).parent
DIGITS = HERE.parents[1] / "fixtures" / "digits" / "digits.npz"
PORT = 16519


def trust_each_other(one: LabHost, other: LabHost) -> None:
    """One command on each; nothing happens when they do already.

    A host that was removed or revoked needs new keys before it is let in again.
    """
    if peers(one, other) and peers(other, one):
        return
    for host, its in ((one, other), (other, one)):
        for left in peers(host, its):
            accelctl(host, "trust", "remove", left)
    for host in (one, other):
        accelctl(host, "trust", "rotate")
    code = accelctl(one, "trust", "invite", "--address", f"{one.address}:{PORT}")["code"]
    accelctl(other, "trust", "join", code)


def peers(host: LabHost, other: LabHost) -> list[str]:
    """UUIDs under which a host trusts another one."""
    return [h["uuid"] for h in trusted(host) if h["address"].startswith(other.address)]


def trusted(host: LabHost) -> list[dict[str, Any]]:
    return list(accelctl(host, "trust", "show")["trust"]["hosts"])


def functions(host: LabHost) -> dict[str, dict[str, Any]]:
    """Of a host, by UUID."""
    return {f["uuid"]: f for f in accelctl(host, "function", "list")["functions"]}


def answers(host: LabHost) -> bool:
    return host.run(["accelctl", "host", "show"], check=False, timeout=30).returncode == 0


class Training:
    """A program in the guest that trains on one function, lap after lap."""

    def __init__(self, vm: MovingVm, tag: str, bdf: str = "") -> None:
        self._vm = vm
        self.tag = tag
        words = [bdf] if bdf else []
        self._pid = vm.guest.start(["python3", "/root/trainer.py", tag, *words])
        self.begin()

    def begin(self) -> None:
        """Begin a lap, and wait until it is on its way."""
        self.idle = False
        self._vm.guest.run(["touch", f"/root/{self.tag}.go"])
        self.goes_on()

    def said(self) -> dict[str, Any]:
        """What it tells of itself; nothing before its first epoch."""
        found = self._vm.guest.run(["cat", f"/root/{self.tag}.json"], check=False)
        none = {"epochs": 0, "laps": 0}
        return dict(json.loads(found.stdout)) if found.returncode == 0 else none

    def _steps(self) -> int:
        """In all laps."""
        said = self.said()
        return int(said.get("steps", 0))

    def goes_on(self) -> None:
        """Wait until it has done more than it had now."""
        before = self._steps()
        self._wait(lambda: self._steps() > before + 40, "to go on")

    def lap(self) -> dict[str, Any]:
        """End the lap and hold its bits against the reference; returns what it said at its end."""
        guest, host, laps = self._vm.guest, self._vm.here, self.said()["laps"]
        guest.run(["rm", f"/root/{self.tag}.go"])
        self._wait(lambda: bool(self.said()["laps"] > laps), "to end its lap")
        self.idle = True
        said = dict(self.said()["last"])
        host.push(guest.pull(f"/root/{self.tag}.npz"), f"/root/{self.tag}.npz")
        words = ["python3", "/root/retrace.py", f"/root/{DIGITS.name}", str(said["epochs"])]
        found = json.loads(host.run([*words, f"/root/{self.tag}.npz"], timeout=300).stdout)
        assert found["losses"], "every loss has the bits of the unmoved run"
        assert found["weights"], "every weight has the bits of the unmoved run"
        assert found["compared"] == said["launches"] > 0, "no command was lost or run twice"
        assert said["bad"] == 0 < said["reads"], "no register read as zeros or ones"
        assert said["torn"] == 0, "no byte that went by DMA was lost"
        assert said["gap_s"] < 45, "no interrupt was lost"
        return said

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self._vm.here.wait(condition, deadline_s=90, what=f"training {self.tag} {what}")
        except AccelvisorError as error:
            error.hint = str(self._vm.guest.agent("guest-exec-status", {"pid": self._pid}))
            raise


class OnChips:
    """A program in the guest that trains on all chips of one function (chips.py)."""

    def __init__(self, vm: MovingVm, bdf: str, profile: str) -> None:
        self._vm = vm
        self._profile = profile
        vm.guest.push(HERE / "chips.py", "/root/chips.py")
        vm.guest.run(["touch", "/root/chips.go"])
        self._pid = vm.guest.start(["python3", "/root/chips.py", "chips", bdf])
        self.goes_on()

    def _epochs(self) -> int:
        told = self._vm.guest.run(["cat", "/root/chips.epochs"], check=False)
        return int(told.stdout or 0)

    def goes_on(self) -> None:
        """Wait until it has done more than it had now."""
        before = self._epochs()
        self._wait(lambda: self._epochs() > before, "to go on")

    def lap(self) -> None:
        """It has moved enough: the same once more without must end with the same bits."""
        self._vm.guest.run(["rm", "/root/chips.go"])

        told = ["cat", "/root/chips.json"]
        self._wait(lambda: self._vm.guest.run(told, check=False).returncode == 0, "to end")
        moved = json.loads(self._vm.guest.run(told).stdout)
        stayed = self._unmoved(self._vm.there, moved["epochs"])
        assert moved["epochs"] > 2
        assert moved["digests"] == stayed["digests"], "every weight has the bits of the unmoved run"
        assert len(moved["digests"]) > 1 == len(set(moved["digests"])), "all chips have them"
        assert moved["carried"] == stayed["carried"], "a message was lost, or came twice"
        assert all(transfers for transfers, _ in moved["carried"])

    def _unmoved(self, host: LabHost, epochs: int) -> dict[str, Any]:
        """The same on a function that no VM has."""
        uuid = accelctl(host, "function", "create", self._profile)["function"]["uuid"]
        try:
            host.push(HERE / "chips.py", "/root/chips.py")
            path = f"/run/accelvisor/function/{uuid}/vfio.sock"
            done = host.run(["python3", "/root/chips.py", str(epochs), path], timeout=300)
            return dict(json.loads(done.stdout))
        finally:
            host.run(["accelctl", "function", "delete", uuid, "--force"])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self._vm.here.wait(condition, deadline_s=120, what=f"training on chips {what}")
        except AccelvisorError as error:
            error.hint = str(self._vm.guest.agent("guest-exec-status", {"pid": self._pid}))
            raise


class MovingVm:
    """A VM with functions, on one of two hosts.

    Args:
        options: of ``accelctl vm define``.
    """

    def __init__(self, name: str, hosts: tuple[LabHost, ...], *options: str) -> None:
        self.name = name
        self.hosts = hosts
        self.uuids: list[str] = []
        define(hosts[0], name, *options)
        for host in hosts:
            for path in (HERE / "retrace.py", HERE / "trainer.py", DIGITS):
                host.push(path, f"/root/{path.name}")

    def give(self, profile: str = "small", *options: str) -> str:
        """Create a function and attach it; returns its UUID."""
        made = accelctl(self.hosts[0], "function", "create", profile)["function"]
        self.uuids.append(made["uuid"])
        accelctl(self.here if self.runs else self.hosts[0], "attach", made["uuid"], self.name,
                 *options)  # fmt: skip
        return str(made["uuid"])

    def boot(self) -> Guest:
        guest = start(self.hosts[0], self.name)
        guest.push(DIGITS, f"/root/{DIGITS.name}")
        guest.push(HERE / "trainer.py", "/root/trainer.py")
        return guest

    def clear(self) -> None:
        """Nothing of it is left on either host."""
        for host in self.hosts:
            host.virsh("destroy", self.name, check=False)
            host.virsh("undefine", self.name, check=False)
            for uuid in self.uuids:
                host.run(["accelctl", "function", "delete", uuid, "--force"], check=False)

    # --- where it is ------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        return any(self._runs_on(host) for host in self.hosts)

    def _runs_on(self, host: LabHost) -> bool:
        return host.virsh("domstate", self.name, check=False).stdout.strip() == "running"

    @property
    def here(self) -> LabHost:
        """The one host on which it runs."""
        (found,) = [host for host in self.hosts if self._runs_on(host)]
        return found

    @property
    def there(self) -> LabHost:
        (found,) = [host for host in self.hosts if host is not self.here]
        return found

    @property
    def guest(self) -> Guest:
        return self.here.guest(self.name)

    def bdfs(self) -> list[str]:
        return seen(self.guest)

    # --- moving -----------------------------------------------------------------------------------

    def uri(self, host: LabHost) -> str:
        return f"qemu+tcp://{host.address}/system"

    def migrate(self, *options: str, timeout: float = 120.0) -> str:
        """Plain virsh; what it complains of, and nothing when the VM has moved."""
        source, there = self.here, self.there
        began = time.monotonic()
        words = ("migrate", "--live", *options, self.name, self.uri(there))
        done = source.virsh(*words, check=False, timeout=timeout)
        self.took_s = time.monotonic() - began
        return "" if done.returncode == 0 else done.stderr.strip()

    def move(self, *options: str) -> None:
        """The VM goes to the other host, and all its functions with it."""
        source, there = self.here, self.there
        said = self.migrate(*options)
        if said:
            raise AssertionError(
                f"{said}\n--- source\n{source.journal('accelvisor', 30)}"
                f"\n--- destination\n{there.journal('accelvisor', 30)}"
            )
        self.only_at(there)

    def only_at(self, host: LabHost) -> None:
        """The VM runs there, its functions are there, and the other host has nothing of them."""
        assert self.here is host
        (other,) = [each for each in self.hosts if each is not host]
        wait_for(host, lambda: self._all_at(host), "its functions to run")
        wait_for(other, lambda: not set(functions(other)) & set(self.uuids), "nothing to be left")
        for uuid in self.uuids:
            left = other.run(["sh", "-c", f"ls -d /run/accelvisor/*/{uuid}*"], check=False).stdout
            assert left == "", "nothing of it is left"

    def _all_at(self, host: LabHost) -> bool:
        known = functions(host)
        return all(known.get(uuid, {}).get("state") == "running" for uuid in self.uuids)


def wait_for(host: LabHost, condition: Callable[[], bool], what: str) -> None:
    host.wait(condition, deadline_s=30, what=what)
