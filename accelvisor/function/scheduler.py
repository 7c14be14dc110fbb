"""Which command runs next: the front end's decisions about commands that are not ordered.

A *synchronising* command has an id that later ones of its queue may depend on; a *conditional* one
depends on one such id. While that runs, the conditional command lies in a waiting queue and the
commands behind it in the ring go on. When it is complete, those that waited go, in order, to the
front list, which is served before the ring; when it failed they are aborted. (The mechanism is that
of US 11,366,690, scheduling commands in a virtual computing environment; limits
and the rules for failures are our own.)

Between queues: deficit round robin (Shreedhar and Varghese, IEEE/ACM Transactions on Networking
4(3), 1996) on each engine, in cycles of the model clock. A queue whose turn it is may start
commands of :data:`QUANTUM` cycles and keeps for its next turn what it could not use for a longer
one. Rounds in which nobody can afford a command are not gone through one by one. So a queue with a
command of c cycles waits for at most ``1 + c // QUANTUM`` rounds, in each of which every other
queue starts at most a quantum and what it had saved for one command. Queues whose next command
wants another engine take no part.

Nothing here acts: records, engines and rings are the caller's, and the same code is driven by a
simulation (benchmarks, tests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntEnum

from accelvisor.abi.commands import ANY_CHIP
from accelvisor.function.state import K_READY, K_WAITING
from accelvisor.limits import LIMITS

#: Cycles of the model clock that a queue may start in one round.
QUANTUM = 1000
#: Which of a chip's two engines a command wants.
COMPUTE, TRANSFER, NOTHING = 0, 1, 2


class Step(IntEnum):
    """What is to be done with a command that was looked at."""

    GO = 0  # it needs an engine, or none: nothing else keeps it
    STAY = 1  # in the ring: nothing more may wait for what it depends on
    WAIT = 2  # it goes to a waiting queue
    UNKNOWN = 3  # what it depends on is neither running nor known as complete
    TWICE = 4  # its id is that of a command that still runs


class Command:
    """One command that is not ordered.

    Args:
        slot: whatever the caller knows it by.
        own: its id as a SYNC, 0 for none. on: the id that it depends on, 0 for none.
        chip: which chip, ANY_CHIP for any. kind: COMPUTE or TRANSFER, or NOTHING.
        cost: cycles, as far as known.
    """

    __slots__ = ("chip", "cost", "engine", "entry", "kind", "lane", "on", "own", "slot")

    def __init__(
        self, lane: int, slot: int, own: int, on: int, chip: int, kind: int, cost: int
    ) -> None:
        self.lane = lane
        self.slot = slot
        self.own = own
        self.on = on
        self.chip = chip
        self.kind = kind
        self.cost = cost
        self.engine = -1
        #: of one that is proposed from the ring: what lay there
        self.entry = b""


class Lane:
    """What the scheduler knows of one queue."""

    __slots__ = ("completed", "outstanding", "pending", "ready", "recent", "waiting")

    def __init__(self) -> None:
        #: commands taken and not complete
        self.outstanding = 0
        #: ids of SYNCs that are not complete
        self.pending: set[int] = set()
        self.waiting: dict[int, deque[Command]] = {}
        #: the front list
        self.ready: deque[Command] = deque()
        self.completed: set[int] = set()
        self.recent: deque[int] = deque()


class _Turns:
    """One engine's round: whose turn it is, whether that queue has had its quantum, and what each
    may still start.
    """

    __slots__ = ("deficits", "granted", "lane")

    def __init__(self, lanes: int) -> None:
        self.lane = 0
        self.granted = False
        self.deficits = [0] * lanes

    def next(self, costs: Mapping[int, int]) -> int:
        """The queue of those that have a command for this engine, with its cost, to start it."""
        count, deficits = len(self.deficits), self.deficits
        if len(costs) == 1:
            (self.lane,) = costs
            deficits[self.lane] = 0
            self.granted = False
            return self.lane
        for lane in range(count):
            if lane not in costs:
                deficits[lane] = 0
        for round_number in range(3):
            for _ in range(count):
                cost = costs.get(self.lane)
                if cost is not None:
                    if not self.granted:
                        deficits[self.lane] += QUANTUM
                        self.granted = True
                    if deficits[self.lane] >= cost:
                        deficits[self.lane] -= cost
                        return self.lane
                self.lane = (self.lane + 1) % count
                self.granted = False
            if round_number == 0:
                # Nobody could: as many rounds as the first of them needs, but for the next.
                lacks = min(cost - deficits[lane] for lane, cost in costs.items())
                for lane in costs:
                    deficits[lane] += max(0, -(-lacks // QUANTUM) - 1) * QUANTUM
        raise RuntimeError("a round passed in which everybody was given enough")


class Scheduler:
    """Decides for ``lanes`` queues and the two engines of each of ``chips`` chips."""

    def __init__(self, lanes: int, chips: int) -> None:
        self.chips = chips
        self.lanes = [Lane() for _ in range(lanes)]
        #: by queue: the command that waits for an engine, of the front list or of the ring
        self.heads: dict[int, Command] = {}
        self._busy = [False] * (2 * chips)
        self._turns = [_Turns(lanes) for _ in range(2 * chips)]

    # --- decisions --------------------------------------------------------------------------------

    def consider(self, command: Command) -> Step:
        """What to do with the next command of a queue's ring. The caller does it, and says so."""
        lane = self.lanes[command.lane]
        if command.own in lane.pending:
            return Step.TWICE
        if command.on and command.on not in lane.completed:
            if command.on not in lane.pending:
                return Step.UNKNOWN
            waiting = lane.waiting.get(command.on)
            if waiting is None:
                full = len(lane.waiting) >= LIMITS.waiting_queues
            else:
                full = len(waiting) >= LIMITS.waiting_commands
            return Step.STAY if full else Step.WAIT
        return Step.GO

    def propose(self, command: Command) -> None:
        """A queue's next command needs an engine."""
        self.heads[command.lane] = command

    def select(self) -> Command | None:
        """The next command to start, on the engine that is set in it; it is no longer proposed.
        None when no engine is free for any that is.
        """
        if len(self.heads) == 1:  # by far the most frequent
            (command,) = self.heads.values()
            command.engine = self._engine(command)
            return self.heads.pop(command.lane) if command.engine >= 0 else None
        for engine in sorted({self._engine(command) for command in self.heads.values()} - {-1}):
            costs = {
                lane: command.cost
                for lane, command in self.heads.items()
                if command.kind == engine % 2 and command.chip in (ANY_CHIP, engine // 2)
            }
            lane = self._turns[engine].next(costs)
            command = self.heads.pop(lane)
            command.engine = engine
            return command
        return None

    def _engine(self, command: Command) -> int:
        """A free engine for a command; -1 without one."""
        busy, kind = self._busy, command.kind
        if command.chip != ANY_CHIP:
            engine = 2 * command.chip + kind
            return -1 if busy[engine] else engine
        for engine in range(kind, len(busy), 2):
            if not busy[engine]:
                return engine
        return -1

    # --- what happened ----------------------------------------------------------------------------

    def taken(self, command: Command) -> None:
        """The command left the ring."""
        lane = self.lanes[command.lane]
        lane.outstanding += 1
        if command.own:
            lane.pending.add(command.own)
            lane.completed.discard(command.own)

    def parked(self, command: Command) -> None:
        """It waits for what it depends on."""
        self.lanes[command.lane].waiting.setdefault(command.on, deque()).append(command)

    def started(self, command: Command) -> None:
        """Its engine works on it."""
        if command.engine >= 0:
            self._busy[command.engine] = True

    def stopped(self, command: Command) -> None:
        """Its engine is free again."""
        if command.engine >= 0:
            self._busy[command.engine] = False
    def ended(self, command: Command, well: bool) -> list[Command]:
        """The command is complete. Returns those that waited for it: they are in the front list
        when it went well, else they are nowhere, and the caller has to abort them.
        """
        lane = self.lanes[command.lane]
        lane.outstanding -= 1
        if not command.own:
            return []
        lane.pending.discard(command.own)
        if well:
            self.remember(command.lane, command.own)
        freed = lane.waiting.pop(command.own, None)
        if not freed:
            return []
        if well:
            lane.ready.extend(freed)
        return list(freed)

    def remember(self, index: int, own: int) -> None:
        """An id is complete; of these the last LIMITS.completed_ids are known."""
        lane = self.lanes[index]
        lane.recent.append(own)
        lane.completed.add(own)
        if len(lane.recent) > LIMITS.completed_ids:
            gone = lane.recent.popleft()
            if gone not in lane.recent:
                lane.completed.discard(gone)

    # --- beginning anew ---------------------------------------------------------------------------

    def forget(self, index: int) -> None:
        """The queue is off. Its commands are gone from their engines (:meth:`stopped`)."""
        self.lanes[index] = Lane()
        self.heads.pop(index, None)

    def restore(
        self, index: int, completed: Iterable[int], commands: Iterable[tuple[Command, int]]
    ) -> list[Command]:
        """Know again what a predecessor's records say.

        Args:
            completed: ids, oldest first.
            commands: in the order in which they were taken, with the phase of their record. Those
                that run have their engine set.

        Returns:
            the commands that waited for one which failed, for the caller to abort.
        """
        self.forget(index)
        lane = self.lanes[index]
        for own in completed:
            self.remember(index, own)
        every = list(commands)
        for command, _ in every:
            self.taken(command)
            if command.engine >= 0:
                self._busy[command.engine] = True
        lost = []
        for command, phase in every:
            if phase not in (K_WAITING, K_READY):
                continue
            if phase == K_READY or command.on in lane.completed:
                lane.ready.append(command)
            elif command.on in lane.pending:
                self.parked(command)
            else:
                lost.append(command)
        return lost
