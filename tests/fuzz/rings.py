"""Random commands and programs against a device in this process: ``python -m tests.fuzz.rings``.

Whatever a guest writes into its rings, descriptors and programs, only typed statuses may come out:
no DEVICE_ERROR (which is what an unforeseen exception becomes), no hang, no byte of one context in
another, and a device that still computes correctly afterwards. The seed is printed; ``--seed N``
repeats a run.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from accelvisor.abi import commands as abi
from accelvisor.abi.attributes import FLOAT
from accelvisor.abi.commands import Binding, Flag, Memory, Opcode
from accelvisor.abi.dtypes import DType
from accelvisor.abi.graphs import Entry, Graph, Kind, Node, QueueType
from accelvisor.abi.graphs import encode as encode_graph
from accelvisor.abi.programs import Operation, Program, Role, Slot, encode
from accelvisor.abi.registers import (
    BAR0_BYTES,
    SQ_TAIL,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
)
from accelvisor.abi.status import CommandStatus
from accelvisor.function.fabric_spec import ChipSpec, FabricSpec, LinkSpec
from accelvisor.kernels.registry import INSTRUCTIONS
from accelvisor.limits import MIB
from tests.function.harness import Local, Ring, operation

_TYPES = list(DType)
_EDGES = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 255, 256, 4095, 4096, 1 << 16, 1 << 31, (1 << 32) - 1,
          1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip


_MADE = (Opcode.TENSOR_CREATE, Opcode.PROGRAM_LOAD, Opcode.GRAPH_LOAD)


class Fuzzer:
    """One device and the guest that torments it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.serial = 3
        #: by queue: two tensors and a program that fits them, unless they are gone by now
        self.sounds: dict[int, list[int]] = {}
        links = (LinkSpec(0, 0, 1, "inter-chip"), LinkSpec(1, 1, 0, "inter-card"))
        chips = (ChipSpec(0, 0, 1), ChipSpec(0, 1, 1))
        self.local = Local(
            ram_bytes=MIB, memory_bytes=4 * MIB, queues=3, ring_entries=16, chips=2,
            fabric=FabricSpec(chips, links),
        )  # fmt: skip
        self.ram = memoryview(self.local.ram)
        self.owned: dict[tuple[int, Opcode], list[int]] = {}
        self.statuses: Counter[str] = Counter()
        self.worked: Counter[int] = Counter()
        self.rings = [self.local.ring(n) for n in range(3)]
        self.steps: list[tuple[int, Callable[[Ring], bytes | None]]] = [
            (2, self.noise),
            (2, self.half_noise),
            (2, self.open),
            (1, lambda r: abi.context_close(1)),
            (8, self.create),
            (3, lambda r: abi.tensor_destroy(1, self.handle(r))),
            (8, self.copy),
            (6, self.load),
            (1, lambda r: abi.program_unload(1, self.handle(r, Opcode.PROGRAM_LOAD))),
            (12, self.launch),
            (3, self.sound),
            (6, self.graph),
            (1, lambda r: abi.graph_unload(1, self.handle(r, Opcode.GRAPH_LOAD))),
            (6, self.graph_launch),
            (2, lambda r: abi.link_switch(1, self.random.choice((0, 1, 2, 7, 0xFFFFFFFF)), True)),
            (1, lambda r: abi.link_switch(1, self.random.choice((0, 1, 0xFFFFFFFF)), False)),
            (3, self.query),
            (2, lambda r: abi.nop(self.number())),
            (8, self.crowd),
            (1, self.registers),
            (1, self.recycle),
        ]

    # --- pieces ----------------------------------------------------------------------------------

    def number(self, most: int = (1 << 32) - 1) -> int:
        value = self.random.choice(_EDGES) + self.random.choice((0, 0, 0, -1, 1))
        return min(max(value, 0), most)

    def handle(self, ring: Ring, kind: Opcode = Opcode.TENSOR_CREATE) -> int:
        """Mostly one of the queue's own, else another's, stale, or nearly right."""
        pick = self.random.random()
        if pick < 0.9:
            own = self.owned.get((ring.index, kind), [])
            return self.random.choice(own) if own else 1 << 32
        everyone = [h for handles in self.owned.values() for h in handles] or [0]
        handle = self.random.choice(everyone)
        return handle if pick < 0.95 else handle ^ 1 << self.random.randrange(64)

    def memory(self, length: int) -> Memory:
        """Mostly in range, of ``length`` bytes."""
        r = self.random
        if r.random() < 0.1:
            return Memory(r.randrange(4), r.randrange(4), self.number((1 << 64) - 1),
                          self.number((1 << 64) - 1), self.number())  # fmt: skip
        if r.random() < 0.2:
            staging = self.local.spec.layout.staging
            return Memory(1, 0, staging + r.randrange(65536), length, 0)
        if r.random() < 0.3 and length:
            return self.scatter(length)
        return Memory(0, 0, self.local.RAM + r.randrange(MIB // 2), length, 0)

    def scatter(self, length: int) -> Memory:
        r = self.random
        cuts = sorted({0, length, *(r.randrange(length + 1) for _ in range(r.randrange(6)))})
        at = MIB - 4096 * (1 + r.randrange(16))
        raw = b""
        for a, b in pairwise(cuts):
            room = max(1, MIB - (b - a))
            address = self.local.RAM + r.randrange(room) if r.random() < 0.97 else self.number()
            raw += abi.SEGMENT.pack(address, b - a)
        self.ram[at : at + len(raw)] = raw
        return Memory(0, 1, self.local.RAM + at, length, len(raw) // 16)

    # --- commands --------------------------------------------------------------------------------

    def noise(self, ring: Ring) -> bytes:
        return self.random.randbytes(64)

    def half_noise(self, ring: Ring) -> bytes:
        opcode = self.random.choice(list(Opcode))
        words = b"".join(struct.pack("<Q", self.number((1 << 64) - 1)) for _ in range(7))
        return struct.pack("<HHI", opcode, self.random.randrange(2), 1) + words

    def open(self, ring: Ring) -> bytes:
        raw = bytearray(abi.context_open(1, self.number(), "fuzz"))
        raw[12:20] = self.random.randbytes(8)
        return bytes(raw)

    def create(self, ring: Ring) -> bytes:
        r = self.random
        if r.random() < 0.15:
            dims = tuple(self.number() for _ in range(r.randrange(9)))
        else:
            dims = tuple(r.choice((0, 1, 2, 3, 4, 5, 8, 17)) for _ in range(r.randrange(4)))
        return abi.tensor_create(1, r.choice((DType.FLOAT32, r.choice(_TYPES))), dims)

    def copy(self, ring: Ring) -> bytes:
        r = self.random
        build = r.choice((abi.copy_in, abi.copy_out))
        length = r.choice((0, 1, 4, 8, 16, 40, 100, self.number(1 << 20)))
        offset = r.choice((0, 0, 0, 4, self.number()))
        return build(1, self.handle(ring), offset, self.memory(length))

    def program(self) -> bytes:
        """A program that is often almost right."""
        r = self.random
        dims = [r.choice((1, 2, 3, 4, 5)) for _ in range(3)]
        slots = []
        for _ in range(r.randrange(1, 7)):
            shape = tuple(r.choice(dims) for _ in range(r.randrange(4)))
            dtype = r.choice((DType.FLOAT32,) * 5 + (DType.INT64, r.choice(_TYPES)))
            slots.append(Slot(dtype, shape, r.choice(list(Role))))
        operations = []
        for _ in range(r.randrange(1, 5)):
            instruction = r.choice(list(INSTRUCTIONS.values()))
            count = len(instruction.operands) + r.choice((0,) * 12 + (-1, 1))
            picks = tuple(r.randrange(len(slots)) for _ in range(min(8, max(0, count))))
            raw = []
            for attribute in instruction.attributes:
                if r.random() < 0.6:
                    value: float = attribute.default
                else:
                    value = r.choice((-1, 0, 1, 2, 3, 1 << 40, 0.5, float("inf"), float("nan")))
                form = "<d" if attribute.type == FLOAT else "<q"
                if form == "<q":
                    value = int(value) if value == value and abs(value) < 1 << 62 else 1 << 62
                raw.append(struct.unpack("<Q", struct.pack(form, value))[0])
            operations.append(Operation(instruction.opcode, picks, tuple(raw)))
        data = bytearray(encode(Program(tuple(slots), tuple(operations))))
        while r.random() < 0.2:
            data[r.randrange(len(data))] = r.randrange(256)
        return bytes(data[: len(data) - r.choice((0,) * 20 + (1, 32))])

    def load(self, ring: Ring) -> bytes:
        raw = self.program()
        if self.random.random() < 0.6:
            raw = self.sound_program()
        self.ram[: len(raw)] = raw
        return abi.program_load(1, Memory(0, 0, self.local.RAM, len(raw), 0))

    def sound_program(self) -> bytes:
        r = self.random
        n = r.choice((1, 4, 5, 17))
        slots = tuple(Slot(DType.FLOAT32, (n,), role) for role in
                      (Role.INPUT, Role.OUTPUT, Role.TEMPORARY))  # fmt: skip
        names = ("relu", "exp", "neg", "copy", "sqrt", "softmax", "tanh")
        return encode(
            Program(slots, (operation(r.choice(names), 0, 2), operation(r.choice(names), 2, 1)))
        )

    def launch(self, ring: Ring) -> bytes:
        r = self.random
        count = r.choice((2,) * 6 + (0, 1, 3, 4, 5))
        at = MIB // 2
        known = self.sounds.get(ring.index) if r.random() < 0.4 else None
        for n in range(count):
            offset = r.choice((0,) * 6 + (4, 8, 3, self.number((1 << 64) - 1)))
            handle = known[n] if known and n < 2 else self.handle(ring)
            abi.BINDING.pack_into(self.ram, at + 16 * n, handle, 0 if known else offset)
        memory = Memory(0, 0, self.local.RAM + at, count * 16, 0)
        if r.random() < 0.1:
            memory = self.memory(count * 16)
        program = known[2] if known else self.handle(ring, Opcode.PROGRAM_LOAD)
        return abi.launch(1, program, count, memory, repeat=r.choice((1,) * 8 + (2, 5, 0)))

    def sound(self, ring: Ring) -> None:
        """A program, and tensors that fit it: launches and graphs of this queue may get through."""
        n = self.random.choice((1, 5, 17))
        slots = tuple(Slot(DType.FLOAT32, (n,), role) for role in (Role.INPUT, Role.OUTPUT))
        raw = encode(Program(slots, (operation("exp", 0, 1),)))
        made = []
        for _ in range(2):
            made.append(self.judge(ring, ring.run(abi.tensor_create(1, DType.FLOAT32, (n,)))))
        self.ram[: len(raw)] = raw
        memory = Memory(0, 0, self.local.RAM, len(raw), 0)
        made.append(self.judge(ring, ring.run(abi.program_load(1, memory))))
        if None not in made:
            self.sounds[ring.index] = [value for value in made if value is not None]

    def node(self, ring: Ring) -> Node:
        """Often one that can run, if its objects are still there."""
        r = self.random
        if r.random() < 0.7 and (known := self.sounds.get(ring.index)):
            x, y, program = known
            return Node(program, (Binding(x, 0), Binding(y, 0)))
        count = r.choice((2,) * 8 + (1, 3))
        bound = (Binding(self.handle(ring), r.choice((0,) * 5 + (4,))) for _ in range(count))
        return Node(self.handle(ring, Opcode.PROGRAM_LOAD), tuple(bound))

    def graph(self, ring: Ring) -> bytes:
        """A graph of a few nodes on a few queues, that is often sound."""
        r = self.random
        count = r.randrange(1, 5)
        nodes = tuple(self.node(ring) for _ in range(count))
        rows: dict[tuple[int, QueueType], list[Entry]] = {}
        for n in range(count):
            key = r.randrange(2), r.choice((QueueType.COMPUTE,) * 4 + (QueueType.TRANSFER,))
            row = rows.setdefault(key, [])
            if n and r.random() < 0.7:
                row.append(Entry(Kind.WAIT, r.randrange(3), r.randrange(2)))
            row += [Entry(Kind.RUN, 0, n), Entry(Kind.SIGNAL, r.randrange(3))]
        data = bytearray(encode_graph(Graph(2, {k: tuple(v) for k, v in rows.items()}, nodes)))
        while r.random() < 0.15:
            data[r.randrange(len(data))] = r.randrange(256)
        self.ram[: len(data)] = data
        return abi.graph_load(1, Memory(0, 0, self.local.RAM, len(data), 0))

    def graph_launch(self, ring: Ring) -> bytes:
        repeat = self.random.choice((1,) * 6 + (3, 20, 0))
        return abi.graph_launch(1, self.handle(ring, Opcode.GRAPH_LOAD), repeat)

    def crowd(self, ring: Ring) -> None:
        """Some commands that are not ordered at once, with ids that sometimes make sense."""
        r = self.random
        count = r.randrange(1, 9)
        kinds = (Flag.PLAIN, Flag.SYNC, Flag.CONDITIONAL, Flag.SYNC | Flag.CONDITIONAL)
        for n in range(count):
            pick = r.random()
            entry = (
                abi.nop(1) if pick < 0.3 else self.launch(ring) if pick < 0.7
                else self.copy(ring) if pick < 0.85 else self.graph_launch(ring)
            )  # fmt: skip
            flags = r.choice(kinds)
            own = self.serial + n if flags & Flag.SYNC else 0
            on = self.serial + r.randrange(-2, n + 1) if flags & Flag.CONDITIONAL else 0
            if r.random() < 0.05:
                own, on, flags = self.number(), self.number(), Flag(r.randrange(16))
            chip = r.choice((abi.ANY_CHIP,) * 3 + (0, 1, 2))
            ring.post(abi.scheduled(entry, flags, chip, own, max(0, on)))
        self.serial = (self.serial + count) % (1 << 31) + 3
        ring.submit()
        self.local.wait(lambda: ring.ready() >= count)
        for _ in range(count):
            self.judge(ring, ring.take(), b"")

    def query(self, ring: Ring) -> bytes:
        what = self.random.choice((0, 1, 2, 3, 4, 4, 3, 5, 6, 7, 65535))
        memory = self.memory(self.random.choice((0, 100, 65536)))
        raw = bytearray(abi.query(1, abi.Query.INFO, memory))
        struct.pack_into("<H", raw, 8, what)
        return bytes(raw)

    def registers(self, ring: Ring) -> None:
        """BAR0 and configuration space, anywhere but where a queue is switched off."""
        offset = self.random.randrange(BAR0_BYTES - 8)
        self.local.device.region_read(0, offset, self.random.choice((1, 2, 4, 8)))
        if offset < Reg.QUEUE:
            self.local.device.region_write(0, offset & 0xFF0 | 8, self.random.randbytes(4))
        self.local.device.region_read(7, offset & 0xFFF, 1)

    def recycle(self, ring: Ring) -> None:
        """Disable, sometimes with commands still in the ring; then enable."""
        if self.random.random() < 0.5:
            ring.words[(ring.control + SQ_TAIL) // 4] = self.number()
            self.local.write32(Reg.DOORBELL + 4 * ring.index, 1)
        ring.set(QueueControl.DISABLE, QueueStatus.DISABLED)
        ring.set(QueueControl.ENABLE, QueueStatus.ENABLED)
        ring.tail = ring.head = 0

    # --- the run ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One action on one queue; whatever completes must be a typed status."""
        weights = [w for w, _ in self.steps]
        _, action = self.random.choices(self.steps, weights)[0]
        ring = self.random.choice(self.rings)
        if not ring.register(QueueReg.CONTEXT) and self.random.random() < 0.8:
            action = self.open
        entry = action(ring)
        if entry is not None:
            self.judge(ring, ring.run(entry), entry)

    def judge(self, ring: Ring, done: abi.Completion, entry: bytes = b"") -> int | None:
        """A completion must be a typed status. Its value, if that was OK."""
        status = CommandStatus(done.status)
        self.statuses[status.name] += 1
        opcode = done.opcode
        if status is CommandStatus.DEVICE_ERROR:
            fault = ring.fault()
            raise AssertionError(f"{entry.hex()}: {fault}")
        if status is CommandStatus.OK and opcode in _MADE:
            own = self.owned.setdefault((ring.index, Opcode(opcode)), [])
            own.append(done.value)
            del own[: max(0, len(own) - 8)]
        if status is CommandStatus.OK:
            self.worked[opcode] += 1
        if ring.register(QueueReg.STATUS) == QueueStatus.FAULTED and self.random.random() < 0.7:
            self.recycle(ring)
        return done.value if status is CommandStatus.OK else None

    def check(self) -> None:
        """The device still computes, and nothing is left when all is closed."""
        ring = self.rings[0]
        for one in self.rings:
            one.set(QueueControl.DISABLE, QueueStatus.DISABLED)
        device = self.local.device
        assert device.memory.used == 0, device.memory.extents()
        size = self.local.spec.memory_bytes
        assert os.pread(self.local.fds[2], size, 0) == bytes(size)
        for one in self.rings:
            one.set(QueueControl.ENABLE, QueueStatus.ENABLED)
            one.tail = one.head = 0
        ring.open("check")
        x = ring.tensor(np.arange(5, dtype=np.float32))
        out = ring.tensor(np.zeros(5, np.float32))
        slots = (Slot(DType.FLOAT32, (5,), Role.INPUT), Slot(DType.FLOAT32, (5,), Role.OUTPUT))
        program = ring.load(Program(slots, (operation("add", 0, 0, 1),)))
        assert ring.launch(program, x, out).status == 0
        assert ring.read(out, "float32", (5,)).tolist() == [0, 2, 4, 6, 8]
        ring.ok(abi.context_close)
        self.owned.clear()


def run(seconds: float, seed: int) -> Counter[str]:
    """Fuzz for ``seconds``; what statuses came out, how often. Raises AssertionError."""
    fuzzer = Fuzzer(seed)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in range(500):
                fuzzer.step()
            fuzzer.check()
        for opcode in (*_MADE, Opcode.LAUNCH, Opcode.GRAPH_LAUNCH, Opcode.COPY_IN, Opcode.QUERY):
            assert fuzzer.worked[opcode], f"{opcode.name} never worked: the fuzzer is blunt"
        return fuzzer.statuses
    finally:
        fuzzer.local.close()


def main(arguments: list[str]) -> int:
    """Exit status 1 when something other than a typed status came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.rings", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # a context that stops is what is wanted here
    print(f"seed {options.seed}", flush=True)
    try:
        statuses = run(options.seconds, options.seed)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    for name, count in statuses.most_common():
        print(f"{count:9} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
