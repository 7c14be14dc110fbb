"""A queue of the function as its worker runs it: where its words lie, and what is in progress."""

from __future__ import annotations

import logging

from accelvisor.abi.registers import CQ_HEAD, CQ_TAIL, NEED_WAKEUP, SQ_HEAD, SQ_TAIL, WindowLayout
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.dma import DmaFault
from accelvisor.function.objects import Refused
from accelvisor.function.pauses import Pauses, Waiting
from accelvisor.function.running import Fault, Result, Where
from accelvisor.isolation.segments import Unmapped

log = logging.getLogger(__name__)


class Lane:
    """Where one queue's words lie, and its ordered command in progress."""

    __slots__ = (
        "blocked", "closing", "completion", "cq_head", "cq_tail", "cursor", "index", "need_wakeup",
        "record", "release", "sq_head", "sq_tail", "stalled", "submission", "task", "where",
    )  # fmt: skip

    def __init__(self, index: int, layout: WindowLayout) -> None:
        control = layout.control(index)
        self.index = index
        self.record = s.queue_word(index)
        self.cursor = s.cursor_word(index)
        self.where = Where.ordered(index)
        self.submission = layout.submission(index)
        self.completion = layout.completion(index)
        self.sq_tail = (control + SQ_TAIL) // 4
        self.sq_head = (control + SQ_HEAD) // 4
        self.cq_head = (control + CQ_HEAD) // 4
        self.cq_tail = (control + CQ_TAIL) // 4
        self.need_wakeup = (control + NEED_WAKEUP) // 4
        self.task: Pauses[Result] | None = None
        self.release: Pauses[None] | None = None
        self.closing: Pauses[None] | None = None
        #: what the task, or the closing, waits for
        self.blocked: Waiting | None = None
        #: how many commands had ended (Unordered.ended) when the next one could not begin
        self.stalled = -1

    def drop(self) -> None:
        """Forget the ordered command in progress; what it has reached is in the state."""
        for work in (self.task, self.release, self.closing):
            if work is not None:
                work.close()
        self.task = self.release = self.closing = self.blocked = None
        self.stalled = -1

    def waits(self) -> bool:
        """Whether what is in progress waits, and what it waits for is not there yet."""
        if self.blocked is None:
            return False
        if not self.blocked.ready():
            return True
        self.blocked = None
        return False


def judge(error: Exception, what: str) -> tuple[CommandStatus, str, bool]:
    """What an error of a command is to its guest: status, text, and whether its context stops."""
    if isinstance(error, Refused):
        return error.status, str(error), False
    if isinstance(error, (DmaFault, Fault)):
        return error.status, str(error), True
    if isinstance(error, Unmapped):
        return CommandStatus.BAD_ADDRESS, str(error), True
    log.error("%s failed", what, exc_info=error)
    return CommandStatus.DEVICE_ERROR, f"{type(error).__name__}: {error}", True
