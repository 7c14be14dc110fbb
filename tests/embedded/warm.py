"""``python -m tests.embedded.warm``: forks daemons, with everything imported already.

An interpreter that imports accelvisord takes more than a second of CPU time, and tests of killed
daemons start dozens. What is forked has its own environment and output, as a new process would.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType


class Forked:
    """One daemon, as far as ``subprocess.Popen`` would be asked about it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # Its parent has not reaped it yet, so this is nobody else.
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs; how it ended only its parent knows."""
        if self.returncode is None and select.select([self._handle], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"accelvisord {self.pid}", timeout or 0)
            self._ended()
        return 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self.returncode = 0
        os.close(self._handle)


_one_at_a_time = threading.Lock()


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, whose end of the pipe is closed then."""
    words = [sys.executable, "-m", "tests.embedded.warm"]
    root = Path(__file__).parents[2]
    made = subprocess.Popen(
        words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_end, made)
    return made


def _end(made: subprocess.Popen[str]) -> None:
    made.communicate()


def fork(environment: dict[str, str], log: Path) -> Forked:
    """A daemon that may stand still (:mod:`tests.embedded.pausing`)."""
    with _one_at_a_time:
        parent = _parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps([environment, os.getcwd(), str(log)]) + "\n")
        parent.stdin.flush()
        forked = Forked(int(parent.stdout.readline()))
        parent.stdin.write("\n")
        parent.stdin.flush()
        return forked


def _reap(_number: int, _frame: FrameType | None) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(environment: dict[str, str], directory: str, log: str) -> None:
    """In the fork: all that a new process has of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for source, targets in ((nothing, (0,)), (output, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    status = 1
    try:
        from .pausing import main as daemon  # imported already, by main()

        status = daemon()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    importlib.import_module("tests.embedded.pausing")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    while line := sys.stdin.buffer.readline():
        given = json.loads(line)
        # Not reaped before who asked has a handle of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            _become(*given)
        print(pid, flush=True)
        sys.stdin.buffer.readline()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    main()
