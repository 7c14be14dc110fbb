"""BAR0 behind the rules that survive a migration.

While a VM is switched over, its functions may read as 0 (BARs not mapped yet) or as all-ones (the
function's process is being replaced). Both mean *in transition*: nothing that was read counts, back
off and read again, up to a deadline. What the guest must notice afterwards is small: EPOCH changed
(moved or restored; commands in flight go on) and RESET_COUNT changed (everything is gone).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from accelvisor.abi import ABI_MAJOR
from accelvisor.abi.registers import IN_TRANSITION_32, MAGIC, Reg, Status, WindowLayout
from accelvisor.errors import ProtocolError, UnavailableError
from accelvisor.guest.errors import DeviceInTransition
from accelvisor.guest.transport import Transport
from accelvisor.limits import LIMITS

#: QEMU's own patience with a function is 5 s; a migration under load took up to 20 s.
TRANSITION_S = 30.0
_FIRST_NAP_S = 0.0005
_LONGEST_NAP_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """What may change under a running guest."""

    status: Status
    epoch: int
    reset_count: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What a function is. ``*_bytes`` in bytes."""

    uuid: str
    abi: tuple[int, int]
    features: int
    queues: int
    ring_entries: int
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    staging_offset: int

    @property
    def layout(self) -> WindowLayout:
        """Where the queues lie in the window."""
        return WindowLayout(self.queues, self.ring_entries)


class Registers:
    """Reads that are either true or an error, never an absent device's bits."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transition_s: float = TRANSITION_S,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._sleep = sleep
        self._transition_s = transition_s
        self.transitions = 0  # how many times the device was seen absent

    def present(self) -> bool:
        """One look: whether the device answers now.

        Raises:
            ProtocolError: something else than a function answers.
        """
        magic = self._transport.read32(Reg.MAGIC)
        if magic == MAGIC:
            return True
        if magic in IN_TRANSITION_32:
            return False
        raise ProtocolError(
            f"the device's first register reads {magic:#010x}, a function's reads {MAGIC:#010x}",
            code="not-a-function",
            where="register:magic",
            hint="is this the right PCI device?",
        )

    def steady(self, read: Callable[[Transport], T]) -> T:
        """``read`` the device while it is present throughout; try again until it is.

        Raises:
            DeviceInTransition: it was absent for longer than the transition deadline.
            ProtocolError: something else than a function answers.
        """
        deadline = self._clock() + self._transition_s
        nap = _FIRST_NAP_S
        while True:
            # Present before and after: what was read between is from a device that was there.
            if self.present():
                value = read(self._transport)
                if self.present():
                    return value
            self.transitions += 1
            if self._clock() >= deadline:
                raise DeviceInTransition(
                    f"the device has read as absent for {self._transition_s:g} s",
                    where="register:magic",
                    hint="was the function detached, or did its migration fail?",
                )
            self._sleep(nap)
            nap = min(nap * 2, _LONGEST_NAP_S)

    def state(self) -> State:
        """The registers that may change under a running guest, read together."""

        def read(t: Transport) -> State:
            return State(
                Status(t.read32(Reg.STATUS)), t.read32(Reg.EPOCH), t.read32(Reg.RESET_COUNT)
            )

        return self.steady(read)

    def identity(self) -> Identity:
        """Read and check what the function says of itself.

        Raises:
            ProtocolError: values that no function has.
            UnavailableError: an ABI that this package does not speak.
            DeviceInTransition: the device is absent.
        """
        identity = self.steady(_identity)
        major, minor = identity.abi
        if major != ABI_MAJOR:
            raise UnavailableError(
                f"the device speaks ABI {major}.{minor}, this package speaks {ABI_MAJOR}",
                code="abi-unknown",
                where="register:abi-version",
                hint="install the guest package that belongs to the host's version",
            )
        _check(identity, len(self._transport.window))
        return identity


def _identity(t: Transport) -> Identity:
    version = t.read32(Reg.ABI_VERSION)
    uuid = b"".join(t.read32(Reg.UUID + 4 * i).to_bytes(4, "little") for i in range(4))
    return Identity(
        uuid="-".join(uuid[a:b].hex() for a, b in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 16))),
        abi=(version >> 16, version & 0xFFFF),
        features=t.read64(Reg.FEATURES_64),
        queues=t.read32(Reg.QUEUES),
        ring_entries=t.read32(Reg.RING_ENTRIES),
        cores=t.read32(Reg.CORES),
        chips=t.read32(Reg.CHIPS),
        memory_bytes=t.read64(Reg.MEMORY_BYTES_64),
        window_bytes=t.read64(Reg.WINDOW_BYTES_64),
        staging_offset=t.read64(Reg.STAGING_OFFSET_64),
    )


def _check(identity: Identity, window: int) -> None:
    """Numbers that index memory are checked, also when they come from the host."""
    entries = identity.ring_entries
    problem = ""
    if not 1 <= identity.queues <= LIMITS.queues:
        problem = f"{identity.queues} queues"
    elif not 2 <= entries <= 65536 or entries & (entries - 1):
        problem = f"{entries} ring entries"
    elif identity.window_bytes > window:
        problem = f"a window of {identity.window_bytes} bytes in a BAR of {window}"
    elif not identity.layout.staging <= identity.staging_offset <= identity.window_bytes:
        problem = f"staging at {identity.staging_offset:#x}"
    if problem:
        raise ProtocolError(
            f"the device claims {problem}",
            code="device-implausible",
            where="registers",
            hint="the function's process is damaged, or this is another device",
        )
