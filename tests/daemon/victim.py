"""A daemon in a process of its own that kills itself at a named step of a verb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

_SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.daemon.harness import Harness
step, root = sys.argv[1], Path(sys.argv[2])

def fault(name):
    if name == step:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    harness = Harness(root)
    async with harness.daemon(fault=fault):
{work}

asyncio.run(main())
"""


def killed_at(step: str, root: Path, work: str) -> None:
    """Run ``work``, statements that may use ``harness`` and ``step``, until the step kills it."""
    script = _SCRIPT.format(work=textwrap.indent(textwrap.dedent(work).strip(), " " * 8))
    done = subprocess.run(
        [sys.executable, "-c", script, step, str(root)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, (step, done.stderr.decode())
