"""Writes docs/limits.md from the source of :class:`accelvisor.limits.Limits`.

``python -m tests.control.limits_document`` writes it; a test compares.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from accelvisor import limits

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "limits.md"
_SECTION = re.compile(r"# -{3} (.*?) -+$")

_HEAD = """# Limits

What no configuration may exceed, so that whatever comes from outside (guest, peer, file, client)
has a bound. Written from `accelvisor/limits.py` by `python -m tests.control.limits_document`.
"""


def rows() -> Iterator[tuple[str, str, str]]:
    """(section, field, reason) in the order of the source; the reason is the comment above it."""
    text = (ROOT / "accelvisor" / "limits.py").read_text()
    [tree] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    lines = text.splitlines()
    starts = {
        node.lineno: node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    section = ""
    reason: list[str] = []
    for number in range(tree.body[0].end_lineno or 0, tree.end_lineno or 0):
        line = lines[number].strip()
        found = _SECTION.match(line)
        if found:
            section, reason = found[1], []
        elif line.startswith("#"):
            reason.append(line.removeprefix("#").strip())
        elif number + 1 in starts:
            yield section, starts[number + 1], " ".join(reason)
            reason = []


def value(field: str) -> str:
    """As a person reads it: 1 MiB rather than 1048576."""
    number = getattr(limits.LIMITS, field)
    if field.endswith("_bytes"):
        for size, name in ((limits.GIB, "GiB"), (limits.MIB, "MiB"), (limits.KIB, "KiB")):
            if number % size == 0 and number >= size:
                return f"{number // size} {name}"
        return f"{number} bytes"
    return f"{number:g} s" if field.endswith("_s") else f"{number:,}"


def render() -> str:
    out, last = [_HEAD], None
    for section, field, reason in rows():
        if section != last:
            title = section[:1].upper() + section[1:]
            out.append(f"## {title}\n\n| limit | value | why |\n|---|---|---|")
            last = section
        out.append(f"| `{field}` | {value(field)} | {reason} |")
    text = "\n".join(out)
    return re.sub(r"\n(## )", r"\n\n\1", text).replace("\n\n\n", "\n\n") + "\n"


def fields() -> list[str]:
    return [field.name for field in dataclasses.fields(limits.Limits)]


if __name__ == "__main__":
    DOCUMENT.write_text(render())
