"""The plan of a move: every reason against it, and what it would take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.moving.fit import Fit, Need
from accelvisor.daemon.moving.planner import (
    ASSUMED_RATE,
    Facts,
    FunctionFacts,
    Severity,
    plan,
)
from accelvisor.errors import ConflictError, NotFoundError, UnavailableError
from accelvisor.hypervisor.port import Domain, DomainState
from accelvisor.limits import MIB
from accelvisor.migration.convergence import Verdict

FIRMWARE = {"abi": "1.0", "numpy": "2", "blas": "openblas", "core": "HASWELL"}
UUID = "0f6d3a52-8a0e-4c53-9d57-6a3b1b2f4c11"
NEED = Need(UUID, "nn0", "small", 1, 1, 64 * MIB, 16 * MIB, 8, 256)
DOMAIN = Domain("web", "8bb3", DomainState.RUNNING, True, 1, 384 * MIB, (UUID,), (UUID,))
FUNCTION = FunctionFacts(NEED, State.RUNNING, FIRMWARE, 20 * MIB, MIB, 0.2)
FIT = Fit("1.0", FIRMWARE, "source")
GOOD = Facts(
    DOMAIN, "hostb", fit=FIT, functions=(FUNCTION,), version="1.0", arbiter="source", rate=1e9
)
ERROR = ConflictError("why", code="some-code", hint="do that")


def found(facts: Facts) -> dict[str, Severity]:
    return {reason.code: reason.severity for reason in plan(facts).reasons}


def test_nothing_stands_against_a_vm_that_fits() -> None:
    made = plan(GOOD)
    assert not made.blockers
    assert found(GOOD) == {"migration-memory": Severity.INFO}
    assert made.prediction is not None
    assert made.prediction.ends is Verdict.READY


def of(**changes: Any) -> Facts:
    return replace(GOOD, **changes)


def function(**changes: Any) -> Facts:
    return of(functions=(replace(FUNCTION, **changes),))


def fit(**changes: Any) -> Facts:
    fields = {name: getattr(FIT, name) for name in FIT.__struct_fields__}
    return of(fit=Fit(**(fields | changes)))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (of(domain=None, missing=NotFoundError("no", code="domain-not-found")), "domain-not-found"),
        (of(host_error=NotFoundError("no", code="trust-host-unknown")), "trust-host-unknown"),
        (of(fit=None, fit_error=UnavailableError("no", code="peer-unreachable")),
         "peer-unreachable"),
        (of(domain=replace(DOMAIN, state=DomainState.SHUTOFF)), "domain-state"),
        (of(busy=True), "migration-busy"),
        (of(monitor=False), "migration-monitor"),
        (of(bus=False), "migration-bus"),
        (of(private_memory="it is private"), "domain-memory"),
        (of(blocked=("0000:01:00.0: VFIO device doesn't support migration",)),
         "migration-blocked"),
        (function(trouble=ERROR), "some-code"),
        (function(held=True), "migration-busy"),
        (function(state=State.FAILED), "function-state"),
        (fit(missing=("card0: 0 MiB of memory free",)), "no-room"),
        (fit(present=(UUID,)), "function-exists"),
        (fit(arbiter="etcd"), "migration-arbiter"),
        (fit(firmware=FIRMWARE | {"core": "ZEN"}), "status-firmware"),
        # Ten times as much changes as can be sent, and all of it is more than may be sent at once.
        (function(state_bytes=50_000 * MIB, dirty_bytes=2_000 * MIB), "migration-convergence"),
    ],
)  # fmt: skip
def test_every_blocker_is_named(facts: Facts, code: str) -> None:
    assert [reason.code for reason in plan(facts).blockers] == [code]


@pytest.mark.parametrize(
    ("facts", "code", "severity"),
    [
        (of(domain=replace(DOMAIN, state=DomainState.PAUSED)), "migration-paused", "warning"),
        (of(domain=replace(DOMAIN, persistent=False)), "migration-transient", "info"),
        (of(functions=()), "migration-no-functions", "info"),
        (fit(names=("nn0",)), "function-name", "warning"),
        (fit(version="2.0"), "migration-version", "warning"),
        (of(rate=0.0), "migration-rate", "info"),
        (function(state_bytes=1000 * MIB, dirty_bytes=400 * MIB), "migration-throttle", "warning"),
        (function(state_bytes=1000 * MIB, dirty_bytes=400 * MIB), "migration-downtime", "warning"),
    ],
)
def test_what_is_worth_knowing_stands_against_nothing(
    facts: Facts, code: str, severity: str
) -> None:
    assert found(facts)[code] == severity
    assert not plan(facts).blockers


def test_all_reasons_are_shown_at_once_blockers_first() -> None:
    facts = fit(missing=("no cores", "no memory"), version="2.0")
    facts = replace(facts, monitor=False, blocked=("a device",), host_error=ERROR)
    severities = [reason.severity for reason in plan(facts).reasons]
    assert len(plan(facts).blockers) == 5
    assert severities == sorted(severities, key=list(Severity).index)


def test_a_stopped_vm_is_not_told_of_its_monitor_too() -> None:
    off = of(domain=replace(DOMAIN, state=DomainState.SHUTOFF), monitor=False, bus=False)
    assert [reason.code for reason in plan(off).blockers] == ["domain-state"]


def test_the_prediction_names_its_inputs() -> None:
    made = plan(of(rate=0.0)).prediction
    assert made is not None
    assert made.bandwidth == ASSUMED_RATE
    assert made.state_bytes == 20 * MIB
    assert made.dirty_rate == pytest.approx(5 * MIB)
    limited = plan(of(limit=1e6)).prediction
    assert limited is not None
    assert limited.bandwidth == 1e6


def test_nothing_is_predicted_of_what_cannot_be_asked() -> None:
    assert plan(function(trouble=ERROR)).prediction is None
    assert plan(of(fit=None, fit_error=ERROR)).prediction is None
    assert plan(of(functions=())).prediction is None
