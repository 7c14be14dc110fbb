"""From moves to the objects of the Admin interface. Plain dictionaries, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from accelvisor.daemon.moving.facts import Looked
from accelvisor.daemon.moving.journal import Row
from accelvisor.daemon.moving.planner import Plan
from accelvisor.daemon.moving.record import Record
from accelvisor.daemon.moving.source import SourceMove
from accelvisor.frames.trust import Host
from accelvisor.hypervisor.port import Job
from accelvisor.migration import destination, source

if TYPE_CHECKING:
    from accelvisor.daemon.moving.operator import Running

CANCEL = source.Event.CANCEL
#: States in which nothing more happens, by role.
OVER: Mapping[str, frozenset[str]] = {
    "source": frozenset((source.State.DONE, source.State.RETURNED, source.State.REFUSED)),
    "destination": frozenset((destination.State.RUNNING, destination.State.CLOSED)),
}
#: What came of it, by the state that it ended in.
_OUTCOMES: Mapping[str, str] = {
    source.State.DONE: "moved",
    source.State.COMMITTED: "moved",
    source.State.RETURNED: "stayed",
    source.State.REFUSED: "stayed",
    destination.State.RUNNING: "moved",
    destination.State.CLOSED: "stayed",
}
_VERIFICATION = ("frame-", "status-", "token")


def plan(looked: Looked, made: Plan) -> dict[str, Any]:
    domain, host = looked.domain, looked.host
    reasons = [asdict(item) | {"severity": item.severity.value} for item in made.reasons]
    prediction = None
    if made.prediction is not None:
        found = made.prediction
        prediction = {
            "downtime": found.downtime_s,
            "total": found.total_s,
            "total_bytes": found.total_bytes,
            "stop_bytes": found.stop_bytes,
            "rounds": found.rounds,
            "throttle": found.throttle,
            "state_bytes": found.state_bytes,
            "rate": found.bandwidth,
            "rate_measured": bool(looked.facts.rate),
            "dirty_rate": found.dirty_rate,
            "working_set_bytes": found.working_set_bytes,
            "fixed": found.fixed_s,
        }
    return {
        "domain": domain.name if domain else "",
        "domain_uuid": domain.uuid if domain else "",
        "host": host.name if host else looked.facts.host,
        "host_uuid": host.uuid if host else "",
        "uri": looked.uri,
        "functions": [item.need.uuid for item in looked.facts.functions],
        "possible": not made.blockers,
        "reasons": reasons,
        "prediction": prediction,
    }


def progress(running: Running) -> dict[str, Any]:
    move, job = running.move, running.job
    found: dict[str, Any] = {
        "phase": running.phase,
        "seconds": running.seconds,
        "sent_bytes": 0,
        "copied_bytes": 0,
        "state_bytes": 0,
        "rate": 0.0,
        "dirty_rate": 0.0,
        "round": 0,
        "throttle": 100,
        "time_left": None,
        "cancellable": move is None or move.cancellable,
        "memory_total": job.memory_total if job else 0,
        "memory_done": job.memory_total - job.memory_left if job else 0,
        "memory_rate": job.rate if job else 0.0,
        "memory_dirty_rate": job.dirty_rate if job else 0.0,
        "memory_round": job.iteration if job else 0,
    }
    if move is not None:
        measured = move.pace.measured
        found |= {
            "sent_bytes": move.sent_bytes,
            "copied_bytes": move.copied_bytes,
            "state_bytes": move.state_bytes,
            "rate": measured.bandwidth if measured else 0.0,
            "dirty_rate": measured.dirty_rate if measured else 0.0,
            "round": move.pace.rounds,
            "throttle": move.pace.throttle,
            "time_left": _time_left(move, job),
        }
    return found


def _time_left(move: SourceMove, job: Job | None) -> float | None:
    """Until both parts are done; None while nobody knows, and when it is only a matter of steps."""
    if move.driver.state is not source.State.PRECOPY:
        return None
    ours = move.pace.time_left()
    theirs = job.memory_left / job.rate if job is not None and job.rate else None
    known = [seconds for seconds in (ours, theirs) if seconds is not None]
    return max(known) if known else None


def report(running: Running) -> dict[str, Any]:
    move, error = running.move, running.error
    outcome = "moved"
    if error is not None:
        outcome = "cancelled" if running.cancelled else "failed"
        if not running.cancelled and error.code.startswith(_VERIFICATION):
            outcome = "unverified"
        elif not running.cancelled and error.code == "migration-convergence":
            outcome = "unconverged"
    numbers = move.pace.numbers() if move is not None else {}
    return {
        "id": move.asked.migration.hex() if move is not None else None,
        "domain": running.domain.name,
        "domain_uuid": running.domain.uuid,
        "host": running.host.name,
        "host_uuid": running.host.uuid,
        "functions": list(running.domain.live_functions),
        "outcome": outcome,
        "code": error.code if error else "",
        "message": error.message if error else "",
        "hint": error.hint if error else "",
        "seconds": running.seconds,
        "numbers": _numbers(numbers),
    }


def migration(row: Row, hosts: Mapping[str, Host], live: str | None) -> dict[str, Any]:
    """One row of the journal; ``live`` is the state of a move that is in memory."""
    record = msgspec.msgpack.decode(row.record, type=Record)
    uuid = str(UUID(hex=record.peer))
    peer = hosts.get(uuid)
    state = live or row.state
    over = state in OVER[row.role]
    return {
        "id": row.id.hex(),
        "role": row.role,
        "domain": record.domain_name,
        "domain_uuid": row.domain,
        "host": peer.name if peer else "",
        "host_uuid": uuid,
        "functions": record.functions,
        "state": state,
        "over": over,
        "outcome": _OUTCOMES.get(state, "") if over else "",
        "begun": row.begun,
        "changed": row.changed,
        "reason": record.reason,
        "numbers": _numbers(record.numbers),
    }


def _numbers(found: Mapping[str, float]) -> dict[str, Any]:
    def seconds(name: str) -> float | None:
        return found.get(name)

    return {
        "downtime": seconds("downtime_s"),
        "blackout": seconds("blackout_s"),
        "freeze": seconds("freeze_s"),
        "ship": seconds("ship_s"),
        "verify": seconds("verify_s"),
        "load": seconds("load_s"),
        "rounds": int(found.get("rounds", 0)),
        "sent_bytes": int(found.get("sent_bytes", 0)),
        "last_round_bytes": int(found.get("last_round_bytes", 0)),
        "throttle": int(found.get("throttle", 100)),
    }
