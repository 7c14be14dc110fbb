"""The holder: the process of a function that must not die, and does as little as possible.

It owns what cannot be made again while a VM runs: the listening sockets, the client's connection,
the three memfds, the reply pipe, and a duplicate of every descriptor that the client sent. It
starts a zygote, has it fork the worker, watches the worker's channel, and has the next one forked
when the worker dies. It looks at no message of the client's, with one exception: when it gives up
it answers itself, because a vfio-user client that is met with silence takes its VM down.

Standard library only; one thread; no state that is not visible in ``status``.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from accelvisor.errors import ConflictError
from accelvisor.function import channel as ch
from accelvisor.function import shape as shapes
from accelvisor.function import zygote
from accelvisor.function.doors import Doors
from accelvisor.function.ending import end_of, kill
from accelvisor.function.endpoints import listen, notify_ready, open_descriptors
from accelvisor.function.files import NAMES, Files
from accelvisor.function.giveup import Answerer
from accelvisor.function.hiding import slim
from accelvisor.function.loop import Loop
from accelvisor.function.requests import Answer, Requests
from accelvisor.function.spec import Spec
from accelvisor.function.state import FD_SLOTS, FREEZE_QUARANTINE
from accelvisor.function.watchdog import LOOK_S, Watchdog
from accelvisor.limits import LIMITS

_RETRY_S = 0.1


class Holder:
    """One function's holder."""

    def __init__(self, spec: Spec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        #: What the function begins with; the worker may have been given another since.
        self._shape = shapes.of(spec)
        self._clock = clock
        self._loop = Loop(clock)
        self._kept: dict[int, int] = {}
        self._connection: socket.socket | None = None
        self._number = 0
        self._worker: socket.socket | None = None
        self._pid = 0  # the worker's, before it serves
        self._worker_pid = 0
        self._zygote: socket.socket | None = None
        self._zygote_pid = 0
        self._warm = False
        self._starts: deque[float] = deque()
        self._restarts = 0
        self._started_at = clock()
        self._gap_ms = 0.0
        self._died_at = 0.0
        self._ready = False
        self._requests: Requests | None = None
        self._gave_up = ""
        self._renewing = False
        self._for_good = False
        self._answerer: Answerer | None = None
        self._running = True

    # --- life -------------------------------------------------------------------------------------

    def run(self, first_zygote: tuple[socket.socket, int]) -> None:
        """Serve until SIGTERM or ``shutdown``.

        Args:
            first_zygote: link and pid of one that was forked before this module was imported.

        Raises:
            ConflictError: another holder serves this function.
            SystemFailure: a socket cannot be made.
        """
        self._refuse_second()
        self._adopt_zygote(*first_zygote)
        spec = self._spec
        wake, self._signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._loop.watch(wake, lambda: self._reap(wake))
        self._make_memory()
        self._pipe = os.pipe2(os.O_CLOEXEC)
        self._control = listen(spec.control_socket)
        self._doors = Doors(spec, self._loop.watch, self._loop.forget, self._accept_client)
        self._requests = Requests(
            listen(spec.holder_socket),
            {
                "status": self._status,
                "wait": self._wait,
                "admit": self._doors.admit,
                "lend": self._lend,
                "shape": self._remember,
                "renew": self._renew,
                "kill-worker": self._kill_worker,
                "give-up": self._asked_to_give_up,
                "shutdown": self._shutdown,
            },
            self._loop.watch,
            self._loop.forget,
            spec.keeper,
        )
        self._doors.open()
        slim()
        try:
            self._loop.run()
        finally:
            self._end()

    def _make_memory(self) -> None:
        self._files = Files(self._shape, self._spec.window_bytes)
        self._watchdog = Watchdog(self._files.state)

    def _refuse_second(self) -> None:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with probe:
            try:
                probe.connect(self._spec.holder_socket)
            except OSError:
                return
        raise ConflictError(
            f"function {self._spec.uuid} runs already", code="function-running", where="holder",
            hint="stop it first",
        )  # fmt: skip

    def _end(self) -> None:
        kill(self._pid)
        kill(self._zygote_pid)
        self._doors.remove()
        for path in (self._spec.control_socket, self._spec.holder_socket):
            with suppress(OSError):
                os.unlink(path)

    def _stop(self) -> None:
        self._running = False
        self._loop.stop()

    def _reap(self, wake: int) -> None:
        try:
            os.read(wake, 4096)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except (BlockingIOError, ChildProcessError):
            pass

    # --- zygote and worker ------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            zygote.run(theirs, self._spec)
        theirs.close()
        self._adopt_zygote(ours, pid)

    def _adopt_zygote(self, link: socket.socket, pid: int) -> None:
        link.setblocking(False)
        self._zygote, self._zygote_pid, self._warm = link, pid, False
        self._loop.watch(link.fileno(), self._from_zygote)

    def _from_zygote(self) -> None:
        link = self._zygote
        if link is None:
            return
        received = _receive(link)
        if received is None:
            return
        data = received[0]
        if ch.unpack(data)[0] == ch.WARM:
            self._warm = True
            if self._worker is None:
                self._start_worker()
            return
        # It died. A worker that lives goes on; the next one needs a new zygote.
        self._loop.forget(link.fileno())
        link.close()
        self._zygote, self._zygote_pid = None, 0
        if self._spend():
            self._start_zygote()

    def _spend(self) -> bool:
        """One restart out of the budget; gives up when there is none left."""
        now = self._clock()
        while self._starts and now - self._starts[0] > 60:
            self._starts.popleft()
        if self._gave_up or len(self._starts) >= LIMITS.worker_restarts_per_minute:
            self._give_up(f"{len(self._starts)} restarts within a minute")
            return False
        self._starts.append(now)
        return True

    def _start_worker(self) -> None:
        if self._gave_up or not self._warm or self._zygote is None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slots = array.array("I", self._kept)
        fds = [theirs.fileno(), self._control.fileno(), *self._files.all(), *self._pipe]
        if self._connection is not None:
            fds.append(self._connection.fileno())
        fds.extend(self._kept.values())
        number = self._number if self._connection is not None else 0
        message = ch.pack(ch.FORK, number) + slots.tobytes()
        try:
            socket.send_fds(self._zygote, [message], fds)
        except OSError:
            ours.close()
            self._loop.later(self._try_again, _RETRY_S)
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._worker = ours
        self._loop.watch(ours.fileno(), self._from_worker)

    def _try_again(self) -> None:
        if self._worker is None and self._spend():
            self._start_worker()

    def _from_worker(self) -> None:
        link = self._worker
        if link is None:
            return
        received = _receive(link)
        if received is None:
            return
        data, fds = received
        kind, argument = ch.unpack(data)
        if not data:
            self._worker_died(link)
        elif kind == ch.KEEP and len(fds) == 1 and argument < FD_SLOTS:
            self._drop(argument)
            self._kept[argument] = fds.pop()
        elif kind == ch.DROP:
            self._drop(argument)
        elif kind == ch.MEMORY and len(fds) == 1:
            self._files.adopt_memory(fds.pop(), self._shape.memory_bytes)
        elif kind == ch.TROUBLE:
            self._tell_trouble()
        elif kind == ch.GONE and argument == self._number:
            self._disconnect()
        elif kind == ch.HERE:
            self._pid = argument
        elif kind == ch.READY:
            self._worker_pid = self._pid
            self._renewing = False
            if self._died_at:
                self._gap_ms = (self._clock() - self._died_at) * 1000
            if not self._ready:
                self._ready = True
                notify_ready(f"serves a function of profile {self._spec.profile}")
        for fd in fds:
            os.close(fd)

    def _worker_died(self, link: socket.socket) -> None:
        self._loop.forget(link.fileno())
        link.close()
        self._worker, self._worker_pid, self._pid = None, 0, 0
        self._died_at = self._clock()
        if self._running and not self._gave_up and self._spend():
            self._restarts += 1
            self._start_worker()

    def _drop(self, slot: int) -> None:
        fd = self._kept.pop(slot, None)
        if fd is not None:
            os.close(fd)

    # --- the client -------------------------------------------------------------------------------

    def _accept_client(self, door: socket.socket) -> None:
        try:
            self._connection, _ = door.accept()
        except OSError:
            return
        # One client at a time, whatever its door; the next waits in the backlog.
        self._doors.shut()
        self._number += 1
        self._starts.clear()
        self._loop.watch(self._connection.fileno(), self._heard)
        if self._for_good:
            self._take_over()
        elif self._gave_up:
            self._begin_anew()
        elif self._worker is not None:
            try:
                message = ch.pack(ch.CONNECT, self._number)
                socket.send_fds(self._worker, [message], [self._connection.fileno()])
            except OSError:
                # It is dead or takes no message: its successor is forked with the connection.
                kill(self._pid)

    def _heard(self) -> None:
        """The client sent something after a quiet time: see to it that it is answered."""
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._loop.later(self._look, LOOK_S)

    def _look(self) -> None:
        if self._connection is None or self._gave_up:
            return
        now = self._clock()
        stuck = self._watchdog.look(self._connection, self._number, self._restarts, now)
        if stuck is None:
            self._loop.watch(self._connection.fileno(), self._heard)
            return
        if stuck:
            print("the worker does not answer: killed", file=sys.stderr, flush=True)
            # Not SIGKILL: it is to blame for its end (blame.py). A stopped one has to go on to die.
            kill(self._pid or self._zygote_pid, signal.SIGABRT, signal.SIGCONT)
        self._loop.later(self._look, LOOK_S)

    def _disconnect(self) -> None:
        if self._connection is None:
            return
        self._loop.forget(self._connection.fileno())
        self._connection.close()
        self._connection = self._answerer = None
        self._loop.never(self._look)
        for slot in list(self._kept):
            self._drop(slot)
        self._doors.open()

    # --- giving up --------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        """No more workers: answer the client from here on, never be silent."""
        if self._gave_up:
            return
        self._gave_up = reason
        self._tell_trouble()
        print(f"function {self._spec.uuid}: gave up: {reason}", file=sys.stderr, flush=True)
        link = self._worker
        if link is not None:
            # What is queued is still read. A worker that has not said who it is cannot say so any
            # more, and ends by itself before it touches the connection.
            link.shutdown(socket.SHUT_RDWR)
            pid = self._pid
            while self._worker is link:
                self._from_worker()
                pid = self._pid or pid
            if pid:
                end_of(pid)  # two may not use one connection
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._take_over()

    def _begin_anew(self) -> None:
        """A new client after giving up: nothing is kept of the state that may be to blame."""
        self._files.close()
        self._make_memory()
        self._gave_up = ""
        self._tell_trouble()
        if self._zygote is None:
            self._start_zygote()
        elif self._worker is None:
            self._start_worker()

    def _remember(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What the function begins with from here on, should it have to begin anew."""
        self._shape = shapes.parse(parameters)
        return self._shape.to_dict()

    def _renew(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin anew between two owners: nothing is kept of what the one before could write, in
        memory, registers, queues, or the worker's own heap and caches.
        """
        if self._connection is not None:
            raise ConflictError(
                "a client is connected", code="function-in-use", where="holder",
                hint="stop the VM first",
            )  # fmt: skip
        self._remember(parameters)
        if self._pid:
            end_of(self._pid)  # before its link goes, or it may have ended and its number with it
        link, self._worker = self._worker, None
        if link is not None:
            self._loop.forget(link.fileno())
            link.close()
        self._pid = self._worker_pid = 0
        self._died_at, self._number = 0.0, 0
        for slot in list(self._kept):
            self._drop(slot)
        for fd in self._pipe:
            os.close(fd)
        self._pipe = os.pipe2(os.O_CLOEXEC)
        self._renewing = True
        self._begin_anew()
        return {"shape": self._shape.to_dict()}

    def _take_over(self) -> None:
        connection = self._connection
        if connection is None:
            return
        self._answerer = Answerer(self._files.state, connection, self._pipe)
        self._loop.watch(connection.fileno(), self._answer)
        self._go_on(self._answerer, self._answerer.resume())

    def _answer(self) -> None:
        if self._answerer is not None:
            self._go_on(self._answerer, self._answerer.answer())

    def _go_on(self, answerer: Answerer, connected: bool) -> None:
        if not connected or self._connection is None:
            self._disconnect()
        else:
            self._loop.watch(self._connection.fileno(), self._answer, answerer.events)

    # --- asked on holder.sock ------------------------------------------------------------------

    def _status(self, *_: object) -> dict[str, Any]:
        return {
            "uuid": self._spec.uuid,
            "peer": self._doors.peer,
            "ready": self._ready and not self._gave_up and not self._renewing,
            "gave_up": self._gave_up,
            "quarantined": self._watchdog.frozen_by(FREEZE_QUARANTINE),
            "connected": self._connection is not None,
            "connection": self._number,
            "data": self._files.data(),
            "holder_pid": os.getpid(),
            "zygote_pid": self._zygote_pid,
            "worker_pid": self._worker_pid,
            "worker_restarts": self._restarts,
            "last_restart_ms": round(self._gap_ms, 3),
            "kept_descriptors": len(self._kept),
            "open_descriptors": open_descriptors(),
            "uptime_s": round(self._clock() - self._started_at, 3),
        }

    def _trouble(self) -> dict[str, Any]:
        return {
            "gave_up": self._gave_up,
            "quarantined": self._watchdog.frozen_by(FREEZE_QUARANTINE),
        }

    def _tell_trouble(self) -> None:
        if self._requests is not None:
            self._requests.wake(self._trouble())

    def _wait(self, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is wrong, as soon as that is something else than what the caller knows: nobody has
        to look again and again, and an idle function is not woken.
        """
        now = self._trouble()
        known = {name: parameters.get(name) for name in now}
        return None if known == now else now

    def _kill_worker(self, *_: object) -> dict[str, Any]:
        pid = self._worker_pid
        if not pid:
            raise ConflictError("there is no worker now", code="no-worker", where="holder")
        kill(pid)
        return {"worker_pid": pid}

    def _asked_to_give_up(self, *_: object) -> dict[str, Any]:
        self._for_good = True
        self._give_up("asked to")
        return {"gave_up": self._gave_up}

    def _lend(self, *_: object) -> Answer:
        """The function's memory, to be copied: read-only but for the marks of what was written."""
        return Answer({"files": list(NAMES)}, self._files.lend())

    def _shutdown(self, *_: object) -> dict[str, Any]:
        self._stop()
        return {}


def _receive(link: socket.socket) -> tuple[bytes, list[int]] | None:
    """One datagram; empty at the end, None when there is none yet. A reset is reported once,
    before what is still queued.
    """
    for _ in range(2):
        try:
            data, fds, _, _ = socket.recv_fds(link, ch.MESSAGE_BYTES, 1)
            return data, fds
        except BlockingIOError:
            return None
        except ConnectionResetError:
            continue
    return b"", []
