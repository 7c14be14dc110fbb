"""``python -m accelvisor.embedded``: the demonstration without root, QEMU or systemd."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelvisor.daemon import function_link
from accelvisor.embedded import EmbeddedHost, journey, reference, report
from accelvisor.errors import AccelvisorError
from accelvisor.guest import bench, models
from accelvisor.guest.function import Function

_FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "digits"
TRAINING: dict[str, Any] = {
    "hidden": (64,), "epochs": 8, "batch": 32, "rate": 0.15, "seed": 0,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 everything held, 1 something did not."""
    parser = argparse.ArgumentParser(prog="python -m accelvisor.embedded", description=__doc__)
    parser.add_argument(
        "--digits", type=Path, default=_FIXTURES, metavar="DIR", help="digits.npz and mlp.npz"
    )
    options = parser.parse_args(argv)
    began = time.monotonic()
    print(report.title("accelvisor, embedded: one function, no VM, no root"))
    try:
        with EmbeddedHost() as host:
            held = _demonstrate(host, options.digits)
    except AccelvisorError as error:
        print(f"demo: {error.message} [{error.code}]", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    print(report.line("done", f"in {time.monotonic() - began:.1f} s; nothing is left behind"))
    return 0 if held else 1


def _say(label: str, text: str) -> None:
    print(report.line(label, text), flush=True)


def _demonstrate(host: EmbeddedHost, directory: Path) -> bool:
    with host.admin() as admin:
        about = admin.call("GetHost")["host"]
        card = admin.call("ListCards")["cards"][0]
    _say(
        "host",
        f"{about['name']}: {about['cpus']} CPUs, accelvisord {about['version']} "
        f"(pid {host.daemon_pid}, uid {os.getuid()})",
    )
    memory = report.size(card["memory_bytes"])
    _say(
        "card", f"{card['name']}: {card['chips']} chips of {card['cores_per_chip']} cores, {memory}"
    )
    started = time.monotonic()
    function = host.create("small", "digits")
    took = time.monotonic() - started
    _say(
        "function",
        f"{function['uuid']}\n{function['profile']}: {function['cores']} core, "
        f"{report.size(function['memory_bytes'])}, {function['queues']} queues; "
        f"ready after {took * 1000:.0f} ms",
    )
    with host.open(function) as fn:
        classified = _classify(fn, directory / "mlp.npz")
        trained = _train(fn, function, directory / "digits.npz")
    moved = journey.show(_say, directory / "digits.npz")
    return classified and trained and moved


def _classify(fn: Function, path: Path) -> bool:
    model = models.load_model(path)
    found = models.run_model(fn, model)
    wanted = reference.run_figures(path)
    print(f"\n{report.shown(model.test.raw, found['classes'], found['labels'])}\n")
    _say(
        "accuracy",
        f"{found['accuracy']:.1%} of {found['samples']} digits by people whose hand "
        "the network has not seen",
    )
    same = bool(found["logits_sha256"] == wanted["logits_sha256"])
    digest = report.short(found["logits_sha256"])
    _say(
        "bits",
        report.verdict(same, f"the device's outputs equal the host's reference, {digest}"),
    )
    register, command = (figure.value for figure in bench.run(fn, ["latency"], quick=True))
    _say(
        "latency",
        f"{command:.0f} µs a command (a register read, which would exit the VM: {register:.0f} µs);"
        f"\n{found['latency_us']['p50']:.0f} µs for one digit: copy in, launch, copy out",
    )
    return same and bool(wanted["same_classes_as_plain_twin"])


def _train(fn: Function, function: dict[str, Any], path: Path) -> bool:
    train, test = models.load_data(path)
    with _killing(function) as killed:
        found = models.train_model(fn, train, test, **TRAINING)
    wanted = reference.train_figures(path, **TRAINING)
    losses = found["losses"]
    same = found["weights_sha256"] == wanted["weights_sha256"] and losses == wanted["losses"]
    _say(
        "training",
        f"{found['steps']} steps on the device in {found['seconds']:.1f} s: loss "
        f"{losses[0]:.2f} {report.sparkline(losses)} {losses[-1]:.2f}, "
        f"accuracy {found['accuracy']:.1%}",
    )
    times = "once" if len(killed) == 1 else f"{len(killed)} times"
    _say("killed", f"the function's worker, {times} with SIGKILL{_pause(killed)}")
    digest = report.short(found["weights_sha256"])
    _say(
        "bits",
        report.verdict(same, f"weights and losses equal the undisturbed reference, {digest}"),
    )
    return same and bool(killed)


def _pause(killed: list[float]) -> str:
    known = [k for k in killed if k]
    return f"; the next one went on within {max(known):.0f} ms" if known else ""


@contextmanager
def _killing(
    function: dict[str, Any], every_s: float = 0.08, most: int = 5
) -> Iterator[list[float]]:
    """Kill the function's worker now and then; collects the pauses in ms (0 while unknown)."""
    holder = Path(function["socket"]).with_name("holder.sock")
    stop = threading.Event()
    pauses: list[float] = []

    def kill() -> None:
        while not stop.wait(every_s) and len(pauses) < most:
            try:
                asyncio.run(function_link.call(holder, "kill-worker"))
            except AccelvisorError:
                continue  # the next one is not there yet
            pauses.append(0.0)
            stop.wait(every_s)
            told = asyncio.run(function_link.call(holder, "status"))
            pauses[-1] = float(told["last_restart_ms"])

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield pauses
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
