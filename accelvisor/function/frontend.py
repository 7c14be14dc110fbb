"""The front end: from ring entries to handlers, and from results to completion entries.

One *ordered* command of a queue is in progress at a time, and then nothing else of that queue; what
is not ordered has a room of its own (unordered.py). Its life in the cursor record: RUNNING with the
device's own copy of the entry; RESULT once status, value and the queue's new cycle count are
decided; then the completion entry, the counts and at last an idle cursor. Whatever was reached
when a worker died, going through it again ends in the same bytes, so no command is lost and none
completes twice.

NOP and FENCE have no effect but their completion (earlier commands of the queue are complete by
then), so runs of them take a shorter way without the cursor.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence

from accelvisor.abi.commands import ANY_CHIP, COMPLETION, Flag, Opcode
from accelvisor.abi.registers import (
    COMMAND_BYTES,
    COMPLETION_BYTES,
    PAGE,
    SQ_TAIL,
    Interrupt,
    QueueStatus,
    WindowLayout,
)
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.commands import Commands
from accelvisor.function.lanes import Lane, judge
from accelvisor.function.objects import Contexts, Refused
from accelvisor.function.pauses import Pauses, Waiting, finish
from accelvisor.function.running import Fault, Result
from accelvisor.function.state import State
from accelvisor.function.unordered import Unordered, blamed
from accelvisor.limits import LIMITS

log = logging.getLogger(__name__)

_M32 = 0xFFFF_FFFF
_M64 = 0xFFFF_FFFF_FFFF_FFFF
_ENTRY = struct.Struct("<16I")
_LIGHT = frozenset((int(Opcode.NOP), int(Opcode.FENCE)))
_PLAIN = int(Flag.PLAIN)
_UNORDERED = int(Flag.PLAIN | Flag.SYNC | Flag.CONDITIONAL)
#: What shows that the guest's programs get somewhere: faults before it are forgotten. Opening a
#: context, or filling a tensor, is what a program does that faults then.
_WORK = frozenset((int(Opcode.LAUNCH), int(Opcode.GRAPH_LAUNCH), int(Opcode.CONTEXT_CLOSE)))
_INTERRUPT = int(Flag.INTERRUPT)
_ENABLED = int(QueueStatus.ENABLED)
_FAULTED = int(QueueStatus.FAULTED)


class Frontend:
    """Serves lanes. Runs on the engine's thread alone."""

    def __init__(
        self,
        state: State,
        window: memoryview,
        layout: WindowLayout,
        commands: Commands,
        contexts: Contexts,
        chips: int,
        set_cause: Callable[[int], None],
    ) -> None:
        self._state = state
        self._u8 = state.u8
        self._u32 = state.u32
        self._u64 = state.u64
        self._window = window
        self._words = window.cast("I")
        self._entries = layout.entries
        self._commands = commands
        self._contexts = contexts
        self._set_cause = set_cause
        self.lanes = [Lane(i, layout) for i in range(layout.queues)]
        self.unordered = Unordered(
            state, window, layout.entries, self.lanes, commands, chips, set_cause, self._stop,
            self._note, self._worked,
        )  # fmt: skip
        #: Queues whose command in progress a predecessor began.
        self._inherited: set[int] = set()
        #: Called when ``LIMITS.fault_row`` contexts faulted, and no program ran in between.
        self.on_row: Callable[[], None] = lambda: None

    # --- the rings --------------------------------------------------------------------------------

    def pending(self, lane: Lane) -> bool:
        """Whether the lane has something to do: a command in progress or one in its ring."""
        u32 = self._u32
        status = u32[lane.record]
        if status == 0:
            return False
        if u32[lane.cursor + s.C_PHASE]:
            return lane.blocked is None or lane.blocked.ready()
        if self.unordered.pending(lane):
            return True
        taken = u32[lane.record + s.Q_TAKEN]
        waiting = self._words[lane.sq_tail] - taken & _M32
        if not waiting or lane.stalled == self.unordered.ended:
            return False
        if waiting > self._entries:
            return status == _ENABLED
        return (taken - self._words[lane.cq_head] & _M32) < self._entries

    def serve(self, lane: Lane) -> bool:
        """Do a bounded amount of the lane's work. False when there was none."""
        u32 = self._u32
        if u32[lane.cursor + s.C_PHASE]:
            if lane.waits():
                return False
            self._advance(lane)
            return True
        unordered = self.unordered
        if lane.stalled == unordered.ended:
            return False
        others = unordered.outstanding(lane)
        if others and unordered.scheduler.lanes[lane.index].ready:
            return unordered.front(lane)
        words = self._words
        taken = u32[lane.record + s.Q_TAKEN]
        waiting = words[lane.sq_tail] - taken & _M32
        if not waiting:
            return False
        entries = self._entries
        if waiting > entries:
            return self._overrun(lane, waiting)
        room = entries - (taken - words[lane.cq_head] & _M32)
        if room <= 0:
            return False
        slot = taken % entries
        at = lane.submission + slot * COMMAND_BYTES
        entry = bytes(self._window[at : at + COMMAND_BYTES])
        if entry[0] not in _LIGHT or entry[1]:
            return self._next(lane, entry, others)
        done = u32[lane.record + s.Q_DONE]
        count = min(waiting, room, entries - slot, entries - done % entries)
        # What is read anew the guest may have changed: from here on only the block counts.
        block = entry if count == 1 else bytes(self._window[at : at + count * COMMAND_BYTES])
        if not self._light(lane, done, taken, block, count, bool(others)):
            return self._next(lane, block[:COMMAND_BYTES], others)
        return True

    def _next(self, lane: Lane, entry: bytes, others: int) -> bool:
        """Begin the ring's next command, unless it has to stay there."""
        if entry[2] & _UNORDERED:
            return self.unordered.take(lane, entry)
        if others:
            lane.stalled = self.unordered.ended
            return False
        self._begin(lane, entry)
        return True

    def _light(
        self, lane: Lane, done: int, taken: int, block: bytes, count: int, others: bool
    ) -> int:
        """Complete the leading run of NOPs and FENCEs of ``block``, ordered (not where ``others``
        are outstanding) or plain; returns how many they were.
        """
        status = 0
        if self._u32[lane.record] == _FAULTED:
            status = int(self._stopped)
        words = memoryview(block).cast("I")
        out = bytearray(count * COMPLETION_BYTES)
        pack = COMPLETION.pack_into
        flags = 0
        ended = 0
        for at in range(0, count * 16, 16):
            head = words[at]
            opcode = head & 0xFFFF
            if opcode not in _LIGHT:
                break
            kind = head >> 16 & _UNORDERED
            if kind:
                ids = words[at + 13] | words[at + 14] | words[at + 15]
                if kind != _PLAIN or opcode or ids or words[at + 12] != ANY_CHIP:
                    break  # whatever else it is, it is looked at closely
            elif others:
                break
            flags |= head >> 16
            pack(out, ended * COMPLETION_BYTES, words[at + 1], status, opcode, 0, 0, 0)
            ended += 1
        if ended:
            at = lane.completion + done % self._entries * COMPLETION_BYTES
            size = ended * COMPLETION_BYTES
            self._window[at : at + size] = memoryview(out)[:size]
            self._move(lane, done + ended & _M32, taken + ended & _M32)
            self._u64[_COMMANDS] += ended
            if flags & _INTERRUPT:
                self._set_cause(Interrupt.COMPLETION)
        return ended

    def _move(self, lane: Lane, done: int, taken: int) -> None:
        """The completion entries before ``done`` count from here on."""
        self._u32[lane.record + s.Q_DONE] = done
        self._u32[lane.record + s.Q_TAKEN] = taken
        self._words[lane.cq_tail] = done
        self._words[lane.sq_head] = taken

    def _overrun(self, lane: Lane, waiting: int) -> bool:
        """The tail is further ahead than the ring is long: the guest's driver is broken."""
        if self._u32[lane.record] != _ENABLED:
            return False
        text = f"SQ_TAIL is {waiting} entries ahead, the ring has {self._entries}"
        self._stop(lane, CommandStatus.BAD_ADDRESS, 0, text)
        return True

    def settle(self) -> None:
        """Bring the rings in line with the records, as the next step of each queue would: a guest
        may write what only the device should. The engine stands still.
        """
        for lane in self.lanes:
            status = self._u32[lane.record]
            if not status or self._u32[lane.cursor + s.C_PHASE]:
                continue
            taken = self._u32[lane.record + s.Q_TAKEN]
            waiting = self._words[lane.sq_tail] - taken & _M32
            if waiting > self._entries:
                self._overrun(lane, waiting)
            self._move(lane, self._u32[lane.record + s.Q_DONE], taken)

    def announce_sleep(self, lanes: Sequence[Lane], asleep: bool) -> None:
        """Tell the guest whether a moved tail needs a doorbell."""
        for lane in lanes:
            self._words[lane.need_wakeup] = asleep

    # --- one command ------------------------------------------------------------------------------

    def _begin(self, lane: Lane, entry: bytes) -> None:
        at = lane.cursor * 4
        self._u8[at : at + COMMAND_BYTES] = entry
        self._u32[lane.cursor + s.C_INDEX] = self._u32[lane.record + s.Q_DONE]
        self._u32[lane.cursor + s.C_PHASE] = s.PHASE_RUNNING
        self._u64[_COMMANDS] += 1
        self._run(lane, entry)

    def _advance(self, lane: Lane) -> None:
        """Start, continue or publish the command in the cursor."""
        if self._u32[lane.cursor + s.C_PHASE] == s.PHASE_RESULT:
            self._publish(lane)
        else:
            self._run(lane, bytes(self._u8[lane.cursor * 4 : lane.cursor * 4 + COMMAND_BYTES]))

    def _run(self, lane: Lane, entry: bytes) -> None:
        opcode = entry[0] | entry[1] << 8
        try:
            result = self._step(lane, opcode, entry)
            if result is not None:
                self._finish(lane, *result)
        except Exception as error:
            status, text, stops = judge(error, f"queue {lane.index}: command {opcode:#x}")
            cookie = int.from_bytes(entry[4:8], "little")
            lane.task = None
            self._note(lane, status, cookie, text)
            if stops:
                self._stop(lane, status, cookie, text)
            else:
                self._state.count("refusals")
            self._finish(lane, status, 0, 0)

    def _step(self, lane: Lane, opcode: int, entry: bytes) -> Result | None:
        task = lane.task
        if task is None:
            if opcode in _LIGHT:
                return 0, 0, 0
            if self._u32[lane.record] == _FAULTED and opcode != Opcode.QUERY:
                return self._stopped, 0, 0
            if self._inherited and lane.index in self._inherited:
                self._inherited.discard(lane.index)
                blamed(self._state, lane.where, self.points)
            if self.revoked and opcode != Opcode.QUERY:
                raise Fault(CommandStatus.REVOKED, "the function was revoked")
            handler = self._commands.table.get(opcode)
            if handler is None:
                raise Refused(CommandStatus.UNKNOWN_COMMAND, f"unknown command {opcode:#x}")
            result = handler(lane.where, entry)
            if isinstance(result, tuple):
                return result
            task = lane.task = result
        try:
            lane.blocked = next(task)
        except StopIteration as stop:
            lane.task = None
            finished: Result = stop.value
            return finished
        return None

    @property
    def revoked(self) -> bool:
        """The function has no part of a card any more: no command is carried out."""
        return self._stopped is CommandStatus.REVOKED

    @revoked.setter
    def revoked(self, revoked: bool) -> None:
        stopped = CommandStatus.REVOKED if revoked else CommandStatus.CONTEXT_STOPPED
        self.unordered.stopped = stopped

    @property
    def _stopped(self) -> CommandStatus:
        """What commands of a context that has stopped complete with."""
        return self.unordered.stopped

    def _note(self, lane: Lane, status: CommandStatus, cookie: int, text: str) -> None:
        number = self._u32[lane.record + s.Q_CONTEXT]
        # The fault that stopped a context stays readable, whatever queries are refused later.
        if number and self._u32[lane.record] != _FAULTED:
            self._contexts.note(number - 1, status, cookie, text)

    @property
    def points(self) -> int:
        """What the predecessor's death counts (blame.py)."""
        return self.unordered.points

    @points.setter
    def points(self, points: int) -> None:
        self.unordered.points = points

    def _worked(self, opcode: int) -> None:
        """A command succeeded."""
        if self._u32[s.R_ROW] and opcode in _WORK:
            self._u32[s.R_ROW] = 0

    def _stop(self, lane: Lane, status: int, cookie: int, text: str) -> None:
        u32 = self._u32
        if u32[lane.record] == _FAULTED:
            return
        # Not a warning: a guest could fill the host's journal with it. ``status`` counts faults.
        log.info("queue %d stops: %s", lane.index, text)
        u32[lane.record + s.Q_FAULT] = status
        u32[lane.record + s.Q_FAULT_COMMAND] = cookie
        u32[s.R_FAULTS] = min(u32[s.R_FAULTS] + 1, _M32)
        u32[lane.record] = _FAULTED
        self._state.count("faults")
        self._set_cause(Interrupt.FAULT)
        if status != CommandStatus.REVOKED:
            u32[s.R_ROW] += 1
            if u32[s.R_ROW] == LIMITS.fault_row:
                self.on_row()

    def _finish(self, lane: Lane, status: int, value: int, cycles: int) -> None:
        cursor, u32, u64 = lane.cursor, self._u32, self._u64
        if not status:
            self._worked(u32[cursor] & 0xFFFF)
        u32[cursor + s.C_STATUS] = status
        u64[(cursor + s.C_VALUE64) // 2] = value
        u64[(cursor + s.C_COST64) // 2] = cycles
        total = u64[(lane.record + s.Q_CYCLES64) // 2] + cycles & _M64
        u64[(cursor + s.C_CYCLES64) // 2] = total
        u32[cursor + s.C_PHASE] = s.PHASE_RESULT
        self._publish(lane)

    def _publish(self, lane: Lane) -> None:
        """Give back what the command held, in steps, then let its completion count."""
        cursor, u32, u64 = lane.cursor, self._u32, self._u64
        # Only now: until the result was decided, the command could have had to run again.
        lane.task = None
        if self._commands.running.holds(lane.where):
            if lane.release is None:
                lane.release = self._commands.running.release(lane.where)
            for _ in lane.release:
                return
            lane.release = None
        head = u32[cursor]
        index = u32[cursor + s.C_INDEX]
        COMPLETION.pack_into(
            self._window,
            lane.completion + index % self._entries * COMPLETION_BYTES,
            u32[cursor + 1],
            u32[cursor + s.C_STATUS],
            head & 0xFFFF,
            u64[(cursor + s.C_VALUE64) // 2],
            u64[(cursor + s.C_COST64) // 2],
            0,
        )
        u64[(lane.record + s.Q_CYCLES64) // 2] = u64[(cursor + s.C_CYCLES64) // 2]
        self._move(lane, index + 1 & _M32, index + 1 & _M32)
        if head >> 16 & _INTERRUPT:
            self._set_cause(Interrupt.COMPLETION)
        self._idle(lane)

    def _idle(self, lane: Lane) -> None:
        at = lane.cursor * 4
        self._u32[lane.cursor + s.C_PHASE] = s.PHASE_IDLE
        self._u8[at : at + s.CURSOR_BYTES] = _ZERO_CURSOR

    # --- life of a queue --------------------------------------------------------------------------

    def enable(self, lane: Lane) -> None:
        """Zero the queue's indices and start it."""
        page = lane.sq_tail * 4 - SQ_TAIL
        self._window[page : page + PAGE] = bytes(PAGE)
        self._u32[lane.record + s.Q_DONE] = 0
        self._u32[lane.record + s.Q_TAKEN] = 0
        self._u32[lane.record] = _ENABLED

    def disable(self, lane: Lane, asked: Sequence[Waiting] = ()) -> Pauses[None]:
        """Abort the commands in progress, which waited for ``asked``, and close the context, in
        steps; repeatable. The queue is off with ``disabled``, not before.
        """
        for waited in asked:
            # Who sees the queue disabled may use its memory anew: nothing is written to it then.
            while waited.writes and not waited.ready():
                yield waited
        yield from self.unordered.abort(lane)
        if self._u32[lane.cursor + s.C_PHASE]:
            yield from self._commands.running.release(lane.where)
            self._idle(lane)
        number = self._u32[lane.record + s.Q_CONTEXT]
        if number:
            yield from self._commands.close_context(lane.record, number - 1)

    def disabled(self, lane: Lane) -> None:
        """The queue has nothing left: it is off from here on."""
        u32, u64 = self._u32, self._u64
        cycles = (lane.record + s.Q_CYCLES64) // 2
        # The clock keeps what the queue did. A crash between the two stores counts it twice; the
        # other order would lose it, and a clock must not run backwards.
        u64[s.R_CLOCK64] = u64[s.R_CLOCK64] + u64[cycles] & _M64
        u64[cycles] = 0
        u32[lane.record] = int(QueueStatus.DISABLED)
        self._state.zero(lane.record * 4, s.QUEUE_BYTES)

    def drop(self, lane: Lane) -> list[Waiting]:
        """Forget what the queue's commands are at, at a tile; what they have reached is in the
        state. Returns what those that are not ordered waited for.
        """
        lane.drop()
        return self.unordered.drop(lane)

    def reload(self, lane: Lane) -> None:
        """The state was replaced: know the queue's commands anew."""
        self.drop(lane)
        self._commands.running.reclaim(lane.where)
        self.unordered.reload(lane)

    def close(self, lane: Lane) -> bool | None:
        """One step of a queue that is being disabled: True when only ``disabled`` is left, None
        when it waits for something.
        """
        if lane.closing is None:
            asked = [] if lane.blocked is None else [lane.blocked]
            asked += self.drop(lane)
            lane.closing = self.disable(lane, asked)
        elif lane.waits():
            return None
        for pause in lane.closing:
            lane.blocked = pause
            return False
        lane.closing = None
        return True

    def revoke(self) -> None:
        """Stop every queue for good: what is in progress completes with REVOKED, and its context is
        closed. The engine stands still.
        """
        for lane in self.lanes:
            if not self._u32[lane.record]:
                continue
            self.drop(lane)
            self._stop(lane, CommandStatus.REVOKED, 0, "the function was revoked")
            self.unordered.revoke(lane)
            if self._u32[lane.cursor + s.C_PHASE] == s.PHASE_RUNNING:
                finish(self._commands.running.release(lane.where))
                self._finish(lane, CommandStatus.REVOKED, 0, 0)
            while self._u32[lane.cursor + s.C_PHASE]:
                self._publish(lane)
            number = self._u32[lane.record + s.Q_CONTEXT]
            if number:
                finish(self._commands.close_context(lane.record, number - 1))

    def recover(self) -> None:
        """Take over from a worker that died: finish what must not wait, publish what is decided."""
        enabled = False
        for lane in self.lanes:
            if not self._u32[lane.record]:
                continue
            enabled = True
            self.reload(lane)
            phase = self._u32[lane.cursor + s.C_PHASE]
            if phase == s.PHASE_RUNNING:
                entry = bytes(self._u8[lane.cursor * 4 : lane.cursor * 4 + COMMAND_BYTES])
                opcode = entry[0] | entry[1] << 8
                result = self._commands.recover(lane.where, opcode, entry)
                if result is not None:
                    self._finish(lane, *result)
                else:
                    self._inherited.add(lane.index)
            elif phase == s.PHASE_IDLE:
                self._idle(lane)
                done = self._u32[lane.record + s.Q_DONE]
                self._move(lane, done, self._u32[lane.record + s.Q_TAKEN])
        if enabled and not self._u32[s.R_FREEZE] & s.FREEZE_MIGRATION:
            # A run of light commands may have ended between its completions and its interrupt.
            # (Not so while migrating: then the engine had parked, and the state must not move.)
            self._set_cause(Interrupt.COMPLETION)


_ZERO_CURSOR = bytes(s.CURSOR_BYTES)
_COMMANDS = s.K["commands"]
