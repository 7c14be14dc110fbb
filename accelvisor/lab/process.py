"""Processes of the laboratory: start, watch, time out and end exactly those that are ours.

A pid alone is not an identity: it is reused. Whatever the lab remembers across its own death is
a pid with the start time that the kernel gives it, and nothing is signalled unless both agree.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelvisor.errors import DeadlineError, SystemFailure

_WHERE = "lab"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can be recognised again later: pid and start time in clock ticks."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a living process; None when there is none (a zombie counts as gone)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        # The command name may hold blanks and brackets; the fields after its last bracket do not.
        fields = text.rpartition(")")[2].split()
        if len(fields) < 20 or fields[0] in ("Z", "X"):
            return None
        return cls(pid, int(fields[19]))

    @classmethod
    def own(cls) -> ProcessId:
        """This very process."""
        found = cls.of(os.getpid())
        if found is None:
            raise SystemFailure("/proc does not show this process", where=_WHERE)
        return found

    def alive(self) -> bool:
        """Whether that same process still runs."""
        return ProcessId.of(self.pid) == self

    def end(self, *, deadline_s: float, signals: Sequence[int] = (signal.SIGKILL,)) -> bool:
        """Send the signals in order, each with its share of the deadline; True once it is gone."""
        for number in signals:
            try:
                handle = os.pidfd_open(self.pid)
            except OSError:
                return True
            try:
                # The pidfd pins the process: checked after opening, it cannot change under us.
                if not self.alive():
                    return True
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
                if readable([handle], deadline_s / len(signals)):
                    return True
            finally:
                os.close(handle)
        return not self.alive()


def readable(descriptors: Sequence[int], timeout_s: float | None = None) -> list[int]:
    """Those that can be read, a pidfd when its process has ended; none of them after the timeout.

    Not select(2), which knows no descriptor above 1023: whoever uses the laboratory may have many.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """The same command, killed by the kernel when the process that started it dies."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]


def in_private_mounts(argv: Sequence[str], *, proc: Path | None = None) -> list[str]:
    """The same command in mount and pid namespaces of its own.

    Every mount it makes and every process it leaves vanish with it, however it ends; this is what
    keeps debootstrap and package scripts from leaving a mounted /proc or a stray daemon behind.
    """
    mount_proc = f"--mount-proc={proc}" if proc is not None else "--mount-proc"
    return die_with_parent(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", mount_proc, "--", *argv]
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a child and whatever it started, given that it leads its own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: bytes | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    where: str = _WHERE,
    shown: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run to the end, capturing both streams; past the timeout the process group is ended.

    ``shown`` is the command as errors quote it, when the real one would only distract.
    """
    quoted = argv if shown is None else shown
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise SystemFailure(f"cannot start {argv[0]}: {error.strerror}", where=where) from error
    with process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            kill_group(process)
            raise DeadlineError(
                f"not done in {timeout:g} s: {shorten(quoted)}", where=where
            ) from error
        except BaseException:
            kill_group(process)
            raise
    result = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
    if check and result.returncode != 0:
        raise failure(quoted, result.returncode, err or out, where=where)
    return result


def failure(argv: Sequence[str], code: int, output: bytes, *, where: str) -> SystemFailure:
    """One sentence about a failed command, with the end of what it said."""
    said = output.decode(errors="replace").strip().splitlines()[-12:]
    tail = "\n  ".join(["", *said]) if said else " (it said nothing)"
    return SystemFailure(
        f"exit status {code} from: {shorten(argv)}{tail}", code="command-failed", where=where
    )


def shorten(argv: Sequence[str], width: int = 160) -> str:
    """A command as people read it, cut to one line."""
    text = " ".join(argv).replace("\n", " ")
    return text if len(text) <= width else text[: width - 1] + "…"


def wait_until(
    condition: Callable[[], bool],
    *,
    deadline_s: float,
    what: str,
    interval_s: float = 0.05,
    longest_s: float = 1.0,
) -> None:
    """Wait for a condition that nothing announces, looking less and less often.

    This is the lab's only pause: whatever can announce itself (a child's end, a notify socket) is
    waited for by file descriptor instead.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"not within {deadline_s:g} s: {what}", where=_WHERE)
        time.sleep(min(interval_s, left))
        interval_s = min(interval_s * 1.3, longest_s)
