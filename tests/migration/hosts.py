"""Hosts for tests: identities that trust each other, and connections between them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import UUID

from accelvisor.frames.identity import Identity, certificate
from accelvisor.migration.channel import Channel
from accelvisor.migration.tls import Credentials, Pin, Pins

_YEARS_NS = 200 * 365 * 86_400 * 10**9


@dataclass(frozen=True)
class Host:
    uuid: UUID
    identity: Identity

    @classmethod
    def make(cls, number: int) -> Host:
        return cls(UUID(int=number), Identity.generate(os.urandom))

    @property
    def pin(self) -> Pin:
        return Pin(self.uuid, self.identity.public)

    @property
    def revoked(self) -> Pin:
        return Pin(self.uuid, self.identity.public, revoked=True)

    def trusting(self, *pins: Pin) -> Credentials:
        shown = certificate(
            self.identity, self.uuid, serial=1, not_before_ns=0, not_after_ns=_YEARS_NS
        )
        return Credentials(self.uuid, self.identity, shown, Pins(pins))


A, B, STRANGER = (Host.make(number) for number in (0xA, 0xB, 0xC))


def both(*actions: Callable[[], object]) -> list[object]:
    """The actions' results, or what they raised; each ran in a thread of its own."""

    def caught(action: Callable[[], object]) -> object:
        try:
            return action()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(caught, actions))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def channels(
    count: int = 1,
    *,
    clock: Callable[[], float] = time.monotonic,
    near: Credentials | None = None,
    far: Credentials | None = None,
    stall_s: float = 10.0,
) -> tuple[list[Channel], list[Channel]]:
    """``count`` bulk connections from A to B: A's ends, B's ends."""
    near = near or A.trusting(B.pin)
    far = far or B.trusting(A.pin)
    ends: tuple[list[Channel], list[Channel]] = ([], [])
    for _ in range(count):
        mine, theirs = socket_pair()
        made = both(
            lambda sock=mine: Channel(sock, near, server=False, clock=clock, stall_s=stall_s),
            lambda sock=theirs: Channel(sock, far, server=True, clock=clock, stall_s=stall_s),
        )
        for end, channel in zip(ends, made, strict=True):
            if not isinstance(channel, Channel):
                raise AssertionError(channel)
            end.append(channel)
    return ends


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + seconds
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        tick.wait(0.005)


def close(ends: Iterable[Channel]) -> None:
    for end in ends:
        end.close()
