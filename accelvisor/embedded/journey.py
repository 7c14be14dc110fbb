"""The demonstration's second half: a program that runs moves between two daemons on this machine.

A VM trains a network on its function, and is moved in the middle of it; what comes on the way is
forged once. The same bits come out as from a VM that never moved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelvisor.embedded import reference, report
from accelvisor.embedded.host import EmbeddedHost, free_port, join
from accelvisor.embedded.vm import EmbeddedVm, Moved
from accelvisor.errors import AccelvisorError, SystemFailure
from accelvisor.guest import models
from accelvisor.guest.function import Function
from accelvisor.guest.waiting import WaitPolicy

Say = Callable[[str, str], None]
TRAINING: dict[str, Any] = {
    "hidden": (64,), "epochs": 100, "batch": 32, "rate": 0.15, "seed": 1,
}  # fmt: skip
_MOVES = 4
_PATIENCE_S = 30.0
#: Where a token has the last function's seal (SHA-256), before its version at the end.
_SEAL = -16


class _Cpu:
    """The VM's processor as the guest's program uses it: it is let go of wherever the program
    waits, so that the VM can be stopped in the middle of whatever its function does.
    """

    def __init__(self, vm: EmbeddedVm) -> None:
        self._transport = vm.transport()
        self._lock = vm.cpu
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def nap(self, seconds: float) -> None:
        self.waits += 1
        self._lock.release()
        try:
            time.sleep(seconds)
        finally:
            self._lock.acquire()

    def wait_interrupt(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self._transport.wait_interrupt(0):
            if time.monotonic() > end:
                return False
            self.nap(0.0005)
        return True


class _Training(threading.Thread):
    """The guest's program."""

    def __init__(self, vm: EmbeddedVm, path: Path) -> None:
        super().__init__(name="guest")
        self._vm = vm
        self._train, self._test = models.load_data(path)
        self.cpu = _Cpu(vm)
        self.found: dict[str, Any] = {}
        self.error: AccelvisorError | None = None

    def run(self) -> None:
        try:
            with self._vm.cpu:
                policy = WaitPolicy(spin_s=0.0)
                function = Function(self.cpu, policy=policy, sleep=self.cpu.nap)
                self.found = models.train_model(function, self._train, self._test, **TRAINING)
        except AccelvisorError as error:
            self.error = error

    def go_on(self, waits: int) -> None:
        """Until the program has waited for its function so many times more, or has ended."""
        wanted, end = self.cpu.waits + waits, time.monotonic() + _PATIENCE_S
        while self.is_alive() and self.cpu.waits < wanted and time.monotonic() < end:
            time.sleep(0.001)


def show(say: Say, path: Path) -> bool:
    """Whether everything held."""
    print(report.title("two daemons: a program that runs is moved"))
    with _two_hosts() as (here, there):
        function = here.create("small", "digits")
        say("hosts", "a and b; one command on each made them trust each other")
        vm = EmbeddedVm(here, [function["uuid"]], name="traveller")
        guest = _Training(vm, path)
        guest.start()
        try:
            guest.go_on(100)
            refused = _forge(say, vm, there)
            moves = _travel(vm, guest, (there, here))
        finally:
            guest.join(_PATIENCE_S)
            vm.close()
    if guest.error is not None:
        raise guest.error
    return _report(say, guest, path, moves) and refused


@contextmanager
def _two_hosts() -> Iterator[tuple[EmbeddedHost, EmbeddedHost]]:
    with _host("a") as here, _host("b") as there:
        join(here, there)
        yield here, there


def _host(name: str) -> EmbeddedHost:
    return EmbeddedHost(
        f'[libvirt]\nuri = ""\n[host]\nname = "{name}"\n', listen=f"127.0.0.1:{free_port()}"
    )


def _forge(say: Say, vm: EmbeddedVm, there: EmbeddedHost) -> bool:
    """What the VM's own stream says of the function is changed on the way: one bit of its seal."""
    save = vm.machine.save

    def changed() -> bytes:
        token = bytearray(save())
        token[_SEAL] ^= 1
        return bytes(token)

    vm.machine.save = changed  # type: ignore[method-assign]
    try:
        vm.migrate(there)
    except AccelvisorError as error:
        if error.code != "vm-rolled-back":
            raise  # it did not come as far as the forgery
        reason = error.message.removeprefix("Load: ")
        say("forgery", report.verdict(True, f"one bit of the seal changed on the way: refused,\n"
                                            f"{reason}\nthe VM computes on where it was"))
        return True
    finally:
        del vm.machine.save
    say("forgery", report.verdict(False, "a changed seal was taken"))
    return False


def _travel(
    vm: EmbeddedVm, guest: _Training, hosts: tuple[EmbeddedHost, EmbeddedHost]
) -> list[Moved]:
    """Forth and back while the program runs; the moves at whose stop it still did."""
    moves = []
    for number in range(_MOVES):
        running: list[bool] = []
        moved = vm.migrate(
            hosts[number % 2],
            before_stop=lambda: guest.go_on(20),
            at_stop=lambda running=running: running.append(guest.is_alive()),  # type: ignore[misc]
        )
        if not running[0]:
            break
        moves.append(moved)
    return moves


def _report(say: Say, guest: _Training, path: Path, moves: list[Moved]) -> bool:
    if not moves:
        raise SystemFailure("the program had ended before it was moved", where="embedded")
    times = ", ".join(f"{moved.downtime_s * 1000:.0f}" for moved in moves)
    say("moved", f"{len(moves)} times in the middle of the training; the guest stood still for\n"
                 f"{times} ms")
    found = guest.found
    wanted = reference.train_figures(path, **TRAINING)
    same = (
        found["weights_sha256"] == wanted["weights_sha256"] and found["losses"] == wanted["losses"]
    )
    losses = found["losses"]
    say("training", f"{found['steps']} steps: loss {losses[0]:.2f} "
                    f"{report.sparkline(losses[::5])} {losses[-1]:.2f}, "
                    f"accuracy {found['accuracy']:.1%}")
    digest = report.short(found["weights_sha256"])
    say("bits", report.verdict(same, f"equal to a training that never moved, {digest}"))
    return bool(same)
