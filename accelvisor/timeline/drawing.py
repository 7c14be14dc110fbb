"""A drawing as values, and its two forms: SVG text and PNG bytes.

Both forms show the same: coordinates are pixels of the SVG, characters are 6 pixels wide. The PNG
has twice as many pixels each way; its letters are dots, 5 x 8 of them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

CHARACTER = 6
_SCALE = 2

Colour = str  # "#rrggbb"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``title`` is shown where a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of ASCII; ``y`` is its base line. ``anchor``: start, middle or end of it is at x."""

    x: float
    y: float
    text: str
    fill: Colour = "#202020"
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """What to draw, back to front."""

    width: int
    height: int
    items: Sequence[Box | Text]


def to_svg(drawing: Drawing) -> str:
    """SVG 1.1, complete and without references to anything outside."""
    w, h = drawing.width, drawing.height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}" font-family="DejaVu Sans Mono, monospace" font-size="10">',
        f'<rect width="{w}" height="{h}" fill="#ffffff"/>',
    ]
    for item in drawing.items:
        if isinstance(item, Box):
            shape = (
                f'<rect x="{item.x:.2f}" y="{item.y:.2f}" width="{item.width:.2f}" '
                f'height="{item.height:.2f}" fill="{item.fill}"'
            )
            title = f"><title>{escape(item.title)}</title></rect>" if item.title else "/>"
            lines.append(shape + title)
        else:
            weight = ' font-weight="bold"' if item.bold else ""
            lines.append(
                f'<text x="{item.x:.2f}" y="{item.y:.2f}" fill="{item.fill}" '
                f'text-anchor="{item.anchor}"{weight} xml:space="preserve">'
                f"{escape(item.text)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def to_png(drawing: Drawing) -> bytes:
    """PNG (ISO/IEC 15948), 8 bits of red, green and blue."""
    image = np.full((drawing.height * _SCALE, drawing.width * _SCALE, 3), 255, np.uint8)
    for item in drawing.items:
        if isinstance(item, Box):
            left, right = round(item.x * _SCALE), round((item.x + item.width) * _SCALE)
            top, bottom = round(item.y * _SCALE), round((item.y + item.height) * _SCALE)
            image[max(top, 0) : bottom, max(left, 0) : max(right, left + 1)] = _rgb(item.fill)
        else:
            _write(image, item)
    rows = np.zeros((image.shape[0], 1 + image.shape[1] * 3), np.uint8)  # 0: no filter
    rows[:, 1:] = image.reshape(image.shape[0], -1)
    head = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    )


def _rgb(colour: Colour) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _write(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], item: Text) -> None:
    size = _SCALE
    width = len(item.text) * CHARACTER
    x = item.x - {"start": 0.0, "middle": width / 2, "end": float(width)}[item.anchor]
    left, top = round(x * _SCALE), round((item.y - 7) * _SCALE)
    for character in item.text:
        dots = _GLYPHS.get(character, _GLYPHS["?"])
        if item.bold:
            dots = dots | np.pad(dots, ((0, 0), (1, 0)))[:, :-1]
        big = dots.repeat(size, axis=0).repeat(size, axis=1)
        if top >= 0 and left >= 0:
            area = image[top : top + big.shape[0], left : left + big.shape[1]]
            area[big[: area.shape[0], : area.shape[1]]] = _rgb(item.fill)
        left += CHARACTER * size


#: The usual letters of a dot matrix display, from space on: five columns of eight dots each, the
#: lowest bit on top.
_FONT = """
0000000000 00005f0000 0007000700 147f147f14 242a7f2a12 2313086462 3649562050 0008070300
001c224100 0041221c00 2a1c7f1c2a 08083e0808 0080703000 0808080808 0000606000 2010080402
3e5149453e 00427f4000 7249494946 2141494d33 1814127f10 2745454539 3c4a494931 4121110907
3649494936 464949291e 0000140000 0040340000 0008142241 1414141414 0041221408 0201590906
3e415d594e 7c1211127c 7f49494936 3e41414122 7f4141413e 7f49494941 7f09090901 3e41415173
7f0808087f 00417f4100 2040413f01 7f08142241 7f40404040 7f021c027f 7f0408107f 3e4141413e
7f09090906 3e4151215e 7f09192946 2649494932 03017f0103 3f4040403f 1f2040201f 3f4038403f
6314081463 0304780403 6159494d43 007f414141 0204081020 004141417f 0402010204 4040404040
0003070800 2054547840 7f28444438 3844444428 384444287f 3854545418 00087e0902 18a4a49c78
7f08040478 00447d4000 2040403d00 7f10284400 00417f4000 7c04780478 7c08040478 3844444438
fc18242418 18242418fc 7c08040408 4854545424 04043f4424 3c4040207c 1c2040201c 3c4030403c
4428102844 4c9090907c 4464544c44 0008364100 0000770000 0041360800 0201020402
"""


def _glyphs() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    found = {}
    for n, columns in enumerate(_FONT.split()):
        raw = np.frombuffer(bytes.fromhex(columns), np.uint8)
        dots = np.unpackbits(raw[None, :], axis=0, bitorder="little").astype(np.bool_)
        found[chr(32 + n)] = np.pad(dots, ((0, 0), (0, 1)))
    return found


_GLYPHS = _glyphs()
