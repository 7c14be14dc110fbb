"""Many functions that come, compute, change and go: nothing grows, and nothing is left.

Sixty-four of them for ten minutes by night; by day a few, twice more than it takes to settle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from accelvisor.embedded.host import EmbeddedHost
from accelvisor.limits import MIB
from tests.amount import by_night

from .moving import RAM, wait_for

COUNT = by_night(64, 4)
SECONDS = by_night(600.0, 0.0)
#: Rounds until caches, threads and the store's files have their size.
SETTLE = 2
CARD = """
[libvirt]
uri = ""
[cards.card0]
chips = 16
cores_per_chip = 8
memory = "4GiB"
[profiles.tiny]
memory = "4MiB"
window = "1MiB"
queues = 2
ring_entries = 16
"""


@pytest.fixture(scope="module")
def host() -> Iterator[EmbeddedHost]:
    with EmbeddedHost(CARD) as made:
        yield made


def life(host: EmbeddedHost, number: int) -> None:
    """One function's: created, used, resized, used again, ended."""
    made = host.create("tiny")
    x = np.full((64, 64), number, np.float32)
    with host.open(made, ram_bytes=RAM) as fn:
        a = fn.tensor(x)
        assert np.array_equal(fn.ops.add(a, a).numpy(), x + x)
        with host.admin() as admin:
            size = {"cores": 1 + number % 3, "memory_bytes": (2 + number % 5) * MIB}
            admin.call("ResizeFunction", {"function": made["uuid"], **size})
        assert np.array_equal(fn.ops.matmul(a, a).numpy(), x @ x)
    wait_for(lambda: _deleted(host, made["uuid"]), "the end of the function")


def _deleted(host: EmbeddedHost, uuid: str) -> bool:
    from accelvisor.errors import ConflictError

    try:
        host.delete(uuid)
    except ConflictError:
        return False  # its client is just going
    return True


def held(host: EmbeddedHost) -> dict[str, int]:
    """What the host's daemon, the machine and the directories hold."""
    pid = host.daemon_pid
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    return {
        "private_kib": private,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        # Of this host's: others on this machine, a laboratory for one, mount and unmount too.
        "mounts": Path(f"/proc/{pid}/mounts").read_text().count(str(host.directory)),
        "processes": _processes(str(host.run)),
        "files": sum(len(files) for _, _, files in os.walk(host.run)),
    }


def _processes(marker: str) -> int:
    found = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        found += marker in command and "accelvisor.function" in command
    return found


@pytest.mark.timeout(1200)
def test_functions_that_come_and_go_leave_nothing_and_nothing_grows(host: EmbeddedHost) -> None:
    seen: list[dict[str, int]] = []
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(4) as pool:
        while len(seen) < SETTLE + 2 or time.monotonic() < end:
            list(pool.map(lambda number: life(host, number), range(COUNT)))
            wait_for(lambda: not _processes(str(host.run)), "the end of all processes")
            seen.append(held(host))
    first, last = seen[SETTLE - 1], seen[-1]
    print(f"{len(seen)} rounds of {COUNT}: {first} {last}")
    for name in ("descriptors", "mounts", "processes", "files"):
        assert last[name] <= first[name], name
    # Threads of the daemon's pool come as they are needed, up to a bound of their own.
    assert last["private_kib"] <= first["private_kib"] * 1.1 + 2048
    with host.admin() as admin:
        card = admin.call("GetCard", {"card": "card0"})["card"]
    assert (card["cores_free"], card["memory_free"]) == (card["cores"], card["memory_bytes"])
