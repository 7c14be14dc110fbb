"""``python -m tests.embedded.pausing``: accelvisord, which stands still at steps that a test names.

Where it stands still, the test decides who dies, at exactly that point, and whether it goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from pathlib import Path

from accelvisor.daemon import main as daemon_main
from accelvisor.daemon.daemon import Setup
from accelvisor.embedded.host import EmbeddedHost
from accelvisor.errors import SystemFailure, UnavailableError

from . import warm
from .moving import wait_for

_DIRECTORY = "TEST_PAUSE_DIRECTORY"
_PATIENCE_S = 60.0


class PausingHost(EmbeddedHost):
    """A host whose daemon can be made to stand still."""

    module = "tests.embedded.pausing"

    def start(self) -> None:
        """As any host's, but forked: dozens of interpreters would import for a second each."""
        log = self.directory / "accelvisord.log"
        # What looks after a host asks no more of it than of a Popen.
        self._daemon = warm.fork({**os.environ, **self.environment}, log)  # type: ignore[assignment]
        wait_for(self._serves, "accelvisord does not start")

    def _serves(self) -> bool:
        try:
            with self.admin() as admin:
                admin.call("GetHost")
        except UnavailableError:
            if not self.alive:
                raise SystemFailure("accelvisord ended", hint=self.log()[-2000:]) from None
            return False
        return True

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, _DIRECTORY: str(self._pauses)}

    @property
    def _pauses(self) -> Path:
        directory = self.directory / "pause"
        directory.mkdir(exist_ok=True)
        return directory

    def pause_at(self, step: str) -> None:
        (self._pauses / f"{step}.wanted").touch()

    def paused_at(self, step: str) -> bool:
        return (self._pauses / f"{step}.reached").exists()

    def go_on(self, step: str) -> None:
        for end in ("wanted", "reached"):
            (self._pauses / f"{step}.{end}").unlink(missing_ok=True)

    def wait_pause(self, step: str) -> None:
        wait_for(lambda: self.paused_at(step), f"{step} does not come")


def _pause(directory: Path, step: str) -> None:
    if not (directory / f"{step}.wanted").exists():
        return
    reached = directory / f"{step}.reached"
    reached.touch()
    end = time.monotonic() + _PATIENCE_S
    while reached.exists() and time.monotonic() < end:
        time.sleep(0.001)


def _timed(_: str) -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname)s %(message)s")


def main() -> int:
    directory = Path(os.environ[_DIRECTORY])
    fault = functools.partial(_pause, directory)
    # With the time: where a test waited too long is seen in the log.
    daemon_main.PriorityFormatter = _timed  # type: ignore[assignment, misc]
    daemon_main.Setup = functools.partial(Setup, fault=fault)  # type: ignore[misc, assignment]
    return daemon_main.main(["accelvisord"][1:])


if __name__ == "__main__":
    sys.exit(main())
