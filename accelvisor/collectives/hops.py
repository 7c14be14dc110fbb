"""One rank's end of a collective: its messages, what it does with one, and how it fails.

Sans-IO: everything is a generator that yields what it wants of a driver and is resumed with the
answer. What was sent may be read until the collective ends, so nothing here writes to it again.

A collective that fails does so on every rank with the same error. Whoever meets something wrong
*reports* to all others, directly; whoever gets a report while it waits reports as well. Each rank
then waits half a deadline for the reports of all and judges them (``verdict``).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from accelvisor.collectives import zvc
from accelvisor.collectives.kinds import BY_CODE, Array, combine, finish
from accelvisor.collectives.messages import (
    HEADER_BYTES,
    NOBODY,
    Call,
    Form,
    Head,
    Kind,
    Payload,
    Reason,
    damaged,
    decode,
    encode,
)
from accelvisor.collectives.verdict import Report, judge
from accelvisor.errors import AccelvisorError, DataError

AUTO_DENSITY = 0.4
"""With compress="auto", a block that is guessed to be denser than this goes as it is: less than
half of its bytes could be saved, which packing it costs on a link as fast as memory.
"""


class Send(NamedTuple):
    """Send without waiting. ``report``: it must reach the other past all that was sent before."""

    to: int
    header: bytes
    payload: Payload
    report: bool = False


class Receive(NamedTuple):
    """Wait for (header, payload): the next of ``source``, or any report, whichever is first.

    ``source`` None: reports only. ``patience`` is how many deadlines to wait before
    :class:`Expired` is thrown.
    """

    source: int | None
    patience: float = 1.0


class Waiting(NamedTuple):
    """Ask whether a message of ``source`` is there; a bool."""

    source: int


class Flush(NamedTuple):
    """Wait until everything sent has left its buffers."""


class Expired(Exception):  # noqa: N818 - reads as what happened
    """A driver throws it in: the deadline passed. ``whom``: a rank that did not take a message."""

    def __init__(self, whom: int = NOBODY) -> None:
        super().__init__("a collective's deadline passed")
        self.whom = whom


Command: TypeAlias = Send | Receive | Waiting | Flush
Steps: TypeAlias = Generator[Command, Any, Any]


@dataclass(slots=True)
class Stats:
    """What one rank sent, and what it would have been dense; ``densities`` by step."""

    messages: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    packed_messages: int = 0
    densities: dict[int, list[float]] = field(default_factory=dict)


class _Told(Exception):  # noqa: N818
    """Another rank reported."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head


class _Different(Exception):  # noqa: N818
    """A message of another call."""


class Hops:
    """The state of one collective on one rank.

    Args:
        call: what all must agree on. rank: of this one. compress: "auto", "always" or "never".
        sequence: how many collectives this communicator began before.
    """

    def __init__(
        self, call: Call, rank: int, compress: str, sequence: int, exact: bool = False
    ) -> None:
        kind = BY_CODE[call.dtype]
        # What is only copied keeps its bits, -0.0 and NaN payloads: it is packed as an integer.
        self.kind = BY_CODE[_UNSIGNED[kind.width]] if exact else kind
        self.call, self.rank, self.compress, self.sequence = call, rank, compress, sequence
        self.stats = Stats()
        self._step = 0
        self._source = NOBODY

    # --- messages --------------------------------------------------------------------------------

    def send(self, to: int, step: int, part: int, form: Form, payload: Array, n: int) -> Steps:
        """Send ``payload`` (1-D), which holds ``n`` values."""
        self.stats.messages += 1
        self.stats.sent_bytes += payload.nbytes + HEADER_BYTES
        self.stats.dense_bytes += n * self.kind.width + HEADER_BYTES
        if form is Form.PACKED:
            self.stats.packed_messages += 1
            nnz = zvc.HEADER.unpack(payload[: zvc.HEADER.size].tobytes())[4]
            self.stats.densities.setdefault(step, []).append(nnz / n if n else 0.0)
        head = Head(
            Kind.DATA, form, self.call, self.rank, step, part, self.sequence, payload.nbytes
        )
        yield Send(to, encode(head), payload)

    def receive(self, source: int, step: int, part: int) -> Generator[Command, Any, Message]:
        """The message of ``source`` for this step and part."""
        self._step, self._source = step, source
        raw, payload = yield Receive(source)
        head = decode(raw)
        if head.kind is Kind.REPORT:
            raise _Told(head)
        if head.call != self.call or head.sequence != self.sequence:
            raise _Different
        if (head.sender, head.step, head.part) != (source, step, part):
            raise damaged(f"step {head.step} of rank {head.sender} where {step} of {source} is due")
        return Message(Form(head.form), payload)

    # --- values ----------------------------------------------------------------------------------

    def form(self, x: Array) -> tuple[Form, Array]:
        """How ``x`` (1-D) travels."""
        if self.compress == "always" or (
            self.compress == "auto" and x.size and zvc.density(x, self.kind) <= AUTO_DENSITY
        ):
            return Form.PACKED, zvc.pack(x, self.kind)
        return Form.DENSE, x

    def dense(self, message: Message, n: int) -> Array:
        """The values of a dense message."""
        raw = np.frombuffer(message.payload, np.uint8)
        if raw.size != n * self.kind.width:
            raise damaged(f"{raw.size} bytes where {n} values of {self.kind.name} are due")
        if raw.ctypes.data % self.kind.width:
            raw = raw.copy()
        return raw.view(self.kind.storage)

    def relay(self, message: Message, own: Array) -> tuple[Form, Array]:
        """message op own, as it travels on."""
        kind, op = self.kind, self.call.op
        if message.form is Form.DENSE:
            result = np.empty_like(own)
            combine(kind, op, self.dense(message, own.size), own, result)
            # What came dense hardly gets sparser by adding: nobody looks again.
            return self.form(result) if self.compress == "always" else (Form.DENSE, result)
        packed = zvc.open_packed(message.payload, kind, own.size)
        if self._stays_packed(packed, own):
            return Form.PACKED, zvc.merge_dense(packed, own, op)
        result = np.empty_like(own)
        zvc.fold(packed, own, op, result)
        return Form.DENSE, result

    def _stays_packed(self, packed: zvc.Packed, own: Array) -> bool:
        if self.compress != "auto":
            return self.compress == "always"
        mine = zvc.density(own, self.kind)
        theirs = packed.nnz / packed.n if packed.n else 0.0
        # Of independent masks: 1 - (1 - a)(1 - b) of a sum's values are not zero.
        return mine + theirs - mine * theirs <= AUTO_DENSITY

    def fold(self, message: Message, own: Array, out: Array) -> None:
        """out = message op own, finished. ``out``: 1-D, of own's size, not own."""
        if message.form is Form.DENSE:
            combine(self.kind, self.call.op, self.dense(message, own.size), own, out)
        else:
            zvc.fold(zvc.open_packed(message.payload, self.kind, own.size), own, self.call.op, out)
        finish(self.kind, self.call.op, out)

    def take(self, message: Message, out: Array) -> None:
        """out = message."""
        if message.form is Form.DENSE:
            np.copyto(out, self.dense(message, out.size))
        else:
            zvc.unpack(zvc.open_packed(message.payload, self.kind, out.size), out)

    # --- failing ---------------------------------------------------------------------------------

    def guarded(self, steps: Steps) -> Steps:
        """``steps``; what goes wrong in them goes wrong on every rank.

        Raises:
            UsageError: ``collective-mismatch``. UnavailableError: ``collective-rank-lost``.
            DeadlineError: ``collective-deadline``. DataError: ``collective-message``.
        """
        try:
            result = yield from steps
            yield Flush()
            return result
        except _Told as told:
            there = yield Waiting(self._source)
            reason = Reason.SLOW if there else Reason.TOLD
            error = yield from self._confer(reason, self._source, told.head)
        except Expired as expired:
            whom = self._source if expired.whom == NOBODY else expired.whom
            error = yield from self._confer(Reason.LATE, whom)
        except _Different:
            error = yield from self._confer(Reason.DIFFERENT, NOBODY)
        except DataError as e:
            error = yield from self._confer(Reason.DAMAGED, NOBODY)
            error.__cause__ = e
        raise error

    def _confer(
        self, reason: Reason, whom: int, head: Head | None = None
    ) -> Generator[Command, Any, AccelvisorError]:
        mine = Report(self.call, self.sequence, reason, self._step, whom)
        reports = {self.rank: mine}
        raw = encode(
            Head(Kind.REPORT, reason, self.call, self.rank, self._step, whom, self.sequence, 0)
        )
        for other in range(self.call.size):
            if other != self.rank:
                yield Send(other, raw, b"", report=True)
        while True:
            if head is not None and head.sender < self.call.size:
                reports[head.sender] = Report(
                    head.call, head.sequence, Reason(head.form), head.step, head.part
                )
            if len(reports) == self.call.size:
                break
            try:
                answer, _ = yield Receive(None, patience=0.5)
                head = decode(answer)
            except Expired:
                break
            except DataError:
                head = None
        return judge(self.call.size, reports)


class Message(NamedTuple):
    """A message that is due."""

    form: Form
    payload: Payload


_UNSIGNED = {1: 16, 2: 17, 4: 18, 8: 19}
"""dtype of the unsigned integers by width (accelvisor.abi.dtypes)."""
