"""The demonstrations' reports: plain text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH = 80
_LABEL = 12
_SHADES = " ░▒▓█"
_BARS = "▁▂▃▄▅▆▇█"


def title(text: str) -> str:
    """A heading over the report's width."""
    return f"\n{text}\n{'─' * WIDTH}"


def line(label: str, text: str) -> str:
    """One fact; further lines of ``text`` stand under the first."""
    first, *rest = text.split("\n")
    return "\n".join([f"{label:<{_LABEL}}{first}", *(" " * _LABEL + r for r in rest)]).rstrip()


def verdict(holds: bool, text: str) -> str:
    """A check mark or a loud cross, and what was checked."""
    return f"{'✔' if holds else '✘ NO:'} {text}"


def digits(images: npt.NDArray[Any], classes: Sequence[int], labels: Sequence[int]) -> str:
    """Images side by side (each (8, 8), any scale), with what the device says under them."""
    scaled = images / max(float(images.max()), 1.0) * (len(_SHADES) - 1)
    shades = np.rint(scaled).astype(int)
    rows = ["   ".join("".join(_SHADES[v] for v in image[y]) for image in shades) for y in range(8)]
    said = "   ".join(
        f"{f'= {c}' if c == w else f'{c} (is {w})':^8}"
        for c, w in zip(classes, labels, strict=True)
    )
    return "\n".join([*rows, said])


def sparkline(values: Sequence[float]) -> str:
    """Values as bars, the largest full."""
    top = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(v / top * len(_BARS)))] for v in values)


def shown(
    raw: npt.NDArray[Any], classes: Sequence[int], labels: Sequence[int], count: int = 7
) -> str:
    """Pictures of some samples (each 64 values): one of each class, and one that was wrong."""
    firsts: dict[int, int] = {}
    wrong = []
    for i, (said, is_) in enumerate(zip(classes, labels, strict=True)):
        if said == is_:
            firsts.setdefault(is_, i)
        else:
            wrong.append(i)
    picked = [*sorted(firsts.values())[: count - min(1, len(wrong))], *wrong[:1]]
    images = raw.reshape(-1, 8, 8)[picked]
    return line("digits", digits(images, [classes[i] for i in picked], [labels[i] for i in picked]))


def size(nbytes: int) -> str:
    """Bytes for people, in binary units."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def short(digest: str) -> str:
    """The beginning of a digest."""
    return f"{digest[:16]}…"
