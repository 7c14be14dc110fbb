"""Balancing what functions take of their card's host port (``host_port`` of a card, ``weight`` of a
profile).

While a card with a limit has functions, each of them is looked at once a period
(``LIMITS.port_poll_s``): how much it took, and whether anything of it had to wait. Rates follow
from that (accelvisor.isolation.rates), and those functions are told whose rate changes. Looking is
a read of the function's state memfd, which its holder lends, so that a function which rests is
never woken for it. Without such a card there is no timer.

The rate that counts is the one in the function's state. So a daemon that was restarted, a worker
that died or a function that began anew is nothing special: what it has is seen, and is not what it
should have. Functions keep their rates when the daemon ends.

What is read was written by the worker: one that a guest has taken over may claim anything, and
ignore its rate. Claims get it at most its weighted share; that it copies no faster only the worker
of an honest device model ensures.

Use::

    port = Port(paths, look)          # look() -> Shares, of functions whose processes run
    task = asyncio.create_task(port.run())
    port.changed()                    # after functions come or go, and after a reload
    port.stop(); await task
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from accelvisor.daemon import function_link
from accelvisor.daemon.moving import orders
from accelvisor.daemon.paths import FunctionPaths, Paths
from accelvisor.errors import AccelvisorError, ProtocolError
from accelvisor.function import state as s
from accelvisor.isolation import rates
from accelvisor.isolation.rates import Observation
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)

#: A function that does not answer is asked again after so long.
_RETRY_S = 1.0
#: Its memory is lent anew after so long: one that gave up and began anew has another.
_RENEW_S = LIMITS.function_poll_s
#: Periods over which the most that a function took counts.
_PERIODS = 3
#: What passes within a shorter time is bursts, and says nothing of a rate.
_LEAST_S = LIMITS.port_poll_s / 2
_FIRST = s.COUNTERS_AT
_WORDS = struct.Struct(f"<{s.W_PORT_UNTIL + 1 - _FIRST // 8}Q")


class Member(NamedTuple):
    """A function's card, and its weight there."""

    card: str
    weight: int


class Shares(NamedTuple):
    """Who shares what: functions by UUID; bytes a second by card, 0 or nothing for no limit."""

    members: Mapping[str, Member]
    capacities: Mapping[str, int]


class Seen(NamedTuple):
    """One function's numbers at a moment: bytes that ever passed, its rate, the end of its debt
    (CLOCK_MONOTONIC, nanoseconds)."""

    passed: int
    rate: int
    until_ns: int


class Watched:
    """One function as the daemon follows it. At most one order to it is under way at a time."""

    def __init__(self, paths: FunctionPaths) -> None:
        self.paths = paths
        self.order: asyncio.Task[None] | None = None
        self.not_before = 0.0
        self.renew_at = 0.0
        self.silent = False
        self._fd = -1
        self._last: tuple[int, float] | None = None
        self._recent: deque[int] = deque(maxlen=_PERIODS)
        self._hungry = False

    def adopt(self, fd: int, now: float) -> None:
        """A descriptor of its state, as lent. Takes ownership.

        Raises:
            ProtocolError: it is not what a state is.
        """
        try:
            # Only memory has seals: reading it cannot block, nor end early.
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed or os.fstat(fd).st_size < _FIRST + _WORDS.size:
            os.close(fd)
            raise ProtocolError(
                "the function's state is no such file", code="function-reply", where="port"
            )
        self.renew_at = now + _RENEW_S
        if self._fd >= 0 and os.path.sameopenfile(fd, self._fd):
            os.close(fd)
            return
        self.close()
        self._fd = fd
        self._last = None

    def look(self) -> Seen | None:
        """What its state says now; None before it was lent."""
        if self._fd < 0:
            return None
        words = _WORDS.unpack(os.pread(self._fd, _WORDS.size, _FIRST))
        first = _FIRST // 8
        return Seen(
            words[s.K["port_bytes"] - first],
            min(words[s.W_PORT_RATE - first], LIMITS.port_rate_bytes),
            words[s.W_PORT_UNTIL - first],
        )

    def observe(self, member: Member, now: float) -> Observation | None:
        """What it did lately; None before it was lent."""
        seen = self.look()
        if seen is None:
            return None
        passed, since = self._last or (seen.passed, -1.0)
        seconds = now - since
        if self._last is None:
            self._last = (seen.passed, now)
        elif seconds >= _LEAST_S:
            took = max(0, int((seen.passed - passed) / seconds))
            self._recent.append(min(LIMITS.port_rate_bytes, took))
            self._hungry = seen.until_ns > since * 1e9
            self._last = (seen.passed, now)
        used = max(self._recent, default=0)
        return Observation(member.card, member.weight, seen.rate, used, self._hungry)

    def close(self) -> None:
        """Give its state back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Port:
    """The balancer of one host.

    Args:
        look: who shares what now; only functions whose processes run.
        clock: seconds of CLOCK_MONOTONIC, as functions read it.
    """

    def __init__(
        self,
        paths: Paths,
        look: Callable[[], Shares],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = LIMITS.port_poll_s,
    ) -> None:
        self._paths = paths
        self._look = look
        self._clock = clock
        self._period = period_s
        self._watched: dict[str, Watched] = {}
        #: Functions on cards without a limit that are known to have no rate.
        self._free: set[str] = set()
        self._orders: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = False

    def changed(self) -> None:
        """Functions came or went, or cards have other limits."""
        self._changed.set()

    def stop(self) -> None:
        """Let :meth:`run` end."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Balance until :meth:`stop`. What one function fails in concerns only that one."""
        try:
            while not self._stopping:
                self._changed.clear()
                try:
                    pause = self._round()
                except Exception:  # a bug here must not leave the ports of all others unbalanced
                    LOG.exception("balancing host ports")
                    pause = _RETRY_S
                try:
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await self._end()

    async def _end(self) -> None:
        for uuid in list(self._watched):
            self._forget(uuid)
        # Not cancelled: descriptors that come late have to be closed. Each has a deadline.
        await asyncio.gather(*self._orders, return_exceptions=True)

    # --- a period ---------------------------------------------------------------------------------

    def _round(self) -> float | None:
        """Look at everybody and send what follows; seconds until the next time, None: when
        something changed.
        """
        shares, now = self._look(), self._clock()
        limited = {u for u, member in shares.members.items() if shares.capacities.get(member.card)}
        self._free &= shares.members.keys() - limited
        follow = {u: shares.members[u] for u in shares.members if u not in self._free}
        for uuid in self._watched.keys() - follow.keys():
            self._forget(uuid)
        observations = {}
        for uuid, member in follow.items():
            watched = self._watched.get(uuid)
            if watched is None:
                watched = self._watched[uuid] = Watched(self._paths.function(uuid))
            if now >= watched.renew_at:
                self._begin(watched, self._lend(watched))
            seen = watched.observe(member, now)
            if seen is not None:
                observations[uuid] = seen
        wanted = rates.decide(observations, shares.capacities)
        for uuid, rate in rates.orders(observations, wanted):
            self._begin(self._watched[uuid], self._send(self._watched[uuid], rate))
        for uuid, seen in observations.items():
            if uuid not in limited and not seen.rate:
                self._free.add(uuid)
                self._forget(uuid)
        if limited:
            return self._period
        return _RETRY_S if self._watched else None

    def _forget(self, uuid: str) -> None:
        self._watched.pop(uuid).close()

    # --- orders to functions ----------------------------------------------------------------------

    def _begin(self, watched: Watched, order: Coroutine[Any, Any, None]) -> None:
        """Beside the loop: one that hangs keeps no other waiting."""
        if watched.order is not None or self._clock() < watched.not_before:
            order.close()
            return
        watched.order = task = asyncio.create_task(self._carry(watched, order))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _carry(self, watched: Watched, order: Coroutine[Any, Any, None]) -> None:
        try:
            await order
            watched.silent = False
        except AccelvisorError as error:
            watched.not_before = self._clock() + _RETRY_S
            if not watched.silent:
                LOG.warning("host port: %s (%s)", error.message, error.where)
            watched.silent = True
        except Exception:
            watched.not_before = self._clock() + _RETRY_S
            LOG.exception("host port of %s", watched.paths.directory.name)
        finally:
            watched.order = None

    async def _lend(self, watched: Watched) -> None:
        given = await orders.order(watched.paths.holder_socket, "lend", expected=4)
        state, *others = given.fds
        for fd in others:
            os.close(fd)
        if not any(known is watched for known in self._watched.values()):
            os.close(state)  # forgotten meanwhile
            return
        watched.adopt(state, self._clock())

    async def _send(self, watched: Watched, rate: int) -> None:
        await function_link.call(watched.paths.control_socket, "port", {"rate": rate})
