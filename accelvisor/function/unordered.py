"""Commands that are not ordered: from the ring to waiting queues and engines, and out of order to
the completion ring.

Each has a record in the state from the moment it leaves the ring. Its phase says how far it is, and
is stored last; whatever a worker was at when it died, the next one reads the records and goes on,
so that no command is lost and none completes twice. What the scheduler knows is derived from them.

A command that runs has the cursor of its engine. Commands that need none (NOP) end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

from accelvisor.abi.commands import (
    ANY_CHIP,
    COMMAND_KINDS,
    SCHEDULE,
    SCHEDULE_AT,
    Flag,
    Opcode,
)
from accelvisor.abi.registers import COMMAND_BYTES, QueueStatus
from accelvisor.abi.status import CommandStatus
from accelvisor.function import blame
from accelvisor.function import state as s
from accelvisor.function.commands import Commands
from accelvisor.function.lanes import Lane, judge
from accelvisor.function.pauses import Pauses, Waiting, finish
from accelvisor.function.records import Records
from accelvisor.function.running import Fault, Result, Where
from accelvisor.function.scheduler import COMPUTE, NOTHING, TRANSFER, Command, Scheduler, Step
from accelvisor.function.state import State
from accelvisor.kernels.declare import BYTES_PER_CYCLE, ISSUE_CYCLES
from accelvisor.limits import LIMITS

_M32 = 0xFFFF_FFFF
_KINDS = frozenset(int(kind) for kind in COMMAND_KINDS)
_FLAGS = int(Flag.PLAIN | Flag.SYNC | Flag.CONDITIONAL)
_SYNC, _CONDITIONAL = int(Flag.SYNC), int(Flag.CONDITIONAL)
_FAULTED = int(QueueStatus.FAULTED)
_COPIES = frozenset((int(Opcode.COPY_IN), int(Opcode.COPY_OUT)))
_ALLOWED = frozenset((*_COPIES, int(Opcode.NOP), int(Opcode.LAUNCH), int(Opcode.GRAPH_LAUNCH)))


class _Task:
    """A command on its engine."""

    __slots__ = ("blocked", "command", "inherited", "lane", "release", "steps", "where")

    def __init__(self, lane: Lane, command: Command, inherited: bool = False) -> None:
        self.lane = lane
        self.command = command
        self.where = Where.on_engine(lane.index, command.engine)
        self.steps: Pauses[Result] | None = None
        self.release: Pauses[None] | None = None
        self.blocked: Waiting | None = None
        #: a predecessor began it
        self.inherited = inherited

    def waits(self) -> bool:
        """Whether it could not go on now."""
        return self.blocked is not None and not self.blocked.ready()

    def close(self) -> Waiting | None:
        """Forget what is in progress; what that waits for."""
        asked = self.blocked
        for work in (self.steps, self.release):
            if work is not None:
                work.close()
        self.steps = self.release = self.blocked = None
        return asked


class Unordered:
    """Runs on the front end's thread alone.

    Args:
        fault: stops the context of a lane: (lane, status, cookie, text).
        note: tells the guest why a command was refused: (lane, status, cookie, text).
        work: told of each command that succeeded: its opcode.
    """

    def __init__(
        self,
        state: State,
        window: memoryview,
        entries: int,
        lanes: list[Lane],
        commands: Commands,
        chips: int,
        set_cause: Callable[[int], None],
        fault: Callable[[Lane, CommandStatus, int, str], None],
        note: Callable[[Lane, CommandStatus, int, str], None],
        work: Callable[[int], None],
    ) -> None:
        self._state = state
        self._u8, self._u32, self._u64 = state.u8, state.u32, state.u64
        self._records = Records(state, window, entries, lanes, set_cause)
        self._lanes = lanes
        self._commands = commands
        self._fault = fault
        self._note = note
        self._work = work
        self.scheduler = Scheduler(len(lanes), chips)
        self._tasks: dict[int, _Task] = {}
        #: commands that ended so far: what could not begin is looked at again when it moved
        self.ended = 0
        #: what a command completes with whose context has stopped
        self.stopped = CommandStatus.CONTEXT_STOPPED
        self.points = blame.CRASH

    # --- what the front end asks ------------------------------------------------------------------

    def outstanding(self, lane: Lane) -> int:
        """Commands of a queue that have left the ring and are not complete."""
        return self.scheduler.lanes[lane.index].outstanding

    def pending(self, lane: Lane) -> bool:
        """Whether a command of the queue could go on now."""
        if self.scheduler.lanes[lane.index].ready and lane.stalled != self.ended:
            return True
        return any(
            task.lane is lane and not task.waits() for task in tuple(self._tasks.values())
        )

    def blocked(self) -> Iterator[Waiting]:
        """What commands on engines wait for."""
        return (task.blocked for task in self._tasks.values() if task.blocked is not None)

    def advance(self) -> bool:
        """A step of each command on an engine. False when all of them wait, or there is none."""
        progress = False
        for task in tuple(self._tasks.values()):
            if not task.waits():
                self._advance(task)
                progress = True
        return progress

    def dispatch(self) -> bool:
        """Start what may on engines that are free. False when nothing could."""
        progress = False
        while self.scheduler.heads and (command := self.scheduler.select()) is not None:
            lane = self._lanes[command.lane]
            ready = self.scheduler.lanes[command.lane].ready
            if ready and ready[0] is command:
                ready.popleft()
            else:
                self._records.take(lane, command, command.entry, s.K_READY)
                self.scheduler.taken(command)
            lane.stalled = -1
            self._start(lane, command)
            progress = True
        return progress

    def front(self, lane: Lane) -> bool:
        """Bring the next command of the front list on its way. False when it needs an engine."""
        command = self.scheduler.lanes[lane.index].ready[0]
        if command.kind != NOTHING:
            self.scheduler.propose(command)
            lane.stalled = self.ended
            return False
        self._start(lane, self.scheduler.lanes[lane.index].ready.popleft())
        return True

    def take(self, lane: Lane, entry: bytes) -> bool:
        """Bring the next entry of the ring, which is not ordered, on its way. False when it stays
        there: until it may wait, or an engine is free.
        """
        slot = self._records.free(lane)
        if lane.index in self.scheduler.heads or slot is None:
            lane.stalled = self.ended
            return False
        command, why = self._decode(lane, entry, slot)
        step = self.scheduler.consider(command) if why is None else Step.GO
        if step is Step.UNKNOWN:
            text = f"depends on {command.on}, which neither runs nor is known as complete"
            why = CommandStatus.BAD_DEPENDENCY, text
        elif step is Step.TWICE:
            why = CommandStatus.BAD_DESCRIPTOR, f"the command with id {command.own} still runs"
        if why is not None:
            self._refuse(lane, command, entry, *why)
        elif step is Step.WAIT:
            self._records.take(lane, command, entry, s.K_WAITING)
            self.scheduler.taken(command)
            self.scheduler.parked(command)
        elif step is Step.STAY or command.kind != NOTHING:
            if step is Step.GO:
                command.entry = entry
                self.scheduler.propose(command)
            lane.stalled = self.ended
            return False
        else:
            self._records.take(lane, command, entry, s.K_READY)
            self.scheduler.taken(command)
            self._start(lane, command)
        return True

    def _refuse(
        self, lane: Lane, command: Command, entry: bytes, status: CommandStatus, text: str
    ) -> None:
        self._note(lane, status, int.from_bytes(entry[4:8], "little"), text)
        self._state.count("refusals")
        command.own = 0  # its ids mean nothing, to whoever reads the record
        bare = entry[:SCHEDULE_AT] + bytes(SCHEDULE.size)
        self._records.take(lane, command, bare, s.K_RESULT, int(status))
        self.scheduler.taken(command)
        self._conclude(lane, command)

    # --- decoding ---------------------------------------------------------------------------------

    def _decode(
        self, lane: Lane, entry: bytes, slot: int
    ) -> tuple[Command, tuple[CommandStatus, str] | None]:
        """The command, and why it is refused, if it is."""
        opcode, flags = entry[0] | entry[1] << 8, entry[2] | entry[3] << 8
        chip, pad, own, on, zero = SCHEDULE.unpack_from(entry, SCHEDULE_AT)
        if opcode not in _ALLOWED:
            wrong = f"command {opcode:#x} can only be ordered"
        elif flags & _FLAGS not in _KINDS or pad or zero:
            wrong = f"flags {flags:#x} are no kind of command, or reserved bits are set"
        elif bool(flags & _SYNC) != bool(own) or bool(flags & _CONDITIONAL) != bool(on):
            wrong = f"flags {flags:#x} do not go with the ids {own} and {on}"
        elif chip != ANY_CHIP and chip >= self.scheduler.chips:
            wrong = f"there is no chip {chip}, the function has {self.scheduler.chips}"
        else:
            kind, cost = self._demand(lane, opcode, entry)
            return Command(lane.index, slot, own, on, chip, kind, cost), None
        bare = Command(lane.index, slot, 0, 0, ANY_CHIP, NOTHING, 0)
        return bare, (CommandStatus.BAD_DESCRIPTOR, wrong)

    def _demand(self, lane: Lane, opcode: int, entry: bytes) -> tuple[int, int]:
        """The type of queue that a command wants, and about how many cycles."""
        if opcode == Opcode.NOP:
            return NOTHING, 0
        if opcode in _COPIES:
            nbytes = int.from_bytes(entry[40:48], "little")
            return TRANSFER, ISSUE_CYCLES + min(nbytes, LIMITS.tensor_bytes) // BYTES_PER_CYCLE
        number = self._u32[lane.record + s.Q_CONTEXT]
        if opcode == Opcode.LAUNCH and number:
            return self._commands.running.kind(number - 1, entry)
        return COMPUTE, 0

    # --- records ----------------------------------------------------------------------------------

    def _start(self, lane: Lane, command: Command) -> None:
        """On its engine, or at once to its end."""
        word, u32 = s.command_word(command.slot), self._u32
        self.scheduler.started(command)
        over = u32[lane.record] == _FAULTED or self.stopped is CommandStatus.REVOKED
        if command.engine < 0 or over:
            status = int(self.stopped) if over else 0
            self.scheduler.stopped(command)
            command.engine = -1
            self._records.decide(command, status, 0, 0)
            self._conclude(lane, command)
            return
        cursor = s.run_word(command.engine)
        self._u8[cursor * 4 : cursor * 4 + COMMAND_BYTES] = self._records.entry(command.slot)
        u32[cursor + s.C_INDEX] = command.slot
        u32[word + s.K_RUN] = command.engine + 1
        u32[word + s.K_PHASE] = s.K_RUNNING
        task = self._tasks[command.engine] = _Task(lane, command)
        self._advance(task)

    # --- on an engine -----------------------------------------------------------------------------

    def _advance(self, task: _Task) -> None:
        task.blocked = None
        if self._u32[s.command_word(task.command.slot) + s.K_PHASE] == s.K_RUNNING:
            try:
                result = self._step(task)
            except Exception as error:
                result = self._failed(task, error)
            if result is None:
                return
            self._records.decide(task.command, *result)
            if not result[0]:
                self._work(self._u32[task.where.cursor] & 0xFFFF)
        self._leave(task)

    def _step(self, task: _Task) -> Result | None:
        if task.steps is None:
            entry = self._records.entry(task.command.slot)
            if task.inherited:
                task.inherited = False
                blamed(self._state, task.where, self.points)
            opcode = entry[0] | entry[1] << 8
            result = self._commands.table[opcode](task.where, entry)
            if isinstance(result, tuple):
                return result
            task.steps = result
        try:
            task.blocked = next(task.steps)
        except StopIteration as stop:
            task.steps = None
            finished: Result = stop.value
            return finished
        return None

    def _failed(self, task: _Task, error: Exception) -> Result:
        status, text, stops = judge(error, f"queue {task.lane.index}: command {task.command.slot}")
        task.steps = None
        cookie = self._u32[task.where.cursor + 1]
        self._note(task.lane, status, cookie, text)
        if stops:
            self._fault(task.lane, status, cookie, text)
        else:
            self._state.count("refusals")
        return int(status), 0, 0

    def _leave(self, task: _Task) -> None:
        """Give back what the command held, in steps, then its engine."""
        running = self._commands.running
        if running.holds(task.where):
            if task.release is None:
                task.release = running.release(task.where)
            for pause in task.release:
                task.blocked = pause
                return
            task.release = None
        self._vacate(task)
        self._conclude(task.lane, task.command)

    def _vacate(self, task: _Task) -> None:
        cursor, engine = task.where.cursor, task.command.engine
        self._state.zero(cursor * 4, s.CURSOR_BYTES)
        self._u32[s.command_word(task.command.slot) + s.K_RUN] = 0
        del self._tasks[engine]
        self.scheduler.stopped(task.command)
        task.command.engine = -1

    # --- the end of a command ---------------------------------------------------------------------

    def _conclude(self, lane: Lane, first: Command) -> None:
        """A command whose result is decided: those that waited for it, then its completion."""
        ending = [first]
        while ending:
            command = ending.pop(0)
            word = s.command_word(command.slot)
            well = not self._u32[word + s.K_STATUS]
            if command.own and well:
                self._records.complete(lane, command.own)
            freed = self.scheduler.ended(command, well)
            for other in freed:
                if well:
                    self._u32[s.command_word(other.slot) + s.K_PHASE] = s.K_READY
                else:
                    self._records.decide(other, int(CommandStatus.ABORTED), 0, 0)
                    ending.append(other)
            self._records.post(lane, command)
            self.ended += 1

    # --- life -------------------------------------------------------------------------------------

    def drop(self, lane: Lane) -> list[Waiting]:
        """Stop the queue's commands at a tile; what they have reached is in the state. Returns what
        they waited for.
        """
        return [asked for task in self._of(lane) if (asked := task.close()) is not None]

    def _of(self, lane: Lane) -> list[_Task]:
        """The queue's commands on engines."""
        return [task for task in self._tasks.values() if task.lane is lane]

    def abort(self, lane: Lane) -> Pauses[None]:
        """Forget every command of a queue that is disabled, in steps; repeatable."""
        running = self._commands.running
        for task in self._of(lane):
            yield from running.release(task.where)
            self._vacate(task)
        self._records.clear(lane)
        self.scheduler.forget(lane.index)
        self.ended += 1

    def revoke(self, lane: Lane) -> None:
        """Complete every command of a queue with REVOKED. Nothing is at work."""
        self.drop(lane)
        self.scheduler.heads.pop(lane.index, None)  # it may be one of the front list
        status = int(CommandStatus.REVOKED)
        for task in self._of(lane):
            finish(self._commands.running.release(task.where))
            self._records.decide(task.command, status, 0, 0)
            self._vacate(task)
            self._conclude(lane, task.command)
        known = self.scheduler.lanes[lane.index]
        while known.ready:
            command = known.ready.popleft()
            self._records.decide(command, status, 0, 0)
            self._conclude(lane, command)

    def reload(self, lane: Lane) -> None:
        """Know a queue's commands again from their records, and go on with what was decided."""
        for task in self._of(lane):
            task.close()
            del self._tasks[task.command.engine]
            self.scheduler.stopped(task.command)
        u32 = self._u32
        found: list[tuple[int, Command, int]] = []
        for slot in self._records.used(lane):
            word = s.command_word(slot)
            phase = u32[word + s.K_PHASE]
            if phase == s.K_POSTING:
                self._records.publish(lane, word)
            elif phase == s.K_FREE:
                self._state.zero(word * 4, s.COMMAND_RECORD_BYTES)
            else:
                run = u32[word + s.K_RUN]
                if run and phase in (s.K_WAITING, s.K_READY):  # it was about to start
                    self._state.zero(s.run_word(run - 1) * 4, s.CURSOR_BYTES)
                    u32[word + s.K_RUN] = 0
                found.append((u32[word + s.K_INDEX], self._known(lane, slot), phase))
        done = u32[lane.record + s.Q_DONE]
        u32[lane.record + s.Q_TAKEN] = done + len(found) & _M32
        found.sort(key=lambda item: item[0] - done & _M32 ^ 0x8000_0000)
        self._resume(lane, found)

    def _known(self, lane: Lane, slot: int) -> Command:
        command, _ = self._decode(lane, self._records.entry(slot), slot)
        command.engine = self._u32[s.command_word(slot) + s.K_RUN] - 1
        return command

    def _resume(self, lane: Lane, found: list[tuple[int, Command, int]]) -> None:
        self._records.keep(lane, {command.slot for _, command, _ in found})
        decided = [command for _, command, phase in found if phase == s.K_RESULT]
        lost = self.scheduler.restore(
            lane.index,
            self._records.completed(lane),
            [(command, phase) for _, command, phase in found],
        )
        for _, command, _ in found:
            if command.engine >= 0:
                task = self._tasks[command.engine] = _Task(lane, command, inherited=True)
                self._commands.running.reclaim(task.where)
        for command in decided:
            if command.engine < 0:
                self._conclude(lane, command)
        for command in lost:
            self._records.decide(command, int(CommandStatus.ABORTED), 0, 0)
            self._conclude(lane, command)


def blamed(state: State, where: Where, points: int) -> None:
    """Count one more worker that died over a command without bringing it further.

    Raises:
        Fault: DEVICE_ERROR, they were too many for chance.
    """
    u32, cursor = state.u32, where.cursor
    reached = crc32(state.u8[(cursor + s.C_BINDINGS) * 4 : (cursor + s.C_VALUE64) * 4])
    if u32[cursor] & 0xFFFF == Opcode.GRAPH_LAUNCH:
        at = s.graph_word(where.graph) * 8
        reached = crc32(state.u8[at : at + s.GRAPH_BYTES], reached)
    if u32[cursor + s.C_REACHED] != reached:
        u32[cursor + s.C_DEATHS] = 0
        u32[cursor + s.C_REACHED] = reached
    u32[cursor + s.C_DEATHS] += points
    if u32[cursor + s.C_DEATHS] >= blame.MOST:
        raise Fault(CommandStatus.DEVICE_ERROR, "worker after worker died over the command")

