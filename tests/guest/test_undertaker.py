"""A process that dies with commands in flight: nobody gets its pages or its queue too early."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelvisor.abi.registers import MAGIC, QUEUE_STRIDE, QueueControl, QueueReg, QueueStatus, Reg
from accelvisor.errors import ConflictError, SystemFailure, UsageError
from accelvisor.guest.claims import claim
from accelvisor.guest.sysfs import SysfsTransport
from accelvisor.guest.undertaker import Undertaker, stop
from tests.descriptors import descriptors

from .pci_tree import add_device

BDF = "0000:00:05.0"
QUEUE = 1
BLOCK = Reg.QUEUE + QUEUE_STRIDE * QUEUE
WORDS = {
    "magic": MAGIC,
    "control": BLOCK + QueueReg.CONTROL,
    "disable": int(QueueControl.DISABLE),
    "status": BLOCK + QueueReg.STATUS,
    "disabled": int(QueueStatus.DISABLED),
}
OWNER = """
import os, sys, time
from pathlib import Path
from accelvisor.guest.claims import claim
from accelvisor.guest.sysfs import SysfsTransport
root, locks, leave_a_child = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "child"
transport = SysfsTransport("0000:00:05.0", root=root)
held = claim("dev", 2, 1, directory=locks)
transport.claimed(held.queue, held.fd)
transport._guard()
if leave_a_child and os.fork() == 0:
    os.close(1)
    held.release()
    time.sleep(60)
print(transport._pins.fd, flush=True)
time.sleep(60)
"""


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Bar:
    """BAR0 as a file: the device's side of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "devices"
        self.path = add_device(self.root) / "resource0"
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("I")
        self.write(Reg.MAGIC, MAGIC)
        self.write(WORDS["status"], QueueStatus.ENABLED)
        self.write(WORDS["control"], 0)

    def read(self, offset: int) -> int:
        return self._words[offset >> 2]

    def write(self, offset: int, value: int) -> None:
        self._words[offset >> 2] = value

    def close(self) -> None:
        self._words.release()
        self._map.close()


@pytest.fixture
def bar(tmp_path: Path) -> Iterator[Bar]:
    bar = Bar(tmp_path)
    yield bar
    bar.close()


def free(locks: Path) -> bool:
    try:
        claim("dev", 2, QUEUE, directory=locks).release()
    except ConflictError:
        return False
    return True


@pytest.mark.parametrize("children", ["none", "child"])
def test_a_killed_process_keeps_queue_and_pages_until_the_device_has_stopped(
    bar: Bar, tmp_path: Path, children: str
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(bar.root), str(tmp_path), children],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        assert bar.read(WORDS["control"]) == 0
        owner.kill()
        owner.wait(20)
        owner.stdout.close()
        eventually(lambda: bar.read(WORDS["control"]) == QueueControl.DISABLE)
        assert not free(tmp_path)
        bar.write(Reg.MAGIC, 0xFFFFFFFF)  # the VM moves at this very moment
        bar.write(WORDS["status"], QueueStatus.DISABLED)
        bar.write(WORDS["control"], 0)
        # Two rounds later it has certainly looked at the absent device.
        eventually(lambda: bar.read(WORDS["control"]) == QueueControl.DISABLE)
        bar.write(WORDS["control"], 0)
        eventually(lambda: bar.read(WORDS["control"]) == QueueControl.DISABLE)
        assert not free(tmp_path)
        bar.write(Reg.MAGIC, MAGIC)
        eventually(lambda: free(tmp_path))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)


@pytest.fixture
def guarded(bar: Bar, tmp_path: Path) -> Iterator[tuple[Undertaker, int]]:
    """An undertaker of ours, and the end of a pipe whose other end it holds as the pins."""
    read, write = os.pipe()
    held = claim("dev", 2, QUEUE, directory=tmp_path)
    undertaker = Undertaker(write, held.fd, bar.path, **WORDS)
    os.close(write)
    held.release()
    yield undertaker, read
    bar.write(Reg.MAGIC, MAGIC)
    bar.write(WORDS["status"], QueueStatus.DISABLED)
    undertaker.dismiss(20)
    os.close(read)


def test_closing_waits_until_the_device_has_stopped(
    bar: Bar, tmp_path: Path, guarded: tuple[Undertaker, int]
) -> None:
    undertaker, pins = guarded
    assert undertaker.alive
    bar.write(WORDS["status"], QueueStatus.DISABLED)
    assert undertaker.dismiss(20)
    assert free(tmp_path)
    assert os.read(pins, 1) == b""  # nobody holds the other end any more
    assert not undertaker.alive


def test_a_device_that_does_not_stop_is_left_to_the_undertaker(
    bar: Bar, tmp_path: Path, guarded: tuple[Undertaker, int]
) -> None:
    undertaker, pins = guarded
    os.set_blocking(pins, False)
    assert not undertaker.dismiss(0.1)
    assert not free(tmp_path)
    with pytest.raises(BlockingIOError):
        os.read(pins, 1)
    bar.write(WORDS["status"], QueueStatus.DISABLED)
    eventually(lambda: free(tmp_path))
    eventually(lambda: os.waitpid(undertaker._pid, os.WNOHANG)[0] == undertaker._pid)


def test_polite_signals_do_not_end_it(guarded: tuple[Undertaker, int]) -> None:
    undertaker, _ = guarded
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(undertaker._pid, number)
    assert undertaker.alive
    assert os.getsid(undertaker._pid) == undertaker._pid  # nor those for our group


def test_it_holds_nothing_else_of_ours(guarded: tuple[Undertaker, int]) -> None:
    undertaker, _ = guarded
    folder = Path(f"/proc/{undertaker._pid}/fd")
    links = {fd.name: os.readlink(fd) for fd in folder.iterdir()}
    assert set(links) - {"0", "1", "2", "3", "4", "5", "6"} <= {"7", "8"}  # its map, its watch
    assert {links[n] for n in ("0", "1", "2")} == {"/dev/null"}


def test_an_unplugged_device_ends_it() -> None:
    slept: list[float] = []
    words = [0xFFFFFFFF] * 2048
    stop(words, lambda: len(slept) < 5, slept.append, **WORDS)
    assert len(slept) == 5


def test_an_absent_device_is_not_taken_for_a_stopped_one() -> None:
    words = [0] * 2048  # reads as zeros, which DISABLED is as well
    assert WORDS["disabled"] == 0

    def come_back(_: float) -> None:
        words[0] = MAGIC

    stop(words, lambda: True, come_back, **WORDS)
    assert words[0] == MAGIC
    assert words[WORDS["control"] >> 2] == WORDS["disable"]


def test_dma_memory_wants_a_claimed_queue(bar: Bar) -> None:
    transport = SysfsTransport(BDF, root=bar.root)
    with pytest.raises(UsageError) as caught:
        transport.allocate_dma(4096)
    assert caught.value.code == "dma-unclaimed"
    transport.close()


def test_without_an_undertaker_there_is_no_dma(
    bar: Bar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    transport = SysfsTransport(BDF, root=bar.root)
    held = claim("dev", 2, QUEUE, directory=tmp_path)
    transport.claimed(held.queue, held.fd)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemFailure) as caught:
        transport.allocate_dma(4096)
    assert caught.value.code == "dma-unguarded"
    transport.close()
    held.release()
    assert descriptors() == before


def test_a_dead_undertaker_is_replaced_before_more_memory_is_given(
    bar: Bar, tmp_path: Path
) -> None:
    transport = SysfsTransport(BDF, root=bar.root)
    held = claim("dev", 2, QUEUE, directory=tmp_path)
    transport.claimed(held.queue, held.fd)
    transport._guard()
    first = transport._undertaker
    assert first is not None
    os.kill(first._pid, signal.SIGKILL)
    os.waitpid(first._pid, 0)
    transport._guard()
    second = transport._undertaker
    assert second is not None
    assert second.alive
    assert second is not first
    bar.write(WORDS["status"], QueueStatus.DISABLED)
    transport.close()
    held.release()
    assert free(tmp_path)
