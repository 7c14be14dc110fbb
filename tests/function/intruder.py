"""``python -m tests.function.intruder SPEC UID``: a function whose control socket also makes the
attempts of :mod:`tests.function.attempts` in its worker. All the rest is as it always is.

The method is put in here, from outside: the product has none. Functions have a user of their own,
so this process takes one before it begins; what it needs is imported by then, since that user may
not be able to read it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelvisor.function import __main__ as function
from accelvisor.function import holder, spare, worker, zygote  # noqa: F401
from accelvisor.function.control import Control
from tests.function import attempts


class Intruded(Control):
    """Knows two methods more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._methods["attempts"] = _attempts
        self._methods["works"] = lambda _parameters, _fds: (attempts.works(), [])


def _attempts(facts: Mapping[str, Any], _: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    """All of them, in this process."""
    return {name: attempts.make(it, facts) for name, it in attempts.ATTEMPTS.items()}, []


def main(spec: str, uid: int) -> int:
    """As ``accelvisor.function`` under that user."""
    worker.Control = Intruded  # type: ignore[misc]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    return function.main([spec])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
