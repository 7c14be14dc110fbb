"""In which line of a TOML text a key stands. tomllib keeps no positions, and an error without a
line is half an error. Good enough for messages: keys inside multi-line strings may fool it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"^\s*\[+\s*(.+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def find(text: str, key: Sequence[str]) -> int | None:
    """1-based line of ``key`` (or of the nearest parent that the text names); None if absent."""
    wanted = list(key)
    best: tuple[int, int] | None = None  # (depth matched, line)
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            table = _split(header[1])
            path = table
        else:
            match = _KEY.match(line)
            if match is None:
                continue
            path = table + _split(match[1])
        depth = len(path)
        if path == wanted[:depth] and (best is None or depth > best[0]):
            best = (depth, number)
    return best[1] if best else None


def _split(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(dotted)]
