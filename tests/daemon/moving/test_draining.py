"""Which VM goes where, and what is said of those that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving.draining import Try, choose, why_not, without_vm
from accelvisor.daemon.moving.planner import Plan, Reason, Severity
from accelvisor.daemon.store import Function
from accelvisor.isolation.resources import Placement, Range
from accelvisor.limits import MIB
from accelvisor.migration.convergence import predict


def able(host: str, downtime_s: float | None = None) -> Try:
    made = predict(MIB, 1e9, 0.0, 0, downtime_s) if downtime_s is not None else None
    return Try(host, Plan((), made))


def unable(host: str, *messages: str) -> Try:
    reasons = [Reason("no-room", Severity.BLOCKER, text, f"mend {text}") for text in messages]
    return Try(host, Plan(reasons))


def test_the_host_with_the_shortest_downtime_is_chosen() -> None:
    tries = [unable("a", "full"), able("b", 0.3), able("c", 0.1)]
    chosen = choose(tries)
    assert chosen is not None
    assert chosen.host == "c"


def test_of_equals_the_first_is_chosen() -> None:
    chosen = choose([able("b"), able("c")])
    assert chosen is not None
    assert chosen.host == "b"


def test_warnings_do_not_keep_a_vm() -> None:
    warned = Try("b", Plan((Reason("x", Severity.WARNING, "y"),)))
    assert choose([warned]) is warned


@pytest.mark.parametrize(
    ("tries", "words"),
    [
        ([], "no other host is trusted"),
        ([unable("b", "it is paused"), unable("c", "it is paused")], "it is paused"),
        ([unable("b", "no cores"), unable("c", "no memory")], "b: no cores; c: no memory"),
    ],
)
def test_why_a_vm_stays(tries: list[Try], words: str) -> None:
    assert choose(tries) is None
    stay = why_not("web", "uuid", tries)
    assert (stay.what, stay.reason) == ("vm", words)
    assert stay.fix


def test_functions_without_a_running_vm_are_told_what_to_do() -> None:
    function = Function(
        uuid="u", name="nn0", profile="small",
        placement=Placement("card0", {0: (0,)}, (Range(0, 0, MIB),)), cores=1, chips=1,
        memory_bytes=MIB, window_bytes=MIB, queues=1, ring_entries=2, state=State.READY,
        created=0.0,
    )  # fmt: skip
    free = without_vm(function)
    assert free is not None
    assert "checkpoint create nn0" in free.fix
    stopped = without_vm(replace(function, state=State.ATTACHED, domain="web"))
    assert stopped is not None
    assert "web" in stopped.reason
    assert without_vm(replace(function, state=State.RUNNING, domain="web")) is None
