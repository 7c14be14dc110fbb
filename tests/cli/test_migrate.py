"""accelctl migrate, migration and host drain: what is printed, how it exits, what Ctrl-C does."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from accelvisor.cli import drawing, moves
from accelvisor.errors import AccelvisorError, ConflictError, DataError, SystemFailure
from accelvisor.hypervisor.port import DomainEventKind, DomainState
from tests.cli.test_trust import Ctl, ctl, scenario  # noqa: F401 - a fixture
from tests.daemon.moving.pair import Pair

#: As the daemon sends it.
PROGRESS: dict[str, Any] = {
    "phase": "copying", "seconds": 1.25, "sent_bytes": 3 << 20, "copied_bytes": 40 << 20,
    "state_bytes": 80 << 20, "rate": 200e6, "dirty_rate": 4e6, "round": 3, "throttle": 50,
    "time_left": 1.5, "cancellable": True, "memory_total": 384 << 20, "memory_done": 96 << 20,
    "memory_rate": 1e8, "memory_dirty_rate": 1e6, "memory_round": 1,
}  # fmt: skip


def put(made: Pair) -> None:
    made.a.domains.put("web", DomainEventKind.STARTED, state=DomainState.RUNNING)


async def begun(made: Pair) -> None:
    async with asyncio.timeout(20):
        while made.a.domains.migrating.empty():
            await asyncio.sleep(0.01)


def test_a_dry_run_prints_all_reasons_and_what_to_do(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        code, out, err = await ctl(made.a, "migrate", "web", "hostb", "--dry-run")
        assert (code, err) == (1, "")
        assert out.startswith("VM ? to host hostb: not possible\n")
        assert "blocker  domain-not-found    there is no domain" in out
        assert "blocker  trust-host-unknown  no trusted host" in out
        assert "-> known: none; accelctl trust invite and join" in out
        put(made)
        code, out, _ = await ctl(made.a, "migrate", "web", "hostb", "--dry-run", "--json")
        assert code == 1
        assert set(json.loads(out)) == {"plan", "progress", "report"}

    scenario(body, trust=False)


def test_a_refusal_is_an_error_with_its_code(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        code, out, err = await ctl(made.a, "migrate", "web", "hostb")
        assert (code, out) == (1, "")
        assert "[domain-not-found]" in err
        assert "--dry-run shows all reasons" in err

    scenario(body, trust=False)


def test_progress_goes_to_stderr_and_the_report_to_stdout(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        put(made)
        task = asyncio.create_task(ctl(made.a, "migrate", "web", "hostb"))
        await begun(made)
        made.a.domains.end_migration.put(None)
        code, out, err = await task
        assert code == 0
        assert out.startswith("VM web runs on host hostb, after ")
        assert "reserving" in err

    scenario(body)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SystemFailure("no route", code="libvirt-failed"), 1, "(failed)"),
        (ConflictError("too fast", code="migration-convergence"), 5, "(unconverged)"),
        (DataError("a forged chunk", code="frame-chunk"), 6, "(unverified)"),
    ],
)
def test_the_exit_code_says_what_kept_it(
    ctl: Ctl, error: AccelvisorError, code: int, words: str  # noqa: F811
) -> None:
    async def body(made: Pair) -> None:
        put(made)
        task = asyncio.create_task(ctl(made.a, "migrate", "web", "hostb"))
        await begun(made)
        made.a.domains.end_migration.put(error)
        found, out, err = await task
        assert found == code
        assert out == f"VM web stays on this host {words}\n"
        assert f"{error.message} [{error.code}]" in err

    scenario(body)


def test_json_is_one_object_a_line(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        put(made)
        task = asyncio.create_task(ctl(made.a, "migrate", "web", "hostb", "--json"))
        await begun(made)
        made.a.domains.end_migration.put(None)
        code, out, _ = await task
        first, *steps, last = map(json.loads, out.splitlines())
        assert code == 0
        assert first["plan"]
        assert last["report"]
        assert all(step["progress"] for step in steps)

    scenario(body)


async def _process(made: Pair) -> subprocess.Popen[str]:
    """A real one: only the main thread of a process gets its signals."""
    put(made)
    process = subprocess.Popen(
        [sys.executable, "-m", "accelvisor.cli.main", "migrate", "web", "hostb", "--json"],
        env={**os.environ, "ACCELVISOR_RUN_DIR": str(made.a.paths.run)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    await begun(made)
    # It has shown something, so its handler is there.
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    return process


def test_an_interrupt_cancels() -> None:
    async def body(made: Pair) -> None:
        with await _process(made) as process:
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 1
        assert "cancelling" in err
        assert json.loads(out.splitlines()[-1])["report"]["outcome"] == "cancelled"
        assert made.a.domains.domains["web"].state is DomainState.RUNNING

    scenario(body)


def test_a_second_interrupt_stops_watching_and_the_migration_goes_on() -> None:
    async def body(made: Pair) -> None:
        # A cancel that libvirt does not carry out: the point of no return is behind it.
        made.a.domains.migrate_cancel = lambda domain: None  # type: ignore[method-assign]
        with await _process(made) as process:
            assert process.stderr is not None
            process.send_signal(signal.SIGINT)
            while "cancelling" not in await asyncio.to_thread(process.stderr.readline):
                pass
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 130
        assert "the migration goes on" in err
        assert not made.a.domains.migrating.empty()
        made.a.domains.end_migration.put(None)
        async with asyncio.timeout(20):
            while "web" in made.a.domains.domains:
                await asyncio.sleep(0.01)

    scenario(body)


def test_a_drain_of_a_host_without_functions(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        assert await ctl(made.a, "host", "drain") == (0, "no function is on this host\n", "")
        await made.a.create("free")
        code, out, _ = await ctl(made.a, "host", "drain")
        assert code == 1
        assert out.startswith("function free stays: no VM has it (ready)\n  -> accelctl checkpoint")

    scenario(body)


def test_the_history_is_empty_at_first(ctl: Ctl) -> None:  # noqa: F811
    async def body(made: Pair) -> None:
        assert (await ctl(made.a, "migration", "list"))[1] == "no migrations yet\n"
        assert (await ctl(made.a, "migration", "show", "00"))[0] == 1
        put(made)
        code, _, err = await ctl(made.a, "migration", "cancel", "web")
        assert (code, "[migration-unknown]" in err) == (1, True)

    scenario(body)


# --- words ----------------------------------------------------------------------------------------


def test_lines_come_with_each_phase_and_now_and_then() -> None:
    now = [0.0]
    out = io.StringIO()
    lines = drawing.Lines(out, lambda: now[0])
    for phase, when in (("copying", 0.0), ("copying", 1.9), ("copying", 2.0), ("freezing", 2.1)):
        now[0] = when
        lines.update(PROGRESS | {"phase": phase})
    lines.close()
    first, *others = out.getvalue().splitlines()
    assert first == (
        "   1.2 s  copying       functions 40 MiB of 80 MiB, round 3, 190.7 MiB/s,"
        " 3.8 MiB/s change, slowed to 50 %, memory 96 MiB of 384 MiB, about 1.5 s left"
    )
    assert [line.split()[2] for line in others] == ["copying", "freezing"]


def test_lines_are_drawn_where_nobody_watches() -> None:
    assert isinstance(drawing.choose(io.StringIO()), drawing.Lines)


def test_bars_show_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    bars = drawing.Bars()
    bars.update(PROGRESS)
    bars.update(PROGRESS | {"state_bytes": 0, "memory_total": 0, "time_left": None})
    bars.close()
    capsys.readouterr()


NUMBERS: dict[str, Any] = {
    "downtime": 0.12, "blackout": 0.14, "freeze": 0.02, "ship": 0.01, "verify": 0.03, "load": 0.05,
    "rounds": 4, "sent_bytes": 70 << 20, "last_round_bytes": 1 << 20, "throttle": 100,
}  # fmt: skip
NONE = {name: None if name in ("downtime", "blackout", "freeze", "ship", "verify", "load") else 0
        for name in NUMBERS}  # fmt: skip


def test_a_report_names_times_and_bytes() -> None:
    report = {"outcome": "moved", "domain": "web", "host": "hostb", "seconds": 3.4}
    assert moves.report(report | {"numbers": NUMBERS}).splitlines() == [
        "VM web runs on host hostb, after 3.4 s",
        "downtime: 120 ms",
        "blackout: 140 ms until its functions computed again",
        "of that:  freeze 20 ms, ship 10 ms, verify 30 ms, load 50 ms",
        "sent:     70 MiB in 4 rounds, 1 MiB in the last",
    ]
    # A VM without functions.
    assert moves.report(report | {"numbers": NONE}) == "VM web runs on host hostb, after 3.4 s"


def test_a_list_shows_names_as_far_as_they_are_known() -> None:
    item = {
        "id": "0123456789abcdef" * 2, "role": "destination", "domain": "", "domain_uuid": "d-uuid",
        "host": "", "host_uuid": "8bb312d4-7d4d", "functions": [], "state": "reserved",
        "over": False, "outcome": "", "begun": 0.0, "changed": 0.0, "reason": "it was late [late]",
        "numbers": NONE,
    }  # fmt: skip
    row = moves.migrations([item]).splitlines()[1].split()
    assert row[:4] == ["0123456789ab", "d-uuid", "from", "8bb312d4"]
    assert "reserved (in progress)" in moves.migration(item)
    assert "it was late [late]" in moves.migration(item)


def test_times_have_few_digits() -> None:
    from accelvisor.cli.render import duration

    assert [duration(s) for s in (0.0004, 0.12, 3.44, 125)] == ["0 ms", "120 ms", "3.4 s",
                                                                "2 min 5 s"]  # fmt: skip
