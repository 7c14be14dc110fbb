"""A computation that is moved at any instant ends with the bits of one that was never moved."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from accelvisor.embedded.host import EmbeddedHost
from accelvisor.embedded.vm import EmbeddedVm
from tests.amount import by_night

from .moving import RAM, Guest, two_hosts, unmoved

Hosts = tuple[EmbeddedHost, EmbeddedHost]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as pair:
        yield pair


class Traveller(threading.Thread):
    """One VM that goes forth and back.

    Attributes:
        stopped: what the guest was doing at each stop, and with how many commands in flight.
    """

    def __init__(self, hosts: Hosts, seed: int, moves: int, functions: int = 1) -> None:
        super().__init__(daemon=True)
        self._hosts = hosts
        self._random = random.Random(seed)
        self._moves = moves
        here = hosts[seed % 2]
        uuids = [here.create("tiny")["uuid"] for _ in range(functions)]
        self.vm = EmbeddedVm(here, uuids, name=f"vm{seed}", ram_bytes=RAM)
        self.guests = [Guest(self.vm, uuid) for uuid in uuids]
        self.stopped: Counter[str] = Counter()
        self.downtimes: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self._moves):
                self._move()
            for guest in self.guests:
                guest.finish()
        except BaseException as error:
            self.error = error

    def _move(self) -> None:
        there = self._hosts[self.vm.host is self._hosts[0]]
        busy = self._random.random() < 0.2  # during the rounds too, not only at the stop
        for guest in self.guests:
            (guest.go.set if busy else guest.go.clear)()

        def before_stop() -> None:
            for guest in self.guests:
                guest.go.set()
            for guest in self.guests:
                guest.wait_ticks(self._random.randrange(1, 40))
                guest.check()

        def at_stop() -> None:
            for guest in self.guests:
                flying = guest.work.function.queue.in_flight
                self.stopped[guest.work.doing if flying else "nothing"] += 1

        moved = self.vm.migrate(there, before_stop=before_stop, at_stop=at_stop)
        self.downtimes.append(moved.downtime_s)

    def end(self) -> None:
        """Raises what went wrong."""
        self.join()
        self.vm.close()
        if self.error is not None:
            raise self.error


@pytest.mark.timeout(900)  # on a busy machine
def test_moves_at_any_instant_change_no_bit(hosts):
    """Two hundred by night, which take 100 s on a quiet machine."""
    moves = by_night(100, 30)
    travellers = [Traveller(hosts, seed, moves=moves) for seed in (1, 2)]
    for traveller in travellers:
        traveller.start()
    for traveller in travellers:
        traveller.join()
    works = [traveller.guests[0].work for traveller in travellers]
    wrong = [traveller.error for traveller in travellers if traveller.error]
    assert not wrong
    for traveller, work in zip(travellers, works, strict=True):
        with traveller.vm.cpu:
            assert work.counts() == (len(work.digests), 0)
        assert work.vcpu.raised
        traveller.end()
    stopped = sum((traveller.stopped for traveller in travellers), Counter())
    print(stopped, sorted(travellers[0].downtimes)[::20])
    assert stopped.total() == 2 * moves
    # In the middle of everything that a guest does; of few moves, of nearly everything.
    met = {"copy in", "kernels", "copy out", "copies"} & set(stopped)
    assert len(met) >= by_night(4, 3)
    wanted = unmoved(hosts[0], max(len(work.digests) for work in works))
    for work in works:
        assert work.digests == wanted[: len(work.digests)]


def test_two_functions_of_one_vm_move_together(hosts):
    traveller = Traveller(hosts, 3, moves=6, functions=2)
    traveller.start()
    traveller.join()
    assert traveller.error is None
    works = [guest.work for guest in traveller.guests]
    with traveller.vm.cpu:
        assert all(work.counts() == (len(work.digests), 0) for work in works)
    traveller.end()
    wanted = unmoved(hosts[0], max(len(work.digests) for work in works))
    for work in works:
        assert work.digests == wanted[: len(work.digests)]
