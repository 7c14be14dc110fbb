"""Finds a worker that lives but answers no more. Standard library only: the holder's.

Costs nothing while nothing happens: the holder is woken by the first message after a quiet time,
then it looks a few times a second until it is quiet again. It takes nothing from the connection;
what the worker is at stands in the receive record.
"""

from __future__ import annotations

import select
import socket
from typing import NamedTuple

from accelvisor.function import state as s
from accelvisor.function.state import State
from accelvisor.function.wire import in_hand
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.protocol import Command

#: Seconds between two looks.
LOOK_S = 0.5
#: For these a worker may have to wait for the engine, for as long as a client is kept waiting at
#: all: they reset the device, or freeze it.
_SLOW = frozenset((
    Command.VERSION, Command.REGION_WRITE, Command.REGION_WRITE_MULTI, Command.DEVICE_RESET,
    Command.DEVICE_FEATURE,
))  # fmt: skip
_QUICK_S = LIMITS.vfio_reply_s / 2
_SLOW_S = LIMITS.vfio_reply_s + LOOK_S
#: A new client waits for the old one's work to end, and for everything to be wiped.
_WIPE_S = 3 * LIMITS.vfio_reply_s


class _Seen(NamedTuple):
    """What a worker is at. Equal ones mean that it has not moved."""

    worker: int
    requests: int
    record: int
    command: int


class Watchdog:
    """Watches the worker over one state memfd."""

    def __init__(self, state_fd: int) -> None:
        self._state = State(state_fd)
        self._seen: _Seen | None = None
        self._since = 0.0

    def frozen_by(self, bit: int) -> bool:
        """Whether the function stands still for this reason."""
        return bool(self._state.u32[s.R_FREEZE] & bit)

    def look(self, connection: socket.socket, number: int, worker: int, now: float) -> bool | None:
        """True when the worker is to be replaced, None when there is nothing to watch.

        Args:
            connection: the client's; only asked whether there is something to read.
            number: its number.
            worker: any number that is another one for the next worker.
            now: seconds, monotonic.
        """
        u64 = self._state.u64
        if u64[s.TX_AT // 8] and not _has_room(connection):
            self._seen = None  # it waits for the client to take what it is sent
            return False
        command = in_hand(self._state)
        if command is None:
            try:
                waits = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._seen = None
                return None
            except OSError:
                waits = b""
            # At the end of a connection the engine is frozen, as for a reset.
            command = Command.DMA_MAP if waits else Command.DEVICE_RESET
        seen = _Seen(worker, u64[s.K["requests"]], u64[s.RX_AT // 8], command)
        if seen != self._seen:
            self._seen, self._since = seen, now
            return False
        if self._state.u32[s.N_SEEN] != number:
            allowed = _WIPE_S
        else:
            allowed = _SLOW_S if command in _SLOW else _QUICK_S
        return now - self._since > allowed


def _has_room(connection: socket.socket) -> bool:
    """Whether the client takes what it is sent. Asked, since a worker may also hang, or have been
    stopped, between the last byte of a reply and the record of it.
    """
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))
