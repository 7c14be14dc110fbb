"""What runs inside a VM: drivers, runtime and ``accelguest``. Needs Python and numpy only.

The names of :mod:`accelvisor.guest.runtime` are here too, imported when they are first used: on an
emulated CPU an import that is not needed costs more than the work itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelvisor.guest.discovery import Device, discover, find
    from accelvisor.guest.function import Function
    from accelvisor.guest.graphs.graph import Graph
    from accelvisor.guest.launch import Bound, Launch
    from accelvisor.guest.program import Program, Value
    from accelvisor.guest.stream import Event, Stream
    from accelvisor.guest.tensor import PinnedArray, Tensor

_HOME = {
    "Bound": "launch",
    "Device": "discovery",
    "Event": "stream",
    "Function": "function",
    "Graph": "graphs.graph",
    "Launch": "launch",
    "PinnedArray": "tensor",
    "Program": "program",
    "Stream": "stream",
    "Tensor": "tensor",
    "Value": "program",
    "discover": "discovery",
    "find": "discovery",
}

__all__ = [
    "Bound",
    "Device",
    "Event",
    "Function",
    "Graph",
    "Launch",
    "PinnedArray",
    "Program",
    "Stream",
    "Tensor",
    "Value",
    "discover",
    "find",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
