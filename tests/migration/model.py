"""The world around the two machines, for the checker: network, disks, QEMUs, ledger, crashes.

What can happen is written from how QEMU, libvirt and networks behave, not from the tables:

* The network is a *set*: a message that is in it may be delivered at any time, in any order, any
  number of times; a cut empties it. Losing a single message is never delivering it.
* A daemon may die between any two actions, as often as it likes; it comes back with what its
  journal says. What its function process holds (the device) and the ledger stay. QEMU's bus call
  that was waiting fails. An action under way never ends.
* Timers, cancels, link events and repeated rounds may come in any state.
* QEMU asks (ListQueuedOwners, Save, Load) in that order, and once. After a VM was stopped the
  source's QEMU may run again at any time, even though the destination's runs: libvirt in two minds
  is allowed. The destination's runs only after Load was answered with yes. Each may end any time.
* The arbiter may be unreachable, and may do what it was asked without the answer arriving.

What must hold is in :class:`World` too (``_must`` and ``invariant``), and is written from the
promise, not from the tables: one computes, and none after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelvisor.migration import actions as do
from accelvisor.migration import destination, source
from accelvisor.migration import messages as wire
from tests.migration.search import Violation

S, SE = source.State, source.Event
D, DE = destination.State, destination.Event


class Node(NamedTuple):
    """One state of the world. Sets are bit masks; states are indices; ``-1`` is nothing."""

    s: int  # the machine's state; -1: the daemon is down
    s_disk: int
    s_device: str  # run | frozen | back (computes after a freeze) | refrozen | gone
    s_pending: int  # how actions under way end
    qs: str  # run | wait | yes | saved | failed (stopped; may run again) | back | gone
    d: int
    d_disk: int
    d_device: str  # none | empty | staged | loaded | run
    d_pending: int
    qd: str  # wait | load | ok | fail | run | gone
    ledger: str  # none | prepared | committed | aborted
    to_s: int  # messages
    to_d: int
    past: int  # bits: SEALED_SENT, VERIFIED_SENT, TOKEN


SEALED_SENT, VERIFIED_SENT, TOKEN = 1, 2, 4
S_STATES, D_STATES = list(S), list(D)
S_INDEX = {state: number for number, state in enumerate(S)}
D_INDEX = {state: number for number, state in enumerate(D)}
START = Node(
    S_INDEX[S.START], -1, "run", 0, "run", D_INDEX[D.START], -1, "none", 0, "wait", "none", 0, 0, 0
)

TO_S = {
    wire.Reserve: SE.RESERVE, wire.Accept: SE.ACCEPT, wire.Verified: SE.VERIFIED,
    wire.Refuse: SE.REFUSE, wire.Commit: SE.COMMIT, wire.Discarded: SE.DISCARDED,
    wire.Running: SE.RUNNING,
}  # fmt: skip
TO_D = {
    wire.Offer: DE.OFFER, wire.Refuse: DE.REFUSE, wire.Sealed: DE.SEALED, wire.Abort: DE.ABORT,
    wire.Committed: DE.ARBITER_COMMITTED, wire.Aborted: DE.ARBITER_ABORTED,
}  # fmt: skip
#: They change nothing that is modelled, so they may simply come at any time.
UNCOUNTED = (wire.Round, wire.Ack, wire.Resume)
BITS_S = {kind: 1 << number for number, kind in enumerate(TO_S)}
BITS_D = {kind: 1 << number for number, kind in enumerate(TO_D)}
S_RESULTS = [SE.INSPECTED, SE.FROZEN, SE.SHIPPED, SE.SEALED, SE.THAWED, SE.SCRUBBED, SE.FAILED,
             SE.ARBITER_COMMITTED, SE.ARBITER_ABORTED, SE.ARBITER_UNREACHABLE]  # fmt: skip
D_RESULTS = [DE.RESERVED, DE.VERIFIED, DE.LOADED, DE.THAWED, DE.DISCARDED, DE.FAILED,
             DE.ARBITER_COMMITTED, DE.ARBITER_ABORTED, DE.ARBITER_UNREACHABLE]  # fmt: skip
S_BIT = {event: 1 << number for number, event in enumerate(S_RESULTS)}
D_BIT = {event: 1 << number for number, event in enumerate(D_RESULTS)}
S_ARBITER = sum(bit for event, bit in S_BIT.items() if event.name.startswith("ARBITER"))
D_ARBITER = sum(bit for event, bit in D_BIT.items() if event.name.startswith("ARBITER"))
S_ANY_TIME = (SE.CANCEL, SE.DEADLINE, SE.LINK_LOST, SE.LINK_BACK, SE.ACK, SE.RESUME)
D_ANY_TIME = (DE.CANCEL, DE.DEADLINE, DE.LINK_LOST, DE.LINK_BACK, DE.ROUND)
S_QEMU = (SE.QUIESCE, SE.SAVE, SE.QEMU_RESUMED, SE.QEMU_FAILED, SE.QEMU_GONE)
D_QEMU = (DE.LOAD, DE.BAD_LOAD, DE.QEMU_RESUMED, DE.QEMU_GONE)
S_RESTARTS = (SE.RESTARTED_RUNNING, SE.RESTARTED_PAUSED, SE.RESTARTED_GONE)
D_RESTARTS = (DE.RESTARTED_RUNNING, DE.RESTARTED_PAUSED, DE.RESTARTED_GONE)
#: Actions that are nothing to this model.
SILENT = (do.SetDeadline, do.ClearDeadline, do.Report, do.AnswerHook, do.NextRound, do.Rewind)

Labelled = tuple[str, str, Node]  # (kind of step, what, next)


@dataclass
class World:
    """Both tables in their surroundings.

    Args:
        etcd: the arbiter is etcd; otherwise the source's ledger.
        s_table, d_table: the machines, or deliberately wrong ones.
        mortal: which daemons may die, "s" and "d".
    """

    etcd: bool
    s_table: Mapping[S, Mapping[SE, Any]] = field(default_factory=lambda: source.TABLE)
    d_table: Mapping[D, Mapping[DE, Any]] = field(default_factory=lambda: destination.TABLE)

    mortal: str = "sd"
    start: Node = START

    def __post_init__(self) -> None:
        self._s = _compiled(self.s_table, S_STATES)
        self._d = _compiled(self.d_table, D_STATES)
        self._to_d = dict(TO_D)
        if self.etcd:
            self._to_d[wire.Committed] = self._to_d[wire.Aborted] = DE.NUDGE
        self._s_heeds = _Heeds(self._s, BITS_S, TO_S, S_BIT, S_QEMU, S_RESTARTS)
        self._d_heeds = _Heeds(self._d, BITS_D, self._to_d, D_BIT, D_QEMU, D_RESTARTS)

    def canonical(self, node: Node) -> Node:
        """The same world without what can have no effect any more: messages, endings of actions
        and QEMU events that neither machine heeds in any state that it can still come to.

        This is what makes the search end soon. It is derived from the tables that are checked, so
        it cannot hide what a wrong table does.
        """
        to_s, s_pending, s_deaf = self._s_heeds.of(node.s, node.s_disk)
        to_d, d_pending, d_deaf = self._d_heeds.of(node.d, node.d_disk)
        past = node.past | (0 if node.qd == "wait" else TOKEN)  # only a waiting QEMU takes it
        made = (
            node[0], node[1], node[2], node[3] & s_pending, "any" if s_deaf else node[4],
            node[5], node[6], node[7], node[8] & d_pending, "any" if d_deaf else node[9],
            node[10], node[11] & to_s, node[12] & to_d, past,
        )  # fmt: skip
        return node if made == node else Node(*made)

    # --- what can happen -------------------------------------------------------------------------

    def steps(self, node: Node) -> Iterator[Labelled]:
        yield from self._qemus(node)
        if node.s >= 0:
            if "s" in self.mortal:
                yield "crash", "source dies", _s_crash(node)
            yield from self._s_own(node)
        else:
            yield from self._s_restart(node)
        if node.d >= 0:
            if "d" in self.mortal:
                yield "crash", "destination dies", _d_crash(node)
            yield from self._d_own(node)
        else:
            yield from self._d_restart(node)
        if node.to_s or node.to_d:
            yield "cut", "network loses everything", node._replace(to_s=0, to_d=0)

    def _s_own(self, node: Node) -> Iterator[Labelled]:
        for kind, event in TO_S.items():
            if node.to_s & BITS_S[kind]:
                yield from self._at_s(node, event, "net")
        for event in S_ANY_TIME:
            yield from self._at_s(node, event, "s" if event is SE.DEADLINE else "any")
        for event in S_RESULTS:
            if node.s_pending & S_BIT[event]:
                rest = node._replace(s_pending=node.s_pending & ~S_BIT[event])
                yield from self._at_s(rest, event, "s", lost=True)

    def _d_own(self, node: Node) -> Iterator[Labelled]:
        if node.d_disk < 0:
            yield from self._at_d(node, DE.BEGIN, "any")
        for kind, event in self._to_d.items():
            if node.to_d & BITS_D[kind]:
                yield from self._at_d(node, event, "net")
        for event in D_ANY_TIME:
            yield from self._at_d(node, event, "d" if event is DE.DEADLINE else "any")
        for event in D_RESULTS:
            if node.d_pending & D_BIT[event]:
                rest = node._replace(d_pending=node.d_pending & ~D_BIT[event])
                yield from self._at_d(rest, event, "d", lost=True)

    def _s_restart(self, node: Node) -> Iterator[Labelled]:
        if node.s_disk < 0:
            yield "s", "source starts anew", node._replace(s=S_INDEX[S.START])
            return
        up = node._replace(s=node.s_disk)
        event = {"run": SE.RESTARTED_RUNNING, "back": SE.RESTARTED_RUNNING}.get(
            node.qs, SE.RESTARTED_GONE if node.qs == "gone" else SE.RESTARTED_PAUSED
        )
        yield from self._at_s(up, event, "s", lost=True)

    def _d_restart(self, node: Node) -> Iterator[Labelled]:
        if node.d_disk < 0:
            yield "d", "destination starts anew", node._replace(d=D_INDEX[D.START])
            return
        up = node._replace(d=node.d_disk)
        if node.qd == "run":
            yield from self._at_d(up, DE.RESTARTED_RUNNING, "d", lost=True)
        gone = node.qd == "gone"
        # A VM that ran may be paused by its user by now.
        event = DE.RESTARTED_GONE if gone else DE.RESTARTED_PAUSED
        yield from self._at_d(up, event, "d", lost=True)

    def _qemus(self, node: Node) -> Iterator[Labelled]:
        up = node.s >= 0
        qs = node.qs
        if qs == "run":
            stopped = node._replace(qs="wait" if up else "failed")
            yield from self._at_s(stopped, SE.QUIESCE, "qemu", lost=True)
            yield from self._at_s(node, SE.QEMU_FAILED, "qemu")
            yield from self._at_s(node, SE.QEMU_RESUMED, "qemu")
        if qs == "yes":
            yield from self._at_s(node, SE.SAVE, "qemu")
        if qs in ("wait", "yes", "saved"):
            yield from self._at_s(node._replace(qs="failed"), SE.QEMU_FAILED, "qemu", lost=True)
        if qs in ("wait", "yes", "saved", "failed"):
            yield from self._at_s(node._replace(qs="back"), SE.QEMU_RESUMED, "qemu", lost=True)
        if qs not in ("gone", "any"):
            yield from self._at_s(node._replace(qs="gone"), SE.QEMU_GONE, "qemu", lost=True)
        if node.qd == "wait" and node.past & TOKEN:
            called = node._replace(qd="load" if node.d >= 0 else "fail")
            yield from self._at_d(called, DE.LOAD, "qemu", lost=True)
            yield from self._at_d(called, DE.BAD_LOAD, "qemu", lost=True)
        if node.qd in ("ok", "run"):
            yield from self._at_d(node._replace(qd="run"), DE.QEMU_RESUMED, "d", lost=True)
        if node.qd not in ("gone", "any"):
            yield from self._at_d(node._replace(qd="gone"), DE.QEMU_GONE, "qemu", lost=True)

    # --- one machine's step ----------------------------------------------------------------------

    def _at_s(self, node: Node, event: SE, kind: str, lost: bool = False) -> Iterator[Labelled]:
        """The event at the source, and every death between two of its actions.

        ``lost``: the step is one even when the machine does nothing about it.
        """
        entry = self._s[node.s].get(event) if node.s >= 0 else None
        if entry is None:
            if lost:
                yield kind, f"source ignores {event}", node
            return
        target, actions = entry
        what = f"source {event}"
        worlds = [node]
        for action in actions:
            if worlds[0] is not node and "s" in self.mortal:
                for world in worlds:
                    yield "crash", what + " (dies)", _s_crash(world)
            worlds = [after for world in worlds for after in self._s_do(world, action)]
        for world in worlds:
            yield kind, what, world._replace(s=target)

    def _at_d(self, node: Node, event: DE, kind: str, lost: bool = False) -> Iterator[Labelled]:
        entry = self._d[node.d].get(event) if node.d >= 0 else None
        if entry is None:
            if lost:
                yield kind, f"destination ignores {event}", node
            return
        target, actions = entry
        what = f"destination {event}"
        worlds = [node]
        for action in actions:
            if worlds[0] is not node and "d" in self.mortal:
                for world in worlds:
                    yield "crash", what + " (dies)", _d_crash(world)
            worlds = [after for world in worlds for after in self._d_do(world, action)]
        for world in worlds:
            yield kind, what, world._replace(d=target)

    def _s_do(self, node: Node, action: do.Action) -> list[Node]:
        def ends(world: Node, *events: SE) -> list[Node]:
            return [world._replace(s_pending=world.s_pending | S_BIT[e]) for e in events]

        match action:
            case do.Journal(state):
                return [node._replace(s_disk=S_INDEX[S(state)])]
            case do.Send(kind):
                return [self._s_send(node, kind)]
            case do.AskArbiter(decision):
                # Whoever asks again waits for the newest answer; a decided one never changes.
                asking = node._replace(s_pending=node.s_pending & ~S_ARBITER)
                return [
                    world
                    for after, answer in self._asked(asking, decision)
                    for world in ends(after, SE(answer))
                ]
            case do.Inspect():
                return ends(node, SE.INSPECTED, SE.FAILED)
            case do.StartRounds():
                return [node, *ends(node, SE.FAILED)]
            case do.ShipLast():
                return ends(node, SE.SHIPPED, SE.FAILED)
            case do.Freeze():
                frozen = {"run": "frozen", "back": "refrozen"}.get(node.s_device, node.s_device)
                return [
                    *ends(node._replace(s_device=frozen), SE.FROZEN),
                    *ends(node, SE.FAILED),
                ]
            case do.Seal():
                _must(node.ledger == "none", "an epoch is prepared once")
                _must(node.s_device == "frozen", "only a frozen device is sealed")
                prepared = node._replace(ledger="prepared")
                return [*ends(prepared, SE.SEALED, SE.FAILED), *ends(node, SE.FAILED)]
            case do.AnswerOwners(yes):
                if yes:
                    _must(node.s_disk == S_INDEX[S.SEALED], "owners: yes before the journal")
                    _must(bool(node.past & VERIFIED_SENT), "owners: yes before it was verified")
                    _must(node.ledger == "prepared", "owners: yes to a decided epoch")
                if node.qs != "wait":
                    return [node]
                return [node._replace(qs="yes" if yes else "failed")]
            case do.AnswerSave(yes):
                if not yes:
                    return [node._replace(qs="failed" if node.qs == "yes" else node.qs)]
                _must(node.s_disk == S_INDEX[S.SEALED], "a token before the journal")
                return [node._replace(qs="saved", past=node.past | TOKEN)]
            case do.Thaw():
                return self._s_thaw(node)
            case do.Scrub():
                _must(node.ledger == "committed", "scrubbed what is still ours")
                return [*ends(node._replace(s_device="gone"), SE.SCRUBBED), *ends(node, SE.FAILED)]
        raise AssertionError(action)

    def _s_thaw(self, node: Node) -> list[Node]:
        if node.s_device == "frozen":
            _must(node.s_disk == S_INDEX[S.ABORTED], "the source thaws before it is on its disk")
            _must(node.ledger != "committed", "the source thaws after the commit")
            if node.past & SEALED_SENT:
                _must(node.ledger == "aborted", "the source thaws a sealed state undecided")
        _must(node.s_device != "gone", "the source thaws what it scrubbed")
        thawed = {"frozen": "back"}.get(node.s_device, node.s_device)
        done = node._replace(s_device=thawed, s_pending=node.s_pending | S_BIT[SE.THAWED])
        return [done, node._replace(s_pending=node.s_pending | S_BIT[SE.FAILED])]

    def _s_send(self, node: Node, kind: type[wire.Message]) -> Node:
        disk = S_STATES[node.s_disk] if node.s_disk >= 0 else None
        if kind is wire.Offer:
            _must(disk is not None, "an offer before the journal")
        if kind is wire.Sealed:
            _must(disk is S.SEALED, "a seal before the journal")
            node = node._replace(past=node.past | SEALED_SENT)
        if kind is wire.Committed:
            _must(disk in (S.COMMITTED, S.DONE), "Committed before the journal")
            _must(node.ledger == "committed", "Committed although it is not")
        if kind is wire.Refuse:
            _must(disk is S.REFUSED, "a refusal before the journal")
        if kind in (wire.Abort, wire.Aborted):
            _must(disk in (S.ABORTED, S.RETURNED), "Aborted before the journal")
            _must(node.ledger != "committed", "Aborted although it is committed")
        return node if kind in UNCOUNTED else node._replace(to_d=node.to_d | BITS_D[kind])

    def _d_do(self, node: Node, action: do.Action) -> list[Node]:
        def ends(world: Node, *events: DE) -> list[Node]:
            return [world._replace(d_pending=world.d_pending | D_BIT[e]) for e in events]

        match action:
            case do.Journal(state):
                return [node._replace(d_disk=D_INDEX[D(state)])]
            case do.Send(kind):
                return [self._d_send(node, kind)]
            case do.AskArbiter(decision):
                if not self.etcd:
                    return [node._replace(to_s=node.to_s | BITS_S[wire.Commit])]
                asking = node._replace(d_pending=node.d_pending & ~D_ARBITER)
                return [
                    world
                    for after, answer in self._asked(asking, decision)
                    for world in ends(after, DE(answer))
                ]
            case do.Prepare():
                return [*ends(node._replace(d_device="empty"), DE.RESERVED), *ends(node, DE.FAILED)]
            case do.Verify():
                return [
                    *ends(node._replace(d_device="staged"), DE.VERIFIED),
                    *ends(node, DE.FAILED),
                ]
            case do.Load():
                _must(node.d_device == "staged", "nothing verified to load")
                return [
                    *ends(node._replace(d_device="loaded"), DE.LOADED),
                    *ends(node, DE.FAILED),
                ]
            case do.AnswerLoad(yes):
                if yes:
                    _must(node.d_disk == D_INDEX[D.LOADED], "Load OK before the journal")
                    _must(node.d_device == "loaded", "Load OK without a loaded device")
                if node.qd != "load":
                    return [node]
                return [node._replace(qd="ok" if yes else "fail")]
            case do.Thaw():
                _must(node.d_disk == D_INDEX[D.COMMITTED], "the destination thaws before its disk")
                _must(node.ledger == "committed", "the destination thaws what is not committed")
                _must(node.d_device in ("loaded", "run"), "the destination thaws an empty device")
                return [*ends(node._replace(d_device="run"), DE.THAWED), *ends(node, DE.FAILED)]
            case do.Discard():
                _must(node.d_device != "run", "discards what computes")
                return [*ends(node._replace(d_device="none"), DE.DISCARDED), *ends(node, DE.FAILED)]
        raise AssertionError(action)

    def _d_send(self, node: Node, kind: type[wire.Message]) -> Node:
        disk = D_STATES[node.d_disk] if node.d_disk >= 0 else None
        needs: dict[type[wire.Message], tuple[D, ...]] = {
            wire.Reserve: (D.RESERVING,),
            wire.Accept: (D.RECEIVING,),
            wire.Verified: (D.VERIFIED,),
            wire.Refuse: (D.DISCARDED, D.FENCED, D.CLOSED),
            wire.Discarded: (D.DISCARDED, D.FENCED, D.CLOSED),
            wire.Running: (D.RUNNING,),
        }
        if kind in needs:
            _must(disk in needs[kind], f"{kind.__name__} before the journal")
        if kind is wire.Verified:
            node = node._replace(past=node.past | VERIFIED_SENT)
        return node if kind in UNCOUNTED else node._replace(to_s=node.to_s | BITS_S[kind])

    def _asked(self, node: Node, decision: do.Decision) -> list[tuple[Node, str]]:
        """What an arbiter makes of a question: done and answered, done, or nothing."""
        ledger = node.ledger
        if decision is do.Decision.COMMIT and ledger == "prepared":
            ledger = "committed"
        elif decision is do.Decision.ABORT and ledger in ("none", "prepared"):
            ledger = "aborted"
        answer = "arbiter-committed" if ledger == "committed" else "arbiter-aborted"
        done = node._replace(ledger=ledger)
        away = "arbiter-unreachable"
        if done == node:
            return [(node, answer), (node, away)]
        return [(done, answer), (done, away), (node, away)]

    # --- what must hold --------------------------------------------------------------------------

    def invariant(self, node: Node) -> None:
        s_computes = node.s_device in ("run", "back")
        if node.d_device == "run":
            _must(not s_computes, "two compute")
            _must(node.ledger == "committed", "the destination computes without a commit")
            _must(node.s_device in ("frozen", "gone"), "the source computed after its seal")
        if node.ledger == "committed":
            _must(not s_computes, "the source computes after the commit")
            _must(bool(node.past & SEALED_SENT), "committed what was never sealed")


    def shown(self, node: Node) -> str:
        names = node._asdict()
        for key in ("s", "s_disk"):
            names[key] = str(S_STATES[names[key]]) if names[key] >= 0 else "-"
        for key in ("d", "d_disk"):
            names[key] = str(D_STATES[names[key]]) if names[key] >= 0 else "-"
        return " ".join(f"{key}={value}" for key, value in names.items())


def _must(holds: bool, promise: str) -> None:
    if not holds:
        raise Violation(promise)


def _s_crash(node: Node) -> Node:
    qs = "failed" if node.qs in ("wait", "yes") else node.qs
    return node._replace(s=-1, s_pending=0, qs=qs)


def _d_crash(node: Node) -> Node:
    staged = "empty" if node.d_device == "staged" else node.d_device
    qd = "fail" if node.qd == "load" else node.qd
    return node._replace(d=-1, d_pending=0, qd=qd, d_device=staged)


class _Heeds:
    """What a machine can still react to, from a state and what is on its disk."""

    def __init__(
        self,
        rows: list[dict[Any, Any]],
        message_bits: Mapping[Any, int],
        messages: Mapping[Any, Any],
        result_bits: Mapping[Any, int],
        qemu: tuple[Any, ...],
        restarts: tuple[Any, ...],
    ) -> None:
        self._rows, self._qemu, self._restarts = rows, qemu, restarts
        self._messages = [(bit, messages[kind]) for kind, bit in message_bits.items()]
        self._results = [(bit, event) for event, bit in result_bits.items()]
        self._known: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def of(self, state: int, disk: int) -> tuple[int, int, bool]:
        """(mask of messages, mask of endings, QEMU does not matter)."""
        known = self._known.get((state, disk))
        if known is None:
            known = self._known[state, disk] = self._find(state, disk)
        return known

    def _find(self, state: int, disk: int) -> tuple[int, int, bool]:
        future = self._reach({state, disk} if disk >= 0 else {state, 0})
        events = {event for number in future for event in self._rows[number]}
        messages = sum(bit for bit, event in self._messages if event in events)
        results = sum(bit for bit, event in self._results if event in events)
        return messages, results, self._deaf(future)

    def _reach(self, start: set[int]) -> set[int]:
        found = {number for number in start if number >= 0}
        todo = list(found)
        while todo:
            for target, actions in self._rows[todo.pop()].values():
                # A death between two actions begins again at what was journalled.
                disks = [self._index(a.state) for a in actions if isinstance(a, do.Journal)]
                for number in (target, *disks):
                    if number not in found:
                        found.add(number)
                        todo.append(number)
        return found

    def _index(self, state: Any) -> int:
        return S_INDEX[state] if isinstance(state, S) else D_INDEX[state]

    def _deaf(self, future: set[int]) -> bool:
        no = (do.AnswerOwners(False), do.AnswerSave(False), do.AnswerLoad(False))
        for number in future:
            entries = self._rows[number]
            for event in self._qemu:
                target, actions = entries.get(event, (number, []))
                if target != number or any(action not in no for action in actions):
                    return False
            if any(entries.get(e) != entries.get(self._restarts[0]) for e in self._restarts):
                return False
        return True


def _compiled(table: Mapping[Any, Mapping[Any, Any]], states: list[Any]) -> list[dict[Any, Any]]:
    """Per state: event -> (next state's index, actions that the model knows); no-ops left out."""
    index = {state: number for number, state in enumerate(states)}
    rows: list[dict[Any, Any]] = []
    for state in states:
        made = {}
        for event, move in table[state].items():
            if isinstance(move, do.Move):
                actions = [a for a in move.actions if not isinstance(a, SILENT)]
                if actions or move.next is not state:
                    made[event] = (index[move.next], actions)
        rows.append(made)
    return rows
