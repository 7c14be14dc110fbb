from __future__ import annotations

import pytest

from accelvisor.daemon.toml_lines import find

TEXT = """# first
top = 1
[a]
x = 1
"quoted key" = 2
[a.b]  # comment
x = 2
c.d = 3
[[list]]
y = 1
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (["top"], 2),
        (["a"], 3),
        (["a", "x"], 4),
        (["a", "quoted key"], 5),
        (["a", "b"], 6),
        (["a", "b", "x"], 7),
        (["a", "b", "c", "d"], 8),
        (["list", "y"], 10),
        (["a", "b", "missing"], 6),
        (["a", "missing"], 3),
        (["nothing"], None),
    ],
)
def test_find(key: list[str], line: int | None) -> None:
    assert find(TEXT, key) == line
