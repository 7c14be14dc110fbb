"""A daemon in a process of its own that kills itself at a named step of a verb."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from .harness import Harness, wait_until


def killed_at(step: str, root: Path, work: str) -> None:
    """Run ``work``, statements that may use ``harness`` and ``step``, until the step kills it.

    A fork of this process, which has imported everything: a new interpreter would take a second for
    each of dozens of steps.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none holds a lock now
        pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(_die(step, root, work))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    ended: list[int] = []

    def over() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append(status)
        return bool(found)

    try:
        wait_until(over)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail(f"{step} was not reached")
    assert os.WIFSIGNALED(ended[0]), (step, ended)
    assert os.WTERMSIG(ended[0]) == signal.SIGKILL, (step, ended)


async def _die(step: str, root: Path, work: str) -> None:
    def fault(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    body = textwrap.indent(textwrap.dedent(work).strip(), "    ")
    names: dict[str, Any] = {"os": os, "signal": signal}
    exec(f"async def work(harness, step):\n{body}\n", names)
    harness = Harness(root)
    async with harness.daemon(fault=fault):
        await names["work"](harness, step)
