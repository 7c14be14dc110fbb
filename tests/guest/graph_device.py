"""The fake device with what it lacks for graphs: GRAPH_LOAD, GRAPH_LAUNCH, commands that are not
ordered, Query.TRACE and FABRIC.

Graphs are carried out entry by entry, an arbitrary queue each time, by the kernels' own tiles.
Commands that are not ordered run when they come, after checking that what they depend on is known,
as the device would: the last ``remembered`` ids.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accelvisor.abi import commands, graphs, programs
from accelvisor.abi.commands import SCHEDULE, SCHEDULE_AT, Completion, Flag, Query
from accelvisor.abi.graphs import Graph, Kind
from accelvisor.abi.status import CommandStatus
from accelvisor.errors import NumericError, ProgramError
from accelvisor.kernels.programs import PlannedOperation, prepare

from .fake_device import FakeDevice


@dataclass
class GraphDevice(FakeDevice):
    """See the module. ``seed``: of the order in which queues run. ``down``: links that are."""

    seed: int = 0
    chips: int = 4
    remembered: int = 256
    down: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.completed: deque[int] = deque(maxlen=self.remembered)
        self.ids: list[tuple[int, int, int, int]] = []  # opcode, chip, own, on
        self.turns = 0
        self.spans: list[dict[str, Any]] = []
        self._cookie = 0
        self._prepared: dict[int, Sequence[PlannedOperation]] = {}
        self._looked_at: set[tuple[int, int]] = set()
        super().__post_init__()

    def read32(self, offset: int) -> int:
        from accelvisor.abi.registers import Reg

        value = super().read32(offset)
        return self.chips if offset == Reg.CHIPS and value == 1 else value

    def _execute(self, queue: int, entry: bytes) -> Completion:
        opcode, flags, cookie = commands.HEADER.unpack_from(entry)
        self._cookie = cookie
        chip, _, own, on, _ = SCHEDULE.unpack_from(entry, SCHEDULE_AT)
        loose = flags & (Flag.PLAIN | Flag.SYNC | Flag.CONDITIONAL)
        self.ids.append((opcode, chip if loose else -1, own, on))
        if loose and on and on not in self.completed:
            return Completion(cookie, CommandStatus.BAD_DEPENDENCY, opcode, 0, 0)
        done = super()._execute(queue, entry)
        if own:
            self.completed.append(own)
        return done

    def _graph_load(self, queue: int, raw: bytes) -> tuple[int, int]:
        try:
            graph = graphs.decode(self._get(commands.parse_memory(raw[:24])))
        except ProgramError as error:
            self.detail = f"{error.where}: {error}"
            return CommandStatus.PROGRAM_INVALID, 0
        self._handles += 1
        self.graphs[self._handles] = graph
        return 0, self._handles

    def _graph_unload(self, queue: int, raw: bytes) -> tuple[int, int]:
        (handle,) = commands.HANDLE.unpack_from(raw)
        return (0 if self.graphs.pop(handle, None) else CommandStatus.BAD_HANDLE), 0

    def _graph_launch(self, queue: int, raw: bytes) -> tuple[int, int]:
        handle, repeat = commands.GRAPH_LAUNCH.unpack_from(raw)
        graph = self.graphs.get(handle)
        if graph is None:
            return CommandStatus.BAD_HANDLE, 0
        for node in graph.nodes if self.down else ():
            for operation in prepare(self.programs[node.program]):
                if operation.link in self.down:
                    self.detail = f"the link {operation.link} is down"
                    return CommandStatus.LINK_DOWN, 0
        for turn in range(repeat):
            status = self._turn(graph, random.Random(self.seed * 1000 + turn))
            if status:
                return status, 0
        return 0, 0

    def _turn(self, graph: Graph, r: random.Random) -> int:
        at = dict.fromkeys(graph.queues, 0)
        counters: dict[int, int] = {}
        while any(at[key] < len(row) for key, row in graph.queues.items()):
            able = []
            for key, row in graph.queues.items():
                if at[key] < len(row):
                    entry = row[at[key]]
                    if entry.kind is not Kind.WAIT or counters.get(entry.event, 0) >= entry.value:
                        able.append(key)
            key = r.choice(able)
            entry = graph.queues[key][at[key]]
            at[key] += 1
            if entry.kind is Kind.SIGNAL:
                counters[entry.event] = counters.get(entry.event, 0) + 1
            elif entry.kind is Kind.RUN:
                node = graph.nodes[entry.value]
                program = self.programs[node.program]
                if (node.program, key[1]) not in self._looked_at:
                    self._check_queue(program, key[1])
                    self._looked_at.add((node.program, key[1]))
                status = self._carry_out(program, node)
                if status:
                    return status
                self._note(key, entry.value)
        return 0

    def _carry_out(self, program: programs.Program, node: graphs.Node) -> int:
        """As the interpreter does, without looking the program through again each time."""
        found = self._prepared.get(node.program)
        if found is None:
            found = self._prepared[node.program] = prepare(program)
        arrays = []
        for slot, binding in zip(program.slots, node.bindings, strict=True):
            data = memoryview(self.tensors[binding.handle][2])
            part = data[binding.offset : binding.offset + slot.nbytes]
            arrays.append(np.frombuffer(part, slot.dtype.label).reshape(slot.shape))
        try:
            for operation in found:
                operands = [arrays[i] for i in operation.operands]
                outputs = [operands[p] for p in operation.writes]
                for p in operation.reads:  # as on the device, reads see what was there before
                    if any(np.may_share_memory(operands[p], out) for out in outputs):
                        operands[p] = operands[p].copy()
                for tile in range(operation.tiles):
                    operation.run_tile(operands, tile)
        except NumericError as error:
            self.detail = str(error)
            return CommandStatus.NUMERIC
        return 0

    def _note(self, key: tuple[int, graphs.QueueType], node: int) -> None:
        start = self.turns * 1000
        self.turns += 1
        self.spans.append(
            {"context": 0, "name": "test", "chip": key[0], "queue": key[1].name.lower(),
             "label": "node", "command": self._cookie, "node": node, "start_ns": start,
             "end_ns": start + 900, "cycles": 5, "cycle_start": start}
        )  # fmt: skip

    def _check_queue(self, program: programs.Program, kind: graphs.QueueType) -> None:
        kinds = {o.instruction.queue.value for o in prepare(program)}
        wanted = "transfer" if kinds == {"transfer"} else "compute"
        assert kind.name.lower() == wanted

    def _link_switch(self, queue: int, raw: bytes) -> tuple[int, int]:
        number, on = commands.LINK.unpack_from(raw)
        for row in self._links():
            if number in (row["link"], commands.ALL_LINKS):
                ends = {tuple(row["ends"]), tuple(row["ends"][::-1])}
                self.down = self.down - ends if on else self.down | ends
        known = number < self.chips or number == commands.ALL_LINKS
        return (0 if known else CommandStatus.BAD_DESCRIPTOR), 0

    def _links(self) -> list[dict[str, Any]]:
        """A ring."""
        found = []
        for n in range(self.chips if self.chips > 2 else self.chips - 1):
            ends = (n, (n + 1) % self.chips)
            state = "down" if ends in self.down else "up"
            found.append({"link": n, "number": n, "ends": list(ends), "kind": "inter-chip",
                          "state": state, "bytes": 0, "flits": 0, "transfers": 0})  # fmt: skip
        return found

    def _query(self, queue: int, raw: bytes) -> tuple[int, int]:
        import json

        what, _, _, target = commands.QUERY.unpack_from(raw)
        if what not in (Query.TRACE, Query.FABRIC):
            return super()._query(queue, raw)
        answer: Any = {"clock": "monotonic", "spans": self.spans[-200:], "dropped": 0}
        if what == Query.FABRIC:
            answer = {"chips": [{"chip": n} for n in range(self.chips)], "links": self._links()}
        data = json.dumps(answer).encode()
        memory = commands.parse_memory(target)
        self._put(memory, data[: memory.length])
        return 0, len(data)
