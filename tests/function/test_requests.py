"""holder.sock: a method that fails is answered, whatever failed in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelvisor.function.endpoints import listen
from accelvisor.function.loop import Loop
from accelvisor.function.requests import Requests


def test_a_system_call_that_fails_in_a_method_is_no_hang_up(tmp_path: Path) -> None:
    def renew(_: Mapping[str, Any]) -> dict[str, Any]:
        raise OSError(24, "Too many open files")

    loop = Loop(lambda: 0.0)
    with listen(str(tmp_path / "holder.sock")) as listener:
        methods = {"renew": renew}
        requests = Requests(listener, methods, loop.watch, loop.forget, os.geteuid())
        answer, fds = requests.answer(b'{"method": "renew"}')
    assert answer is not None
    assert answer["error"]["code"] == "system-failure"
    assert "Too many open files" in answer["error"]["message"]
    assert fds == []
