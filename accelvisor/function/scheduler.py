"""Which command runs next: the front end's decisions about commands that are not ordered.

A *synchronising* command has an id that later ones of its queue may depend on; a *conditional* one
depends on one such id. While that runs, the conditional command lies in a waiting queue and the
commands behind it in the ring go on. When it is complete, those that waited go, in order, to the
front list, which is served before the ring; when it failed they are aborted. (The mechanism is that
of US 11,366,690, scheduling commands in a virtual computing environment; limits
and the rules for failures are our own.)

Between queues: deficit round robin (Shreedhar and Varghese, IEEE/ACM Transactions on Networking
4(3), 1996) in cycles of the model clock. A queue may start commands of :data:`QUANTUM` cycles in
each round and keeps what it could not use for a longer one. A round in which nobody could afford a
command is not gone through again and again: all get as many quanta at once as the first needs. So a
queue with a command of c cycles for an engine that is free waits for at most ``1 + c // QUANTUM``
rounds, in each of which the other queues start at most a quantum and what they had saved.

Nothing here acts: records, engines and rings are the caller's, and the same code is driven by a
simulation (benchmarks, tests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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

    START = 0  # on the engine that is told
    STAY = 1  # its engine is busy, or nothing more may wait
    SAVE = 2  # its queue has to save for it
    WAIT = 3  # it goes to a waiting queue
    UNKNOWN = 4  # what it depends on is neither running nor known as complete
    TWICE = 5  # its id is that of a command that still runs


class Command:
    """One command that is not ordered.

    Args:
        slot: whatever the caller knows it by.
        own: its id as a SYNC, 0 for none. on: the id that it depends on, 0 for none.
        chip: which chip, ANY_CHIP for any. kind: COMPUTE or TRANSFER, or NOTHING.
        cost: cycles, as far as known.
    """

    __slots__ = ("chip", "cost", "engine", "kind", "lane", "on", "own", "slot")

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


class Lane:
    """What the scheduler knows of one queue."""

    __slots__ = ("completed", "deficit", "outstanding", "pending", "ready", "recent", "waiting")

    def __init__(self) -> None:
        self.deficit = 0
        #: commands taken and not complete
        self.outstanding = 0
        #: ids of SYNCs that are not complete
        self.pending: set[int] = set()
        self.waiting: dict[int, deque[Command]] = {}
        #: the front list
        self.ready: deque[Command] = deque()
        self.completed: set[int] = set()
        self.recent: deque[int] = deque()


class Scheduler:
    """Decides for ``lanes`` queues and the two engines of each of ``chips`` chips."""

    def __init__(self, lanes: int, chips: int) -> None:
        self.chips = chips
        self.lanes = [Lane() for _ in range(lanes)]
        self._busy = [False] * (2 * chips)
        #: the least that a queue lacks for the command it looked at, in this round
        self._lacks = 0

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
        return self.afford(command)

    def afford(self, command: Command) -> Step:
        """Whether a command that depends on nothing any more can start; its engine is set then."""
        engine = self._engine(command) if command.kind != NOTHING else -1
        if engine < 0 and command.kind != NOTHING:
            return Step.STAY
        lacks = command.cost - self.lanes[command.lane].deficit
        if lacks > 0:
            if not self._lacks or lacks < self._lacks:
                self._lacks = lacks
            return Step.SAVE
        command.engine = engine
        return Step.START

    def _engine(self, command: Command) -> int:
        busy, kind = self._busy, command.kind
        if command.chip != ANY_CHIP:
            engine = 2 * command.chip + kind
            return -1 if busy[engine] else engine
        for engine in range(kind, len(busy), 2):
            if not busy[engine]:
                return engine
        return -1

    # --- rounds -----------------------------------------------------------------------------------

    def visit(self, index: int) -> None:
        """A queue's turn in a round begins."""
        self.lanes[index].deficit += QUANTUM

    def leave(self, index: int) -> None:
        """The queue has nothing that could start: what it saved is forgotten."""
        self.lanes[index].deficit = 0

    def advance(self) -> bool:
        """At the end of a round in which nothing started: give everybody the quanta that the first
        command needs. False when no queue saves for one.
        """
        lacks, self._lacks = self._lacks, 0
        if not lacks:
            return False
        quanta = max(0, -(-lacks // QUANTUM) - 1)  # the next visit brings one more
        for lane in self.lanes:
            if lane.deficit:
                lane.deficit += quanta * QUANTUM
        return True

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
        self.lanes[command.lane].deficit -= command.cost
        self._lacks = 0

    def stopped(self, command: Command) -> None:
        """Its engine is free again."""
        if command.engine >= 0:
            self._busy[command.engine] = False

    def vacate(self, engine: int) -> None:
        """Nobody works on an engine."""
        self._busy[engine] = False

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
