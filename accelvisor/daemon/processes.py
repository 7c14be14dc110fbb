"""Processes that are not our children: detached starts, identity by pid and start time, waiting.

A pid alone is not an identity, since pids are used again; with the start time of the same boot it
is. Waiting and signalling go through a pidfd, which cannot hit another process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import DeadlineError, SystemFailure

# Run by sh, which ends at once. The subshell records its own stat line before it becomes the
# command (exec and setsid keep pid and start time), so a daemon that is killed right after the
# start still finds the process.
_DETACH = (
    "r=$1; l=$2; shift 2; "
    '( exec </dev/null >>"$l" 2>&1; IFS= read -r s </proc/self/stat; '
    'printf "%s\\n" "$s" >"$r"; exec setsid "$@" ) &'
)

#: How long a detached process may take to record itself (seconds).
START_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process that ran when this was made: pid, its start time in clock ticks since boot, and its
    process group."""

    pid: int
    started: int
    group: int

    def alive(self) -> bool:
        now = _stat(self.pid)
        return now is not None and now.started == self.started

    def signal(self, number: signal.Signals) -> None:
        """Send it, unless the process is gone."""
        fd = self._open()
        if fd is None:
            return
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)

    def family(self) -> list[Process]:
        """The other members of the group that it leads. Ask while it lives: the number of a group
        that has ended may be given to strangers."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        others = [_stat(pid) for pid in pids if pid != self.pid]
        return [item for item in others if item is not None and item.group == self.pid]

    async def wait(self, deadline_s: float) -> bool:
        """Until it has ended; False when the deadline came first."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.ended()
            return True
        except TimeoutError:
            return False

    async def ended(self) -> None:
        """Until it has ended, however long."""
        fd = self._open()
        if fd is None:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def on_end() -> None:
            loop.remove_reader(fd)
            ended.set_result(None)

        loop.add_reader(fd, on_end)
        try:
            await ended
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _open(self) -> int | None:
        """A pidfd that is certainly of this process: identity is checked after the open."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if not self.alive():
            os.close(fd)
            return None
        return fd


def from_record(path: Path) -> Process | None:
    """The process whose stat line stands in ``path``, if it is still that one and no zombie."""
    try:
        recorded = parse_stat(path.read_text(errors="replace"))
    except OSError:
        return None
    if recorded is None:
        return None
    now = _stat(recorded.pid)
    if now is None or now.started != recorded.started:
        return None
    return now


def of_pid(pid: int) -> Process | None:
    """The process that has this pid now."""
    return _stat(pid)


def parse_stat(line: str) -> Process | None:
    """proc(5), /proc/PID/stat. The command name may hold blanks and brackets: count from its end.

    None for anything that is no stat line, and for a zombie, which only waits to be reaped.
    """
    head, bracket, tail = line.rpartition(")")
    pid = head.partition("(")[0].strip()
    fields = tail.split()
    if not bracket or not pid.isdecimal() or len(fields) < 20:
        return None
    if fields[0] in ("Z", "X") or not fields[2].isdecimal() or not fields[19].isdecimal():
        return None
    return Process(pid=int(pid), started=int(fields[19]), group=int(fields[2]))


def _stat(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return parse_stat(text)


async def spawn_detached(
    command: Sequence[str], record: Path, log: Path, environ: Mapping[str, str]
) -> None:
    """Start ``command`` as nobody's child, leading a session of its own, and return once ``record``
    holds its stat line.

    Raises:
        SystemFailure: ``supervisor`` when it cannot be started.
    """
    record.unlink(missing_ok=True)
    argv = ["/bin/sh", "-c", _DETACH, "sh", str(record), str(log), *command]
    code, _, err = await run(argv, environ, 5.0)
    if code != 0:
        raise SystemFailure(
            f"cannot start {command[0]}: {err.strip()}", code="supervisor", where=str(record.parent)
        )
    loop = asyncio.get_running_loop()
    end = loop.time() + START_S
    while not (record.exists() and record.stat().st_size):
        if loop.time() > end:
            raise SystemFailure(
                f"{command[0]} did not start; its log is {log}",
                code="supervisor",
                where=str(record.parent),
            )
        await asyncio.sleep(0.001)


async def run(
    argv: Sequence[str], environ: Mapping[str, str], deadline_s: float
) -> tuple[int, str, str]:
    """Run a short command: (exit code, stdout, stderr).

    Raises:
        SystemFailure: ``supervisor`` when it cannot be started.
        DeadlineError: ``supervisor-deadline``; the command was killed.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
        )
    except OSError as error:
        raise SystemFailure(
            f"cannot run {argv[0]}: {error.strerror}", code="supervisor", where=argv[0]
        ) from error
    try:
        async with asyncio.timeout(deadline_s):
            out, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise DeadlineError(
            f"{argv[0]} did not end within {deadline_s:g} s",
            code="supervisor-deadline",
            where=argv[0],
        ) from None
    return child.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")
