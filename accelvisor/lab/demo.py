"""The demonstration: a VM computes on its own accelerator function, on a host built for it.

Everything is done as a user would: the Debian package is installed on the host, ``accelctl``
creates the function and the VM, and the programs in the VM are ``lspci`` and ``accelguest``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
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

_FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "digits"
_VM = "digits"
_FUNCTION = "digits"
_EPOCHS = 5
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
        with Laboratory(1, persistent=options.keep, progress=progress) as lab:
            held = Demonstration(lab.hosts[0], options.digits, progress).run()
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


class Demonstration:
    """One run on one host. Figures are collected first and reported together at the end."""

    def __init__(self, host: LabHost, digits: Path, progress: Progress) -> None:
        self._host = host
        self._digits = digits
        self._progress = progress

    def run(self) -> bool:
        """True when every promise held."""
        self._clear()
        function, ready_ms = self._create()
        guest, booted_s = self._boot()
        try:
            shown = self._look(guest)
            found, trained, worker = self._compute(guest, function)
            wanted = self._refer()
        finally:
            self._clear()
        return self._report(
            function, ready_ms, booted_s, shown, found, trained, worker, wanted
        )  # fmt: skip

    # --- steps -----------------------------------------------------------------------------------

    def _accelctl(self, *words: str, timeout: float = 60.0) -> Any:
        """One accelctl command's JSON."""
        said = self._host.run(["accelctl", *words, "--json"], timeout=timeout).stdout
        return json.loads(said) if said.strip() else {}

    def _clear(self) -> None:
        """What an earlier run may have left on a host that was kept."""
        for words in (
            ("vm", "destroy", _VM), ("vm", "undefine", _VM), ("function", "delete", _FUNCTION)
        ):  # fmt: skip
            self._host.run(["accelctl", *words], check=False)

    def _create(self) -> tuple[dict[str, Any], float]:
        with self._progress.step("creating a function"):
            began = time.monotonic()
            made = self._accelctl("function", "create", "small", "--name", _FUNCTION)
            took = (time.monotonic() - began) * 1000
        return dict(made["function"]), took

    def _boot(self) -> tuple[Guest, float]:
        with self._progress.step("defining a VM and giving it the function"):
            self._accelctl(
                "vm", "define", _VM,
                "--memory", "384MiB",
                "--kernel", f"{GUEST_IMAGES}/vmlinuz",
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
            return guest, time.monotonic() - began

    def _look(self, guest: Guest) -> str:
        with self._progress.step("looking at the function from inside"):
            return guest.run(["lspci", "-nn", "-v", "-d", "acce:"]).stdout.strip()

    def _compute(
        self, guest: Guest, function: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        for name in ("mlp.npz", "digits.npz"):
            guest.push(self._digits / name, f"{_IN_GUEST}/{name}")
        with self._progress.step("classifying digits in the VM"):
            found = self._accelguest(guest, "run", f"{_IN_GUEST}/mlp.npz")
        with self._progress.step("measuring commands in the VM"):
            figures = self._accelguest(guest, "bench", "latency", "--quick")["figures"]
            found["bench"] = {figure["name"]: figure["value"] for figure in figures}
        with self._progress.step("training in the VM, and killing the function's worker once"):
            words = ["accelguest", "train", f"{_IN_GUEST}/digits.npz", "--epochs", str(_EPOCHS)]
            pid = guest.start([*words, "--json"])
            worker = self._kill_worker(function)
            trained = json.loads(guest.finish(pid, timeout=300).stdout)
        return found, trained, worker

    def _accelguest(self, guest: Guest, *words: str) -> dict[str, Any]:
        said = guest.run(["accelguest", *words, "--json"], timeout=300).stdout
        return dict(json.loads(said))

    def _kill_worker(self, function: dict[str, Any]) -> dict[str, Any]:
        """SIGKILL the worker once the training has begun; what the holder says afterwards."""
        launches = self._launches(function)
        self._host.wait(
            lambda: self._launches(function) > launches + 20,
            deadline_s=120, what="the training to begin",
        )  # fmt: skip
        before = self._holder(function)
        self._host.run(["kill", "-KILL", str(before["worker_pid"])])
        after: dict[str, Any] = {}

        def replaced() -> bool:
            after.update(self._holder(function))
            return bool(after["worker_restarts"] > before["worker_restarts"] and after["ready"])

        self._host.wait(replaced, deadline_s=30, what="the next worker")
        return after

    def _launches(self, function: dict[str, Any]) -> int:
        told = self._accelctl("function", "statistics", function["uuid"])
        return int(told["statistics"]["launches"])

    def _holder(self, function: dict[str, Any]) -> dict[str, Any]:
        """What the function's holder says of itself, asked on its own socket."""
        path = str(Path(function["socket"]).with_name("holder.sock"))
        said = self._host.run(["python3", "-c", _ASK, path]).stdout
        return dict(json.loads(said)["parameters"])

    def _refer(self) -> dict[str, Any]:
        """The same programs on the host, without a device, by the installed package."""
        with self._progress.step("computing the reference on the host"):
            wanted = {}
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
        return wanted

    # --- report ----------------------------------------------------------------------------------

    def _report(
        self,
        function: dict[str, Any],
        ready_ms: float,
        booted_s: float,
        shown: str,
        found: dict[str, Any],
        trained: dict[str, Any],
        worker: dict[str, Any],
        wanted: dict[str, Any],
    ) -> bool:
        about = self._accelctl("host", "show")["host"]
        card = self._accelctl("card", "list")["cards"][0]
        print(report.title("accelvisor: a VM computes on its own accelerator function"))
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
            f"ready after {ready_ms:.0f} ms",
        )
        _say("VM", f"{_VM}: booted in {booted_s:.1f} s; it sees\n{shown}")
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
        losses = trained["losses"]
        _say(
            "training",
            f"{trained['steps']} steps on the device in {trained['seconds']:.1f} s: loss "
            f"{losses[0]:.2f} {report.sparkline(losses)} {losses[-1]:.2f}, "
            f"accuracy {trained['accuracy']:.1%}",
        )
        _say(
            "killed",
            "the function's worker, with SIGKILL, while it trained; the next one went on "
            f"within\n{worker['last_restart_ms']:.0f} ms",
        )
        same_weights = bool(
            trained["weights_sha256"] == wanted["train"]["weights_sha256"]
            and losses == wanted["train"]["losses"]
        )
        digest = report.short(trained["weights_sha256"])
        _say(
            "bits",
            report.verdict(
                same_weights, f"weights and losses equal the undisturbed reference, {digest}"
            ),
        )
        return same_outputs and same_weights
