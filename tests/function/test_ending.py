"""Ending a process that may end by itself at the same moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from accelvisor.function.ending import end_of, kill


def child() -> int:
    """A process that sleeps until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(60)
    return pid


def reap(pid: int) -> None:
    """It is killed and reaped by somebody else."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_it_is_gone_afterwards() -> None:
    pid = child()
    end_of(pid)
    assert os.waitpid(pid, os.WNOHANG) == (pid, signal.SIGKILL)


def test_one_that_went_before_is_none() -> None:
    pid = child()
    reap(pid)
    end_of(pid)
    kill(pid)
    kill(0)


def test_one_that_goes_between_the_look_and_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[int], int] = os.pidfd_open

    def late(pid: int) -> int:
        process = real(pid)
        reap(pid)
        return process

    monkeypatch.setattr(os, "pidfd_open", late)
    before = len(os.listdir("/proc/self/fd"))
    end_of(child())
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_is_being_reaped_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reaping(_: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pidfd_open", reaping)
    end_of(os.getpid())


def test_no_descriptor_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", full)
    with pytest.raises(OSError, match="Too many"):
        end_of(os.getpid())
