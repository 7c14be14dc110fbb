"""A move that is refused, or breaks, leaves the VM computing where it was and nothing elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from accelvisor.daemon.moving import destination, driver, orders, sealing
from accelvisor.daemon.moving.copying import Copying, Part
from accelvisor.daemon.moving.staged import Staged
from accelvisor.embedded.host import free_port, join
from accelvisor.embedded.vm import EmbeddedVm
from accelvisor.errors import AccelvisorError, CapacityError, NotFoundError
from accelvisor.frames.chunks import Kind
from accelvisor.frames.manifest import Manifest, Offer
from tests.amount import by_night
from tests.descriptors import open_fds

from .inprocess import InProcessHost
from .moving import RAM, Guest, unmoved, wait_for
from .proxy import Proxy

NOTHING = {"functions": [], "held": [], "processes": [], "files": []}


class Pair:
    """Two hosts in this process, with a network between that can be cut, and a VM on the first."""

    def __init__(self, stack: ExitStack, *, trusted: bool = True, more: str = "") -> None:
        port = free_port()
        self.network = stack.enter_context(Proxy(port))
        address = f"127.0.0.1:{self.network.port}"
        self.here: Any = stack.enter_context(InProcessHost("a", port, address=address))
        self.there: Any = stack.enter_context(InProcessHost("b", free_port(), more))
        if trusted:
            join(self.here, self.there)
        self.function = self.here.create("tiny")["uuid"]
        self.vm = EmbeddedVm(self.here, [self.function], ram_bytes=RAM)
        stack.callback(self.vm.close)
        self.guest = Guest(self.vm)
        self.guest.go.set()
        self.guest.wait_rounds()

    def refused(self, **hooks: Any) -> AccelvisorError:
        """Move; it must not. Why it did not, as the destination has it."""
        with pytest.raises(AccelvisorError) as caught:
            self.vm.migrate(self.there, **hooks)
        assert self.vm.host is self.here
        self.guest.wait_rounds()
        wait_for(lambda: self.there.left() == NOTHING, f"left behind: {self.there.left()}")
        wait_for(lambda: not self.here.left()["held"], "the source does not let go")
        found = [move.driver.error for move in self.there.moves.destinations.values()]
        return next((error for error in reversed(found) if error is not None), caught.value)

    def end(self) -> None:
        digests = self.guest.finish()
        with self.vm.cpu:
            assert self.guest.work.counts() == (len(digests), 0)
        assert digests == unmoved(self.here, len(digests))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack)


def test_full_destination_says_so_to_whoever_moves(stack: ExitStack) -> None:
    pair = Pair(stack, more='[cards.card0]\nchips = 1\ncores_per_chip = 1\nmemory = "16MiB"\n')
    pair.there.create("tiny")
    with pytest.raises(CapacityError):
        pair.vm.migrate(pair.there)
    pair.guest.wait_rounds()
    assert len(pair.there.left()["processes"]) == 1
    pair.end()


def test_host_that_is_not_trusted_is_not_asked(stack: ExitStack) -> None:
    pair = Pair(stack, trusted=False)
    with pytest.raises(NotFoundError):
        pair.vm.migrate(pair.there)
    assert pair.there.left() == NOTHING
    pair.end()


def test_key_revoked_in_the_middle_ends_the_move(pair: Pair) -> None:
    key = pair.here.daemon._moving.keys.identity.key_id

    def revoke() -> None:
        pair.there.do(pair.there.daemon._moving.revoke(key))

    pair.refused(before_stop=revoke)
    pair.end()


def test_token_that_was_changed_is_refused(pair: Pair) -> None:
    save = pair.vm.machine.save

    def changed() -> bytes:
        token = bytearray(save())
        token[-5] ^= 1
        return bytes(token)

    pair.vm.machine.save = changed  # type: ignore[method-assign]
    assert pair.refused().code == "token"
    pair.end()


def test_memory_changed_between_verification_and_load_is_read_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Staged.descriptors

    def changed(staged: Staged) -> list[int]:
        view = staged.views[Kind.MEMORY]
        view[len(view) // 2] ^= 1
        return given(staged)

    monkeypatch.setattr(Staged, "descriptors", changed)
    assert pair.refused().code.startswith("status-")
    pair.end()


def test_move_whose_writes_somebody_ceased_to_follow_is_refused(pair: Pair) -> None:
    """The digests are of what was sent: the destination cannot tell what it lacks."""
    control = pair.here.daemon._moving.services.functions.world.paths.function(
        pair.function
    ).control_socket

    def cease() -> None:
        def followed() -> bool:
            return bool(pair.here.do(orders.order(control, "describe"))["tracking"])

        wait_for(followed, "the first round")
        pair.here.do(orders.order(control, "track", {"on": False}))

    pair.refused(before_stop=cease)
    [move] = pair.here.moves.sources.values()
    assert move.driver.error.code == "migration-untracked"
    pair.end()


def test_bytes_that_come_behind_the_last_round_are_not_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root that is signed does not cover them."""
    last = Copying._last_of

    async def and_more(copying: Copying, part: Part) -> None:
        await last(copying, part)
        part.sender.send(Kind.MEMORY, 0, memoryview(bytes([1]) * 4096))
        [move] = pair.there.moves.destinations.values()
        while not move.parts[0].bulk._claimed:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Copying, "_last_of", and_more)
    assert pair.refused().code == "bulk-uncovered"
    pair.end()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"root": bytes(32)}, "frame-root"),
        ({"digest": bytes(32)}, "status-frame"),
        ({"nonce": bytes(16)}, "frame-nonce"),
        ({"expires_ns": 1, "created_ns": 0}, "frame-stale"),
        ({"function": "00000000-0000-0000-0000-000000000001"}, "frame-"),
        ({"owner": bytes(32)}, "frame-"),
        ({"chunks": 1}, "bulk-uncovered"),
    ],
)
def test_source_that_signs_something_else_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: str
) -> None:
    monkeypatch.setattr(sealing, "Manifest", lambda **fields: Manifest(**{**fields, **changes}))
    assert pair.refused().code.startswith(code)
    monkeypatch.undo()
    assert pair.vm.migrate(pair.there).downtime_s  # and the next one is none the worse
    pair.guest.wait_rounds()


def test_offer_of_a_tebibyte_gets_no_staging(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(destination, "Staged", made.append)

    def greedy(**fields: Any) -> Offer:
        return Offer(**{**fields, "sections": {**fields["sections"], "extents": 1 << 40}})

    monkeypatch.setattr(sealing, "Offer", greedy)
    assert pair.refused().code == "migration-sections"
    assert not made
    pair.end()


def test_silence_is_waited_for_until_the_deadline_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LIMITS", replace(driver.LIMITS, migration_quiesce_s=1.0))
    times: dict[str, float] = {}
    pair.here.on_step = lambda step: times.setdefault(step, time.monotonic())
    with pytest.raises(AccelvisorError):
        pair.vm.migrate(pair.there, before_stop=pair.network.stall)
    pair.guest.wait_rounds()
    pair.network.flow()
    wait_for(lambda: pair.there.left() == NOTHING, "something is left")
    # The decision came before the function went on, not after.
    assert times["source:aborted"] < times["source:returned"]
    print(f"back after {(times['source:returned'] - times['source:aborted']) * 1000:.1f} ms")
    pair.end()


STEPS = (
    "source:offered", "source:sealed", "source:committed", "source:done",
    "destination:reserving", "destination:preparing", "destination:receiving",
    "destination:verified", "destination:device-loaded", "destination:loaded",
    "destination:committed", "destination:running",
)  # fmt: skip


#: Before anything was promised, around the decision, and after it.
TELLING = (
    "source:offered", "destination:receiving", "source:sealed", "source:done",
    "destination:running",
)  # fmt: skip


def test_link_that_breaks_at_any_step_costs_nothing(pair: Pair) -> None:
    ended = {}
    for step in by_night(STEPS, TELLING):
        cut = _once(pair.network.cut)
        for host in (pair.here, pair.there):
            host.on_step = lambda now, step=step, cut=cut: cut() if now == step else None
        try:
            pair.vm.migrate(pair.there)
            ended[step] = "moved"
            pair.guest.wait_rounds(2)
            wait_for(lambda: pair.here.left() == NOTHING, "the source keeps something")
            pair.vm.migrate(pair.here)
        except AccelvisorError as error:
            ended[step] = error.code
        assert pair.vm.host is pair.here
        pair.guest.wait_rounds(2)
        wait_for(lambda: pair.there.left() == NOTHING, "the destination keeps something")
        wait_for(lambda: not pair.here.left()["held"], "the source does not let go")
    print(ended)
    assert ended["source:done"] == ended["destination:running"] == "moved"
    pair.end()


def test_refused_moves_leave_no_descriptor(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"root": bytes(32)}
    monkeypatch.setattr(sealing, "Manifest", lambda **fields: Manifest(**{**fields, **changed}))

    for _ in range(3):
        pair.refused()
    before = open_fds()
    for _ in range(by_night(10, 4)):
        pair.refused()
    # Most of them before a function is made, which is what takes the time.
    monkeypatch.setattr(sealing, "Offer", lambda **fields: Offer(**{**fields, "owner": bytes(32)}))
    for _ in range(by_night(40, 16)):
        pair.refused()
    wait_for(lambda: open_fds() <= before, f"{open_fds() - before} descriptors more", 20)
    pair.end()


def _once(work: Callable[[], None]) -> Callable[[], None]:
    left = [work]

    def run() -> None:
        if left:
            left.pop()()

    return run
