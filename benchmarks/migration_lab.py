"""What a function adds to a live migration, in the laboratory: plain ``virsh migrate --live`` of a
VM with a busy function of 256 MiB against the same VM without one.

All of the function's memory is in use, and its guest writes 5 % of it over and over. QEMU stops the
VM as soon as it expects to need less than its own limit of 300 ms, so the downtime of either VM is
sometimes short and sometimes near that limit: what the function adds is taken between downtimes of
the same rank, the shortest with the shortest and so on.

The guest's clock stands still with the VM, so the longest wait for a completion that it sees is
what a blackout adds to the downtime. A guest without a function, which only adds in its own memory,
sees one too (under TCG its code is translated anew). Only on demand: it boots two hosts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from accelvisor.lab import Guest, LabHost, Laboratory
from benchmarks.record import Goal, Record, Sample

GROUP = "migration-lab"
PORT = 16519
ADDED_MS, BLACKOUT_MS = 150, 100
_MOVES = 10
# In the guest. Each pass writes 5 % of 256 MiB.
_BUSY = """
import json, os, sys, time
import numpy as np
from accelvisor.guest.function import Function
MIB = 1 << 18
fn = Function.open()
first = fn.tensor(np.random.default_rng(0).standard_normal(MIB, np.float32))
every = [first + first]
while True:
    try:
        every.append(every[-1] + first)
    except Exception:
        break
spare = every.pop()
spare.close()
written = every[:13]
programs = []
p = fn.program("busy")
a, b = p.input((MIB,), "float32"), p.input((MIB,), "float32")
p.output(p.call("add", a, b))
p.build()
runs = [p.bind(every[20], every[21 + i], out=t) for i, t in enumerate(written)]
said = {"mib": len(every), "passes": 0, "gap_ms": 0.0}
last = time.monotonic()
while True:
    for run in runs:
        run.launch().result()
        now = time.monotonic()
        said["gap_ms"] = max(said["gap_ms"], (now - last) * 1000)
        last = now
    said["passes"] += 1
    if os.path.exists("/root/again"):
        os.unlink("/root/again")
        said["gap_ms"] = 0.0
    with open("/root/new", "w") as file:
        json.dump(said, file)
    os.rename("/root/new", "/root/busy.json")
    last = time.monotonic()
"""
# The same without a function: memory is written, and the processor is busy.
_IDLE = """
import json, os, time
import numpy as np
a = np.ones(1 << 18, np.float32)
said = {"passes": 0, "gap_ms": 0.0}
last = time.monotonic()
while True:
    for _ in range(13):
        a += 1
        now = time.monotonic()
        said["gap_ms"] = max(said["gap_ms"], (now - last) * 1000)
        last = now
    said["passes"] += 1
    if os.path.exists("/root/again"):
        os.unlink("/root/again")
        said["gap_ms"] = 0.0
    with open("/root/new", "w") as file:
        json.dump(said, file)
    os.rename("/root/new", "/root/busy.json")
    last = time.monotonic()
"""


def run(quick: bool) -> Iterable[Record]:
    """Records of the group; prints each move."""
    moves = 3 if quick else _MOVES
    with _laboratory() as hosts:
        plain, seen = _measure(hosts, "bare", "", moves)
        busy, gaps = _measure(hosts, "busy", "medium", moves)
    ranks = zip(sorted(busy.values), sorted(plain.values), strict=True)
    added = Sample(tuple(with_it - without for with_it, without in ranks))
    yield _record("downtime without a function", plain)
    yield _record("downtime with a busy function", busy)
    yield _record("added downtime, rank by rank: median", added, Goal(at_most=ADDED_MS))
    yield _record("added downtime, rank by rank: max", _max(added), Goal(at_most=ADDED_MS))
    yield _record("blackout over downtime, median", gaps, Goal(at_most=BLACKOUT_MS))
    yield _record("blackout over downtime, max", _max(gaps), Goal(at_most=BLACKOUT_MS))
    yield _record("the same without a function, median", seen)
    yield _record("the same without a function, max", _max(seen))


def _max(sample: Sample) -> Sample:
    return Sample((max(sample.values),))


def _record(name: str, sample: Sample, goal: Goal | None = None) -> Record:
    return Record(GROUP, name, sample.median, "ms", 1, sample.spread, goal=goal)


@contextmanager
def _laboratory() -> Iterator[tuple[LabHost, LabHost]]:
    """Two hosts that trust each other: those of ACCELVISOR_LAB_NAME if it runs, else new ones."""
    lab = Laboratory.attach() if os.environ.get("ACCELVISOR_LAB_NAME") else Laboratory(2)
    with lab:
        lab.add_hosts(2)
        one, other = lab.hosts[:2]
        known = json.loads(one.run(["accelctl", "trust", "show", "--json"]).stdout)
        if not any(h["address"].startswith(other.address) for h in known["trust"]["hosts"]):
            words = ["accelctl", "trust", "invite", "--address", f"{one.address}:{PORT}", "--json"]
            code = json.loads(one.run(words).stdout)["code"]
            other.run(["accelctl", "trust", "join", code])
        yield one, other


def _measure(
    hosts: tuple[LabHost, LabHost], name: str, profile: str, moves: int
) -> tuple[Sample, Sample]:
    """(downtimes, what the guest saw beyond them) of so many moves, in milliseconds."""
    from accelvisor.lab.container import GUEST_IMAGES
    from accelvisor.lab.domain import KERNEL_ARGUMENTS

    here, there = hosts
    try:
        here.run([
            "accelctl", "vm", "define", name, "--memory", "384MiB",
            "--kernel", f"{GUEST_IMAGES}/vmlinuz", "--initrd", f"{GUEST_IMAGES}/initrd.img",
            "--cmdline", f"{KERNEL_ARGUMENTS} hostname={name}",
            "--disk", f"{GUEST_IMAGES}/base.squashfs,readonly",
            "--disk", f"{GUEST_IMAGES}/layer.squashfs,readonly",
        ])  # fmt: skip
        if profile:
            here.run(["accelctl", "function", "create", profile, "--name", name])
            here.run(["accelctl", "attach", name, name, "--persistent"])
        here.run(["accelctl", "vm", "start", name])
        guest = here.guest(name)
        guest.wait_ready(deadline_s=180)
        guest.push((_BUSY if profile else _IDLE).encode(), "/root/busy.py")
        guest.start(["sh", "-c", "python3 /root/busy.py > /root/log 2>&1"])
        _passes(guest, 3)
        down, gaps = [], []
        for _ in range(moves):
            guest.run(["touch", "/root/again"])
            _passes(guest, 3)
            uri = f"qemu+tcp://{there.address}/system"
            here.virsh("migrate", "--live", "--persistent", "--undefinesource", name, uri,
                       timeout=300)  # fmt: skip
            here, there = there, here
            guest = guest.on(here)
            down.append(_downtime(here, name))
            gaps.append(float(_passes(guest, 2)["gap_ms"]))
            print(f"{name}: downtime {down[-1]:.0f} ms, and {gaps[-1]:.0f} ms more", flush=True)
        return Sample(tuple(down)), Sample(tuple(gaps))
    finally:
        for host in hosts:
            host.virsh("destroy", name, check=False)
            host.virsh("undefine", name, check=False)
            host.run(["accelctl", "function", "delete", name, "--force"], check=False)


def _passes(guest: Guest, count: int) -> dict[str, float]:
    """Wait until the guest's program went through so many more passes; what it says."""

    def said() -> dict[str, float]:
        found = guest.run(["cat", "/root/busy.json"], check=False)
        return dict(json.loads(found.stdout)) if found.returncode == 0 else {"passes": 0}

    before = said()["passes"]
    guest.host.wait(
        lambda: said()["passes"] >= before + count, deadline_s=120, what="the guest's passes"
    )
    return said()


def _downtime(host: LabHost, name: str) -> float:
    """Of the last move to this host, as libvirt has it (milliseconds)."""
    told = host.virsh("domjobinfo", name, "--completed").stdout
    found = re.search(r"^Total downtime:\s+(\d+)", told, re.MULTILINE)
    return float(found[1]) if found else float("nan")
