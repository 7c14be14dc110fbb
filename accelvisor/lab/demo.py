"""The demonstration: a VM computes on its own accelerator function, on a host built for it, and
moves to a second one while it does.

Everything is done as a user would: the Debian package is installed on the hosts, ``accelctl``
creates the function and the VM, the programs in the VM are ``lspci`` and ``accelguest``, and what
moves it is plain ``virsh migrate --live``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from accelvisor.embedded import report
from accelvisor.errors import AccelvisorError
from accelvisor.lab.container import GUEST_IMAGES
from accelvisor.lab.domain import KERNEL_ARGUMENTS
from accelvisor.lab.guest import Guest
from accelvisor.lab.host import LabHost
from accelvisor.lab.laboratory import Laboratory
from accelvisor.lab.progress import Progress
from accelvisor.limits import MIB

_FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "digits"
_VM = "digits"
_FUNCTION = "digits"
#: Enough to be killed once and moved once in the middle.
_EPOCHS = 120
_PORT = 16519
_ON_HOST = "/var/tmp/accelvisor-demo"
_IN_GUEST = "/root"
_ASK = """\
import socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    link.sendall(b'{"method": "status"}\\0')
    reply = b""
    while not reply.endswith(b"\\0"):
        reply += link.recv(4096)
sys.stdout.write(reply[:-1].decode())
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 everything held, 1 something did not or could not be built."""
    parser = argparse.ArgumentParser(prog="python -m accelvisor.lab demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the laboratory running")
    parser.add_argument("--digits", type=Path, default=_FIXTURES, metavar="DIR")
    options = parser.parse_args(argv)
    began = time.monotonic()
    progress = Progress()
    try:
        with Laboratory(2, persistent=options.keep, progress=progress) as lab:
            held = Demonstration(lab.hosts, options.digits, progress).run()
    except AccelvisorError as error:
        print(f"demo: {error.message} [{error.code}]", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    left = "the laboratory is left running" if options.keep else "nothing is left behind"
    _say("done", f"in {time.monotonic() - began:.0f} s; {left}")
    return 0 if held else 1


def _say(label: str, text: str) -> None:
    print(report.line(label, text), flush=True)


@dataclass(frozen=True, slots=True)
class Moved:
    """How a move went, and how the one back did not go. Milliseconds."""

    seconds: float
    downtime_ms: float
    still_ms: float
    checkpoint_bytes: int
    flipped: str
    forger: str
    refused: str


@dataclass(slots=True)
class Figures:
    """What the run measured and got, in its order."""

    function: dict[str, Any] = field(default_factory=dict)
    ready_ms: float = 0.0
    booted_s: float = 0.0
    shown: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    trained: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    moved: Moved | None = None
    wanted: dict[str, Any] = field(default_factory=dict)


class Demonstration:
    """One run on two hosts. Figures are collected first and reported together at the end."""

    def __init__(self, hosts: Sequence[LabHost], digits: Path, progress: Progress) -> None:
        self._host, self._other = hosts[:2]
        self._digits = digits
        self._progress = progress
        self._figures = Figures()

    def run(self) -> bool:
        """True when every promise held."""
        self._clear()
        try:
            self._join()
            self._create()
            guest = self._boot()
            self._look(guest)
            self._compute(guest)
            self._refer()
        finally:
            self._clear()
        return self._report(self._figures)

    # --- steps -----------------------------------------------------------------------------------

    def _accelctl(self, *words: str, on: LabHost | None = None, timeout: float = 60.0) -> Any:
        """One accelctl command's JSON."""
        said = (on or self._host).run(["accelctl", *words, "--json"], timeout=timeout).stdout
        return json.loads(said) if said.strip() else {}

    def _clear(self) -> None:
        """What an earlier run may have left on hosts that were kept."""
        for host in (self._host, self._other):
            for words in (
                ("vm", "destroy", _VM), ("vm", "undefine", _VM), ("function", "delete", _FUNCTION)
            ):  # fmt: skip
                host.run(["accelctl", *words], check=False)
            trust = self._accelctl("trust", "show", on=host)["trust"]
            known = [each["uuid"] for each in trust["hosts"] if each["uuid"] != trust["host"]]
            for uuid in known:
                self._accelctl("trust", "remove", uuid, on=host)
            if known:
                # Who was removed comes back with new keys only.
                self._accelctl("trust", "rotate", on=host)

    def _join(self) -> None:
        with self._progress.step("two hosts come to trust each other"):
            address = f"{self._host.address}:{_PORT}"
            code = self._accelctl("trust", "invite", "--address", address)["code"]
            self._accelctl("trust", "join", code, on=self._other)

    def _create(self) -> None:
        with self._progress.step("creating a function"):
            began = time.monotonic()
            made = self._accelctl("function", "create", "small", "--name", _FUNCTION)
            self._figures.ready_ms = (time.monotonic() - began) * 1000
            self._figures.function = made["function"]

    def _boot(self) -> Guest:
        with self._progress.step("defining a VM and giving it the function"):
            self._accelctl(
                "vm", "define", _VM,
                "--memory", "384MiB",
                "--kernel", f"{GUEST_IMAGES}/vmlinux",
                "--initrd", f"{GUEST_IMAGES}/initrd.img",
                "--cmdline", f"{KERNEL_ARGUMENTS} hostname={_VM}",
                "--disk", f"{GUEST_IMAGES}/base.squashfs,readonly",
                "--disk", f"{GUEST_IMAGES}/layer.squashfs,readonly",
                "--console-log", f"/var/log/libvirt/qemu/{_VM}-console.log",
            )  # fmt: skip
            self._accelctl("attach", _FUNCTION, _VM, "--persistent")
        with self._progress.step("booting the VM"):
            began = time.monotonic()
            self._accelctl("vm", "start", _VM)
            guest = self._host.guest(_VM)
            guest.wait_ready(deadline_s=180)
            self._figures.booted_s = time.monotonic() - began
            return guest

    def _look(self, guest: Guest) -> None:
        with self._progress.step("looking at the function from inside"):
            shown = guest.run(["lspci", "-nn", "-v", "-d", "acce:"]).stdout.strip()
            self._figures.shown = shown

    def _compute(self, guest: Guest) -> None:
        figures = self._figures
        for name in ("mlp.npz", "digits.npz"):
            guest.push(self._digits / name, f"{_IN_GUEST}/{name}")
        with self._progress.step("classifying digits in the VM"):
            figures.found = self._accelguest(guest, "run", f"{_IN_GUEST}/mlp.npz")
        with self._progress.step("measuring commands in the VM"):
            measured = self._accelguest(guest, "bench", "latency", "--quick")["figures"]
            figures.found["bench"] = {figure["name"]: figure["value"] for figure in measured}
        with self._progress.step("training in the VM, and killing the function's worker once"):
            words = ["accelguest", "train", f"{_IN_GUEST}/digits.npz", "--epochs", str(_EPOCHS)]
            pid = guest.start([*words, "--json"])
            figures.worker = self._kill_worker()
        with self._progress.step(f"moving the VM to {self._other.name} while it trains"):
            moved = self._move()
        with self._progress.step("waiting for the training"):
            guest = guest.on(self._other)
            figures.trained = json.loads(guest.finish(pid, timeout=300).stdout)
        with self._progress.step("a checkpoint with one bit flipped, and the true one"):
            size, flipped = self._flip()
        with self._progress.step("moving it back, as one who may not"):
            forger, refused = self._forge()
        figures.moved = Moved(*moved, size, flipped, forger, refused)

    def _move(self) -> tuple[float, float, float]:
        """Plain virsh; (seconds, libvirt's downtime, how long the function stood still).
        Only when the training goes on there.
        """
        began = time.monotonic()
        uri = f"qemu+tcp://{self._other.address}/system"
        self._host.virsh("migrate", "--live", "--persistent", "--undefinesource", _VM, uri,
                         timeout=180)  # fmt: skip
        seconds = time.monotonic() - began
        told = self._other.virsh("domjobinfo", _VM, "--completed").stdout
        down = re.search(r"^Total downtime:\s+(\d+)", told, re.MULTILINE)
        before = self._launches(self._other)
        self._other.wait(
            lambda: self._launches(self._other) > before + 20,
            deadline_s=60, what="the training to go on",
        )  # fmt: skip
        still = self._when(self._other, "-> running (") - self._when(self._host, "-> freezing (")
        return seconds, float(down[1]) if down else 0.0, still * 1000

    def _when(self, host: LabHost, words: str) -> float:
        """When accelvisord last said so, in seconds; all hosts have this machine's clock."""
        argv = ["journalctl", "--unit=accelvisor", "--output=short-monotonic", "--no-pager"]
        lines = [line for line in host.run(argv).stdout.splitlines() if words in line]
        return float(lines[-1][1:].split("]")[0])

    def _flip(self) -> tuple[int, str]:
        """A checkpoint of the function goes to the first host, once with one bit flipped and once
        as it is, which must be taken; (its bytes, what is said of the first).
        """
        path = f"{_ON_HOST}.checkpoint"
        made = self._accelctl("checkpoint", "create", _FUNCTION, on=self._other)["checkpoint"]
        words = ["checkpoint", "export", made["name"], path, "--for", self._host.name]
        self._accelctl(*words, on=self._other)
        true = self._other.pull(path)
        forged = bytearray(true)
        forged[len(forged) // 2] ^= 1
        self._host.push(bytes(forged), path)
        said = self._host.run(["accelctl", "checkpoint", "import", path], check=False).stderr
        self._host.push(true, path)
        self._accelctl("checkpoint", "import", path)
        for host in (self._host, self._other):
            host.run(["rm", path])
        return len(true), said.partition("accelctl: ")[2].splitlines()[0] if said else ""

    def _forge(self) -> tuple[str, str]:
        """A host whose key was revoked sends the VM back; (who that is, what virsh is told)."""
        other = self._accelctl("trust", "show", on=self._other)["trust"]
        self._accelctl("trust", "revoke", other["key"])
        uri = f"qemu+tcp://{self._host.address}/system"
        said = self._other.virsh("migrate", "--live", _VM, uri, check=False, timeout=180)
        runs = self._other.guest(_VM).state == "running"
        words = said.stderr.partition("accelvisor: ")[2].strip()
        return f"{self._other.name}, whose key was revoked", words if runs else ""

    def _accelguest(self, guest: Guest, *words: str) -> dict[str, Any]:
        said = guest.run(["accelguest", *words, "--json"], timeout=300).stdout
        return dict(json.loads(said))

    def _kill_worker(self) -> dict[str, Any]:
        """SIGKILL the worker once the training has begun; what the holder says afterwards."""
        launches = self._launches(self._host)
        self._host.wait(
            lambda: self._launches(self._host) > launches + 20,
            deadline_s=120, what="the training to begin",
        )  # fmt: skip
        before = self._holder()
        self._host.run(["kill", "-KILL", str(before["worker_pid"])])
        after: dict[str, Any] = {}

        def replaced() -> bool:
            after.update(self._holder())
            return bool(after["worker_restarts"] > before["worker_restarts"] and after["ready"])

        self._host.wait(replaced, deadline_s=30, what="the next worker")
        return after

    def _launches(self, host: LabHost) -> int:
        told = self._accelctl("function", "statistics", self._figures.function["uuid"], on=host)
        return int(told["statistics"]["launches"])

    def _holder(self) -> dict[str, Any]:
        """What the function's holder says of itself, asked on its own socket."""
        path = str(Path(self._figures.function["socket"]).with_name("holder.sock"))
        said = self._host.run(["python3", "-c", _ASK, path]).stdout
        return dict(json.loads(said)["parameters"])

    def _refer(self) -> None:
        """The same programs on the host, without a device, by the installed package."""
        with self._progress.step("computing the reference on the host"):
            wanted = self._figures.wanted
            for name, words in (
                ("mlp.npz", ["run"]), ("digits.npz", ["train", "--epochs", str(_EPOCHS)]),
            ):  # fmt: skip
                self._host.push(self._digits / name, f"{_ON_HOST}/{name}")
                command, *options = words
                said = self._host.run(
                    ["python3", "-m", "accelvisor.embedded.reference", command,
                     f"{_ON_HOST}/{name}", *options],
                    timeout=300,
                ).stdout  # fmt: skip
                wanted[command] = json.loads(said)
            self._host.run(["rm", "-r", _ON_HOST])

    # --- report ----------------------------------------------------------------------------------

    def _report(self, got: Figures) -> bool:
        self._report_host(got)
        return all([self._report_outputs(got), self._report_training(got), self._report_move(got)])

    def _report_host(self, got: Figures) -> None:
        function = got.function
        about = self._accelctl("host", "show")["host"]
        card = self._accelctl("card", "list")["cards"][0]
        print(report.title("accelvisor: a VM computes on its own function, and moves with it"))
        _say(
            "host",
            f"{about['name']}: {about['cpus']} CPUs, Linux {about['kernel']}\n"
            f"{about['hypervisor']}, accelvisord {about['version']} ({about['supervisor']})",
        )
        memory = report.size(card["memory_bytes"])
        _say(
            "card",
            f"{card['name']}: {card['chips']} chips of {card['cores_per_chip']} cores, {memory}",
        )
        _say(
            "function",
            f"{function['uuid']}\n{function['profile']}: {function['cores']} core, "
            f"{report.size(function['memory_bytes'])}, {function['queues']} queues; "
            f"ready after {got.ready_ms:.0f} ms",
        )
        _say("VM", f"{_VM}: booted in {got.booted_s:.1f} s; it sees\n{got.shown}")

    def _report_outputs(self, got: Figures) -> bool:
        found, wanted = got.found, got.wanted
        raw = np.load(self._digits / "mlp.npz", allow_pickle=False)["x_test"]
        print(f"\n{report.shown(raw, found['classes'], found['labels'])}\n")
        _say(
            "accuracy",
            f"{found['accuracy']:.1%} of {found['samples']} digits by people whose hand "
            "the network has not seen",
        )
        same_outputs = bool(found["logits_sha256"] == wanted["run"]["logits_sha256"])
        digest = report.short(found["logits_sha256"])
        _say(
            "bits",
            report.verdict(same_outputs, f"outputs in the VM equal the host's reference, {digest}"),
        )
        command, register = found["bench"]["command round trip"], found["bench"]["register read"]
        _say(
            "latency",
            f"{command:.0f} µs a command, {register:.0f} µs a register read, which exits the VM; "
            f"one digit\n{found['latency_us']['p50'] / 1000:.1f} ms: copy in, launch, copy out "
            "(as a VM sees it whose CPU may be emulated)",
        )
        return same_outputs

    def _report_training(self, got: Figures) -> bool:
        trained, worker = got.trained, got.worker
        losses = trained["losses"]
        _say(
            "training",
            f"{trained['steps']} steps on the device in {trained['seconds']:.1f} s: loss "
            f"{losses[0]:.2f} {report.sparkline(losses[:: len(losses) // 12])} {losses[-1]:.2f}\n"
            f"accuracy {trained['accuracy']:.1%}",
        )
        _say(
            "killed",
            "the function's worker, with SIGKILL, while it trained; the next one went on "
            f"within\n{worker['last_restart_ms']:.0f} ms",
        )
        if got.moved is not None:
            _say(
                "moved",
                f"to {self._other.name} while it trained, by plain virsh migrate --live, "
                f"in {got.moved.seconds:.1f} s",
            )
            _say(
                "downtime",
                f"{got.moved.downtime_ms:.0f} ms of the VM as libvirt has it; the function stood "
                f"still for {got.moved.still_ms:.0f} ms",
            )
        same_weights = bool(
            trained["weights_sha256"] == got.wanted["train"]["weights_sha256"]
            and losses == got.wanted["train"]["losses"]
        )
        digest = report.short(trained["weights_sha256"])
        _say(
            "bits",
            report.verdict(
                same_weights, f"weights and losses equal the undisturbed reference, {digest}"
            ),
        )
        return same_weights

    def _report_move(self, got: Figures) -> bool:
        moved = got.moved
        if moved is None:
            return False
        said = re.sub(r" \([^()]*\)$", "", moved.refused) or "it was not refused"
        shown = textwrap.fill(f"{moved.forger}, is refused: {said}", 66)
        _say("forger", report.verdict(bool(moved.refused), shown))
        said = moved.flipped or "it was not refused"
        size = f"{moved.checkpoint_bytes / MIB:.1f} MiB"
        shown = textwrap.fill(f"a checkpoint of {size} with one bit flipped is refused: {said}", 66)
        _say("forgery", report.verdict(bool(moved.flipped), shown))
        return bool(moved.refused and moved.flipped)
