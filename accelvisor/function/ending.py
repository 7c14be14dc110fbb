"""Ending a process that is no child of ours: a worker is the zygote's. Standard library only."""

from __future__ import annotations

import errno
import os
import select
import signal
from contextlib import suppress

#: A killed process is gone in milliseconds; a host in trouble may take longer.
_END_S = 2.0
#: Of pidfd_open(2): there is none, or it is being reaped at this moment.
_GONE = (errno.ESRCH, errno.EINVAL)


def kill(pid: int, *numbers: int) -> None:
    """Send signals, SIGKILL unless told otherwise, to a process that may have gone; 0 is none."""
    with suppress(ProcessLookupError):
        for number in (numbers or (signal.SIGKILL,)) if pid else ():
            os.kill(pid, number)


def end_of(pid: int) -> None:
    """Kill a process, which may end by itself meanwhile, and wait until it is gone."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll(_END_S * 1000)
    finally:
        os.close(process)
