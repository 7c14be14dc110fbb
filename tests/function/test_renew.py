"""Between two owners everything of a function is made anew, and reads as empty."""

from __future__ import annotations

import numpy as np
import pytest

from accelvisor.abi.registers import Reg
from accelvisor.function.shape import Shape
from accelvisor.isolation.segments import Segment
from accelvisor.limits import MIB
from tests.function.harness import Guest, Process, call, running, wait_for

SECRET = np.frombuffer(b"the last tenant's secret" * 1000, np.uint8)


def renew(process: Process, epoch: int = 2, cores: int = 1, memory: int = 4 * MIB) -> None:
    shape = Shape(epoch, cores, (Segment(0, memory, 0, 0),)).to_dict()
    call(process.spec.holder_socket, "renew", shape)
    wait_for(lambda: process.holder("status")["ready"], "the new worker")


def leave(process: Process) -> int:
    """Use the function as a tenant does, and go. Returns the worker's pid."""
    with Guest(process) as guest:
        ring = guest.ring()
        ring.open("tenant")
        ring.tensor(SECRET)
        guest.window[-24:] = SECRET[:24].tobytes()
        guest.write32(Reg.SCRATCH, 0x5EC2E7)
    wait_for(lambda: not process.holder("status")["connected"], "the tenant to go")
    return int(process.holder("status")["worker_pid"])


def test_nothing_of_the_last_owner_is_left() -> None:
    with running() as process:
        before = leave(process)
        assert process.holder("status")["data"]["window"], "so there was something"
        renew(process)
        status = process.holder("status")
        assert status["data"] == {"memory": False, "track": False, "window": False}
        assert status["worker_pid"] != before, "its heap and caches are gone with it"
        assert status["connection"] == 0
        told = process.control("status")
        assert (told["epoch"], told["objects"], told["memory_used_bytes"]) == (2, 0, 0)
        assert not any(process.control("statistics").values())
        with Guest(process) as guest:
            assert guest.read32(Reg.SCRATCH) == 0
            assert guest.read32(Reg.EPOCH) == 2
            assert not bytes(guest.window).strip(b"\0")
            guest.ring().open("next")


def test_it_does_not_count_as_a_restart() -> None:
    with running() as process:
        for epoch in range(2, 40):
            renew(process, epoch)
        status = process.holder("status")
        assert (status["worker_restarts"], status["gave_up"]) == (0, "")


def test_another_size_may_come_with_it() -> None:
    with running() as process:
        renew(process, 5, 3, 9 * MIB)
        told = process.control("status")
        assert (told["cores"], told["memory_bytes"], told["epoch"]) == (3, 9 * MIB, 5)
        process.kill_worker()
        wait_for(lambda: process.holder("status")["ready"], "the next worker")
        wait_for(lambda: process.holder("status")["worker_pid"], "the next worker")
        assert process.control("status")["memory_bytes"] == 9 * MIB


def test_nothing_is_renewed_under_a_client() -> None:
    with running() as process, Guest(process) as guest:
        ring = guest.ring()
        ring.open()
        with pytest.raises(AssertionError, match="function-in-use"):
            renew(process)
        ring.tensor(SECRET)


def test_what_is_no_shape_changes_nothing() -> None:
    with running() as process:
        pid = process.holder("status")["worker_pid"]
        with pytest.raises(AssertionError, match="a shape is"):
            call(process.spec.holder_socket, "renew", {"epoch": 2})
        assert process.holder("status")["worker_pid"] == pid
