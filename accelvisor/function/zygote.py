"""The zygote: numpy and the device model imported, one thread, waiting to become workers.

Importing takes a tenth of a second, forking a few milliseconds; a guest whose worker was killed
waits for the latter. The zygote is itself a fork of the holder, so no second interpreter starts.
"""

from __future__ import annotations

import array
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from accelvisor.function.channel import FORK, MESSAGE_BYTES, SPEC, WARM, pack, unpack
from accelvisor.function.hiding import rename, slim

if TYPE_CHECKING:
    from accelvisor.function.spec import Spec
    from accelvisor.function.worker import Inherited

#: channel, control, state, window, memory, track, pipe out, pipe in
_FIXED = 8
_FORK_PAUSE_S = 0.25


def tell(link: socket.socket, spec: Spec) -> None:
    """From the holder: what the zygote at the other end is to be the zygote of."""
    link.send(pack(SPEC) + spec.to_json().encode())


def run(link: socket.socket, spec: Spec | None = None) -> NoReturn:
    """Serve the holder's FORK requests until it goes away. Without ``spec`` it is told one first
    (:func:`tell`), which need not be known yet when this begins.
    """
    try:
        _close_others(link.fileno())
        rename("av-zygote")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ends: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda *_: _reap(ends))
        # What importing leaves behind lives as long as the process: looking through it for garbage
        # again and again would take a tenth of a function's start.
        gc.disable()
        from accelvisor.function import worker
        from accelvisor.function.sandbox import prepare
        from accelvisor.function.spec import parse

        prepare()
        slim()
        gc.freeze()  # and it stays shared between the workers
        gc.enable()
        link.send(pack(WARM, os.getpid()))
        child = -1
        while True:
            data, fds = _receive(link)
            if not data:
                os._exit(0)
            kind, number = unpack(data[:MESSAGE_BYTES])
            if kind == SPEC:
                spec = parse(json.loads(data[MESSAGE_BYTES:]))
                continue
            if kind != FORK or len(fds) < _FIXED or spec is None:
                os._exit(1)
            crashed = _crashed(child, ends)
            child = _fork()
            if child == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                link.close()
                rename("av-worker")
                slots = array.array("I")
                slots.frombytes(data[MESSAGE_BYTES:])
                worker.main(spec, _inherited(number, fds, slots, crashed))
                os._exit(0)
            for fd in fds:
                os.close(fd)
    except BrokenPipeError:
        os._exit(0)  # the holder went away meanwhile, and has said why
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _fork() -> int:
    """As os.fork. A host that has no room for another process now is given a moment, then the
    holder's channel to the worker that was not made is closed, and it asks again.
    """
    try:
        return os.fork()
    except OSError as error:
        print(f"cannot fork a worker: {error}", file=sys.stderr, flush=True)
        time.sleep(_FORK_PAUSE_S)
        return -1


def _reap(ends: dict[int, int], pid: int = -1, options: int = os.WNOHANG) -> None:
    """Note how children ended."""
    try:
        while True:
            ended, status = os.waitpid(pid, options)
            if not ended:
                return
            ends[ended] = status
    except ChildProcessError:
        return


def _crashed(child: int, ends: dict[int, int]) -> bool:
    """Whether the last worker ended otherwise than by SIGKILL. The holder asks for the next one
    once a worker has closed its files, which is nearly the last that an ending process does.
    """
    if child > 0 and child not in ends:
        _reap(ends, child, 0)
    status = ends.get(child, 0)
    ends.clear()
    return status != 0 and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def _inherited(
    number: int, fds: list[int], slots: array.array[int], crashed: bool
) -> Inherited:
    from accelvisor.function.worker import Inherited

    rest = fds[_FIXED:]
    connection = socket.socket(fileno=rest.pop(0)) if number else None
    return Inherited(
        channel=socket.socket(fileno=fds[0]),
        control=socket.socket(fileno=fds[1]),
        state=fds[2],
        window=fds[3],
        memory=fds[4],
        track=fds[5],
        pipe=(fds[6], fds[7]),
        connection=connection,
        number=number,
        held=dict(zip(slots, rest, strict=True)),
        crashed=crashed,
    )


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(link, 65536, 253)
    return data, fds


def _close_others(keep: int) -> None:
    """The holder's descriptors are the holder's; what a worker needs comes with FORK."""
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, keep)
    os.closerange(keep + 1, min(limit, 65536))
