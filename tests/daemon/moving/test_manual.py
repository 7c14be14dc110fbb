"""accelvisor-migration(7) says what the code does: states and phases, deadlines, codes, shares."""

from __future__ import annotations

import re
from pathlib import Path

from accelvisor.cli import main, migrate
from accelvisor.daemon.config import MigrationConfig
from accelvisor.daemon.moving.operator import PHASES
from accelvisor.limits import LIMITS
from accelvisor.migration.convergence import Rules
from accelvisor.migration.source import POINT_OF_NO_RETURN, State

MAN = Path(__file__).parents[3] / "docs/man"
PAGE = (MAN / "accelvisor-migration.7").read_text().replace("\\-", "-")


def table(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with ``first``."""
    for body in re.findall(r"^\.TS\n[^\n]*\n[^\n]*\n(.*?)^\.TE$", PAGE, re.MULTILINE | re.DOTALL):
        rows = [line.split("|") for line in re.sub(r"T\{\n(.*?)\nT\}", r"\1", body).splitlines()]
        if rows[0][0] == first:
            return rows[1:]
    raise AssertionError(first)


def section(name: str) -> str:
    return PAGE.split(f".SH {name}\n")[1].split("\n.SH ")[0].replace("\n", " ")


def test_every_state_is_there_in_order_with_its_phase() -> None:
    assert [(row[0], row[1]) for row in table("state")] == [
        (state.value, PHASES[state]) for state in State
    ]


def test_the_point_of_no_return_is_the_one_of_the_machine() -> None:
    (row,) = [row for row in table("state") if "cancel is refused" in row[2]]
    assert row[0] == POINT_OF_NO_RETURN
    accelctl = (MAN / "accelctl.1").read_text()
    assert f".RI ( {PHASES[POINT_OF_NO_RETURN]} )" in accelctl


def test_steps_are_those_of_the_report() -> None:
    steps = [row[0] for row in table("step")]
    assert [name for name in steps if name in ("freeze", "ship", "verify", "load")] == [
        "freeze", "ship", "verify", "load",
    ]  # fmt: skip


def test_deadlines_ports_and_exit_codes() -> None:
    assert f"port {MigrationConfig().listen.rpartition(':')[2]}" in section(
        "BEFORE THE FIRST MIGRATION"
    )
    assert f"for {LIMITS.join_code_s / 60:g} minutes" in section("BEFORE THE FIRST MIGRATION")
    assert f"within {LIMITS.migration_link_s:g} seconds" in section("WHAT CAN FAIL")
    assert f"for {LIMITS.rotation_overlap_s / 86_400:g} days" in section("TRUST")
    assert f"exit code {main.UNCONVERGED})" in section("CONVERGENCE")
    assert f"(exit code {main.UNVERIFIED})" in section("WHAT CAN FAIL")
    assert (migrate.UNCONVERGED, migrate.UNVERIFIED) == (main.UNCONVERGED, main.UNVERIFIED)


def test_shares_of_the_time_are_a_half_and_a_quarter() -> None:
    assert Rules().throttles == (50, 25)
    assert "only half of the time, then a quarter" in section("CONVERGENCE")
    assert Rules().hot_rounds == 2
