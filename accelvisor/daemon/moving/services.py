"""What both sides of a move need of the daemon around them."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from accelvisor.daemon.functions import Functions
from accelvisor.daemon.moving.journal import Journal
from accelvisor.daemon.moving.keys import Keys
from accelvisor.daemon.moving.owners import Owners
from accelvisor.daemon.moving.watermarks import Watermarks
from accelvisor.frames.audit import Sink
from accelvisor.frames.verify import UsedNonces
from accelvisor.migration.listener import Deposit
from accelvisor.migration.tickets import Tickets


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may set (accelvisor.toml, [migration]).

    Attributes:
        downtime_s: what the rounds before the switch-over aim at.
        rate: bytes a second on the wire at most; None without a limit.
        streams: connections of one function's transfer.
        first_pass_s: how long the VM's own migration waits for the function's first pass.
    """

    downtime_s: float = 0.05
    rate: float | None = None
    streams: int = 2
    first_pass_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Services:
    """Of one daemon.

    Attributes:
        boot: how often this daemon has started.
        record: (kind, subject UUID, message): an event for operators.
        context: a function's PCI configuration space as its QEMU has it (domain, function, what
            the device itself has).
        leaves: whether somebody here migrates a domain away.
        arrived: a move has ended here: look at libvirt's domains again.
        clock_ns: nanoseconds since 1970.
        fault: called with the name of each step that was just done, for tests.
    """

    keys: Keys
    owners: Owners
    functions: Functions
    journal: Journal
    tickets: Tickets[Deposit]
    audit: Sink
    nonces: UsedNonces
    watermarks: Watermarks
    boot: int
    record: Callable[[str, str, str], Awaitable[Any]]
    context: Callable[[str, str, bytes], Awaitable[bytes]]
    arrived: Callable[[], Awaitable[None]]
    leaves: Callable[[str], Awaitable[bool]]
    settings: Settings = field(default_factory=Settings)
    #: Downtimes that were wished for (seconds), by domain UUID.
    targets: dict[str, float] = field(default_factory=dict)
    clock_ns: Callable[[], int] = time.time_ns
    entropy: Callable[[int], bytes] = os.urandom
    fault: Callable[[str], None] = lambda step: None
