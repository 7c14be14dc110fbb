"""Records of commands that are not ordered: what of them is in the state, and how it gets there.

Each stores the fields of a change first and the phase last, and whatever is repeated after a worker
died ends in the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from accelvisor.abi.commands import COMPLETION, Flag
from accelvisor.abi.registers import COMMAND_BYTES, COMPLETION_BYTES, Interrupt
from accelvisor.function import state as s
from accelvisor.function.lanes import Lane
from accelvisor.function.scheduler import Command
from accelvisor.function.state import State
from accelvisor.limits import LIMITS

_M32 = 0xFFFF_FFFF
_M64 = 0xFFFF_FFFF_FFFF_FFFF
_INTERRUPT = int(Flag.INTERRUPT)


def share_of(queues: int) -> int:
    """Records of commands for each of a function's queues."""
    return min(LIMITS.ring_entries, s.COMMANDS // queues)


class Records:
    """The records of a function's ``lanes``; each has an equal share of them."""

    def __init__(
        self,
        state: State,
        window: memoryview,
        entries: int,
        lanes: list[Lane],
        set_cause: Callable[[int], None],
    ) -> None:
        self._state = state
        self._u8, self._u32, self._u64 = state.u8, state.u32, state.u64
        self._window = window
        self._words = window.cast("I")
        self._entries = entries
        self._set_cause = set_cause
        self._share = share_of(len(lanes))
        self._free: list[list[int]] = [[] for _ in lanes]
        for lane in lanes:
            self.all_free(lane)

    def all_free(self, lane: Lane) -> None:
        """None of the queue's records is in use."""
        first = lane.index * self._share
        self._free[lane.index] = list(range(first + self._share - 1, first - 1, -1))

    def free(self, lane: Lane) -> int | None:
        """The record that the queue's next command takes."""
        free = self._free[lane.index]
        return free[-1] if free else None

    def keep(self, lane: Lane, used: set[int]) -> None:
        """Of the queue's records exactly these are in use."""
        self.all_free(lane)
        self._free[lane.index] = [slot for slot in self._free[lane.index] if slot not in used]

    def take(
        self, lane: Lane, command: Command, entry: bytes, phase: int, status: int = 0
    ) -> None:
        """The command leaves the ring; with phase RESULT it is refused with ``status``."""
        self._free[lane.index].remove(command.slot)
        word = s.command_word(command.slot)
        u32 = self._u32
        taken = u32[lane.record + s.Q_TAKEN]
        self._u8[word * 4 : word * 4 + COMMAND_BYTES] = entry
        u32[word + s.K_QUEUE] = lane.index
        u32[word + s.K_INDEX] = taken
        u32[word + s.K_STATUS] = status
        u32[word + s.K_PHASE] = phase
        u32[lane.record + s.Q_TAKEN] = self._words[lane.sq_head] = taken + 1 & _M32
        self._u64[_COMMANDS] += 1

    def entry(self, slot: int) -> bytes:
        """The device's own copy of the command."""
        at = s.command_word(slot) * 4
        return bytes(self._u8[at : at + COMMAND_BYTES])

    def decide(self, command: Command, status: int, value: int, cycles: int) -> None:
        """The command's result."""
        word = s.command_word(command.slot)
        self._u32[word + s.K_STATUS] = status
        self._u64[(word + s.K_VALUE64) // 2] = value
        self._u64[(word + s.K_COST64) // 2] = cycles
        self._u32[word + s.K_PHASE] = s.K_RESULT

    def complete(self, lane: Lane, own: int) -> None:
        """Remember the id in the state; repeatable."""
        u32 = self._u32
        count = u32[lane.record + s.Q_SYNCS]
        first = s.completed_word(lane.index)
        if not count or u32[first + (count - 1) % s.COMPLETED] != own:
            u32[first + count % s.COMPLETED] = own
            u32[lane.record + s.Q_SYNCS] = count + 1 & _M32

    def post(self, lane: Lane, command: Command) -> None:
        """The command's completion; then its record is free."""
        word, u32, u64 = s.command_word(command.slot), self._u32, self._u64
        total = (lane.record + s.Q_CYCLES64) // 2
        u32[word + s.K_POST] = u32[lane.record + s.Q_DONE]
        cost = u64[(word + s.K_COST64) // 2]
        u64[(word + s.K_CYCLES64) // 2] = u64[total] + cost & _M64
        u32[word + s.K_PHASE] = s.K_POSTING
        self.publish(lane, word)
        self._free[lane.index].append(command.slot)

    def publish(self, lane: Lane, word: int) -> None:
        """The completion entry of a record that says which one it is; repeatable."""
        u32, u64 = self._u32, self._u64
        head, post = u32[word], u32[word + s.K_POST]
        COMPLETION.pack_into(
            self._window,
            lane.completion + post % self._entries * COMPLETION_BYTES,
            u32[word + 1],
            u32[word + s.K_STATUS],
            head & 0xFFFF,
            u64[(word + s.K_VALUE64) // 2],
            u64[(word + s.K_COST64) // 2],
            0,
        )
        u64[(lane.record + s.Q_CYCLES64) // 2] = u64[(word + s.K_CYCLES64) // 2]
        u32[lane.record + s.Q_DONE] = self._words[lane.cq_tail] = post + 1 & _M32
        u32[word + s.K_PHASE] = s.K_FREE
        self._state.zero(word * 4, s.COMMAND_RECORD_BYTES)
        if head >> 16 & _INTERRUPT:
            self._set_cause(Interrupt.COMPLETION)

    def clear(self, lane: Lane) -> None:
        """Forget everything of a queue."""
        first = s.command_word(lane.index * self._share) * 4
        self._state.zero(first, self._share * s.COMMAND_RECORD_BYTES)
        self._state.zero(s.completed_word(lane.index) * 4, s.COMPLETED * 4)
        self.all_free(lane)

    def completed(self, lane: Lane) -> list[int]:
        """The ids that are remembered as complete, oldest first."""
        count, first = self._u32[lane.record + s.Q_SYNCS], s.completed_word(lane.index)
        recent = range(max(0, count - s.COMPLETED), count)
        return [self._u32[first + n % s.COMPLETED] for n in recent]

    def used(self, lane: Lane) -> list[int]:
        """Slots whose record is not all zero."""
        first = lane.index * self._share
        at, size = s.command_word(first) * 4, self._share * s.COMMAND_RECORD_BYTES
        if not self._u32[lane.record] or self._u8[at : at + size] == bytes(size):
            return []
        step = s.COMMAND_RECORD_BYTES
        zero = bytes(step)
        return [
            first + n
            for n in range(self._share)
            if self._u8[at + n * step : at + (n + 1) * step] != zero
        ]


_COMMANDS = s.K["commands"]
