"""docs/errors.md and the source name the same codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from accelvisor.cli.main import exit_code
from accelvisor.errors import AccelvisorError, ConflictError, DataError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def documented() -> list[str]:
    return re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "accelvisor").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def raised() -> dict[str, Path]:
    """Codes that are certainly codes: ``code="..."`` in a call, ``code = "..."`` in a class."""
    found: dict[str, Path] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            values: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "code":
                values.append(node.value)
            if isinstance(node, ast.ClassDef):
                values += [
                    statement.value
                    for statement in node.body
                    if isinstance(statement, ast.Assign)
                    and isinstance(statement.targets[0], ast.Name)
                    and statement.targets[0].id == "code"
                ]
            for value in values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[value.value] = path
    return found


def literals() -> set[str]:
    return {
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_code_in_the_source_is_documented() -> None:
    missing = {code: str(path) for code, path in raised().items() if code not in documented()}
    assert not missing


def test_every_documented_code_is_in_the_source() -> None:
    assert set(documented()) <= literals()


def test_codes_are_well_formed_and_documented_once() -> None:
    codes = documented()
    assert all(CODE.fullmatch(code) for code in codes)
    assert len(set(codes)) == len(codes)


def test_exit_codes_are_as_documented() -> None:
    """Whatever class it has: the two codes of an unreachable daemon end in 3."""

    def below(kind: type[AccelvisorError]) -> Iterator[type[AccelvisorError]]:
        yield kind
        for inner in kind.__subclasses__():
            yield from below(inner)

    for kind in below(AccelvisorError):
        if kind.__module__ != "accelvisor.errors":
            continue
        name = kind.__name__
        expected = {"UsageError": 2, "PermissionDenied": 4, "FrameRefused": 6}.get(name, 1)
        assert exit_code(kind("x")) == expected, name
        assert exit_code(kind("x", code="daemon-unreachable")) == 3
        assert exit_code(kind("x", code="daemon-deadline")) == 3
    # And those of verification, which come from the daemon as plain data errors.
    assert exit_code(DataError("x", code="frame-root")) == 6
    assert exit_code(DataError("x", code="status-digest")) == 6
    assert exit_code(ConflictError("x", code="migration-convergence")) == 5
