"""Keys and trust on disk: made once, kept, changed whole; what is damaged is not made anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from accelvisor.daemon.moving.keys import Keys
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    NotFoundError,
    PermissionDenied,
    StateError,
    SystemFailure,
)
from accelvisor.frames import changes, trust
from accelvisor.frames.identity import Identity, SigningKey
from accelvisor.limits import LIMITS
from tests.daemon.moving.test_evidence import short_writes

HOST = UUID("11111111-1111-4111-8111-111111111111")
PEER = UUID("22222222-2222-4222-8222-222222222222")


class Clock:
    """Wall clock and timer of an event loop, moved by the test."""

    def __init__(self) -> None:
        self.now_s = 1_900_000_000
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> int:
        return self.now_s * 10**9

    def later(self, wait_s: float, call: Callable[[], None]) -> Clock:
        self._calls = [(self.now_s + wait_s, call)]
        return self

    def cancel(self) -> None:
        self._calls = []

    def go_to(self, now_s: int) -> None:
        self.now_s = now_s
        while due := [call for at, call in self._calls if at <= now_s]:
            self._calls = []
            for call in due:
                call()


class Link:
    """A connection that stands on a key."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.error: AccelvisorError | None = None

    def cut(self, error: AccelvisorError) -> None:
        self.error = error


def keys(folder: Path, name: str = "a", address: str = "10.0.0.1:16519", host: UUID = HOST) -> Keys:
    return Keys(folder / "trust", host, name, address)


def stranger() -> Identity:
    return Identity.generate(os.urandom)


def test_a_host_has_the_same_keys_after_a_restart(tmp_path: Path) -> None:
    first, second = keys(tmp_path), keys(tmp_path)
    assert first.identity.key_id == second.identity.key_id
    assert first.document == second.document
    assert (tmp_path / "trust" / "host.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "trust").stat().st_mode & 0o777 == 0o700


def test_a_host_that_joined_is_trusted_from_then_on(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    mine.learn(PEER, stranger().public_identity, "b", "10.0.0.2:16519")
    for each in (mine, keys(tmp_path)):
        found = each.find("b")
        assert found.uuid == str(PEER)
        assert Keys.address_of(found) == ("10.0.0.2", 16519)
        assert [pin.host for pin in each.credentials.pins] == [PEER]


def test_joining_again_with_other_keys_replaces_them_when_it_is_expected(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    old, new = stranger(), stranger()
    assert not mine.learn(PEER, old.public_identity, "b", "b:1")
    assert mine.learn(PEER, new.public_identity, "b", "b:2", again=PEER)
    found = mine.find(str(PEER))
    assert found.current is not None
    assert found.current.public == new.public
    assert found.address == "b:2"
    version = mine.document.version
    mine.learn(PEER, new.public_identity, "b", "b:2")
    assert mine.document.version == version, "the same again changes nothing"


def test_a_host_that_is_removed_is_refused_and_its_keys_stay_revoked(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    them = stranger()
    mine.learn(PEER, them.public_identity, "b", "b:1")
    mine.remove("b")
    again = keys(tmp_path)
    assert not list(again.credentials.pins)
    assert them.key_id in again.document.revoked
    with pytest.raises(NotFoundError) as caught:
        again.find("b")
    assert caught.value.code == "trust-host-unknown"


def test_the_own_key_is_rotated_before_it_is_revoked(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    old = mine.identity.key_id
    with pytest.raises(ConflictError) as caught:
        mine.revoke(old)
    assert caught.value.code == "trust-own-key"
    mine.rotate()
    assert keys(tmp_path).identity.key_id == mine.identity.key_id != old


def test_a_rotation_is_taken_by_a_peer_and_the_old_key_retires(tmp_path: Path) -> None:
    a, b = keys(tmp_path / "a"), keys(tmp_path / "b", "b", "b:1", PEER)
    b.learn(HOST, a.identity.public_identity, "a", "a:1")
    old = a.identity
    b.rotated(a.rotate())
    for each in (b, keys(tmp_path / "b", "b", "b:1", PEER)):
        found = each.find("a")
        assert found.current is not None
        assert found.current.public == a.identity.public
        assert {key.status for key in found.keys} == {"current", "retiring"}
        assert {pin.public for pin in each.credentials.pins} == {old.public, a.identity.public}
    with pytest.raises(DataError):
        keys(tmp_path / "c", "c", "c:1", uuid4()).rotated(a.rotate())


def test_what_is_shown_of_this_host_follows_the_configuration(tmp_path: Path) -> None:
    keys(tmp_path)
    mine = keys(tmp_path, "other", "10.0.0.9:1").document.host(str(HOST))
    assert mine is not None
    assert (mine.name, mine.address) == ("other", "10.0.0.9:1")


@pytest.mark.parametrize("name", ["host.pem", "root.pem", "trust", "history"])
def test_a_damaged_file_stops_the_start_and_is_left_alone(tmp_path: Path, name: str) -> None:
    keys(tmp_path)
    path = tmp_path / "trust" / name
    damaged = path.read_bytes()[:-40]
    path.write_bytes(damaged)
    with pytest.raises(StateError) as caught:
        keys(tmp_path)
    assert caught.value.code == "trust-damaged"
    assert path.read_bytes() == damaged


def test_a_fleets_document_takes_the_place_of_the_own_one(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    root = SigningKey.generate(os.urandom)
    document = changes.create([root.public], 1, created_ns=1)
    document = changes.add_host(
        document, str(HOST), "a", "a:1", mine.identity.public_identity, created_ns=2
    )
    envelope = trust.sign(document, [root])
    with pytest.raises(DataError, match="root"):
        mine.join_fleet(envelope, frozenset(("0" * 32,)))
    mine.join_fleet(envelope, frozenset((root.key_id,)))
    again = keys(tmp_path, "a", "a:1")
    assert not again.mine_to_sign
    with pytest.raises(PermissionDenied) as caught:
        again.learn(PEER, stranger().public_identity, "b", "b:1")
    assert caught.value.code == "trust-roots"
    newer = changes.add_host(
        document, str(PEER), "b", "b:1", stranger().public_identity, created_ns=3
    )
    again.replace(trust.sign(newer, [root]))
    assert again.find("b").address == "b:1"
    with pytest.raises(DataError):
        again.replace(envelope)  # an older one


def test_an_address_without_a_port_is_said_to_be_none(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    mine.learn(PEER, stranger().public_identity, "b", "")
    with pytest.raises(NotFoundError) as caught:
        Keys.address_of(mine.find("b"))
    assert caught.value.code == "trust-address"


def test_a_replaced_key_is_refused_and_cut_when_its_time_is_over(tmp_path: Path) -> None:
    clock = Clock()
    a = Keys(tmp_path / "a", HOST, "a", "a:1", clock)
    b = Keys(tmp_path / "b", PEER, "b", "b:1", clock, clock.later)
    b.learn(HOST, a.identity.public_identity, "a", "a:1")
    old = a.identity.public
    b.rotated(a.rotate())
    links = [Link(old), Link(a.identity.public)]
    for link in links:
        b.credentials.hold(link)
    end = clock.now_s + int(LIMITS.rotation_overlap_s)
    clock.go_to(end - 1)
    assert [link.error for link in links] == [None, None]
    clock.go_to(end)
    with pytest.raises(PermissionDenied) as caught:
        b.credentials.pins.host_of(old)
    assert caught.value.code == "peer-expired"
    assert links[0].error is not None, "an open connection is cut too"
    assert links[1].error is None
    assert b.credentials.pins.host_of(a.identity.public) == HOST


def two_hosts(folder: Path) -> tuple[Keys, Keys]:
    """A host whose first key and rotation the second one knows."""
    a, b = keys(folder / "a"), keys(folder / "b", "b", "b:1", PEER)
    b.learn(HOST, a.identity.public_identity, "a", "a:1")
    return a, b


def test_a_key_that_came_by_rotation_is_revoked_by_the_id_that_is_shown(tmp_path: Path) -> None:
    a, b = two_hosts(tmp_path)
    old = a.identity.key_id
    b.rotated(a.rotate())
    link = Link(a.identity.public)
    b.credentials.hold(link)
    b.revoke(a.identity.key_id)
    assert link.error is not None
    for each in (b, keys(tmp_path / "b", "b", "b:1", PEER)):
        assert a.identity.key_id in each.document.revoked
        [left] = each.find("a").keys
        assert (left.key_id, left.status) == (old, "retiring"), "it must not be current again"
        assert left.not_after_ns


def test_a_host_that_is_removed_takes_the_keys_of_its_rotations_along(tmp_path: Path) -> None:
    a, b = two_hosts(tmp_path)
    old = a.identity.key_id
    b.rotated(a.rotate())
    b.remove("a")
    assert {old, a.identity.key_id} <= set(b.document.revoked)


def test_a_host_can_always_rotate_its_own_keys(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    for _ in range(LIMITS.rotations + 2):
        mine.rotate()
    assert len(mine.keyring.rotations) == 1
    assert keys(tmp_path).identity.key_id == mine.identity.key_id


def test_revoking_the_own_old_key_leaves_the_one_that_followed_it(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    old = mine.identity.key_id
    mine.rotate()
    mine.revoke(old)
    current = keys(tmp_path).keyring.current(str(HOST))
    assert current is not None
    assert current.key_id == mine.identity.key_id


def test_a_trust_document_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_writes(monkeypatch, 100)
    keys(tmp_path).learn(PEER, stranger().public_identity, "b", "b:1")
    assert keys(tmp_path).find("b").uuid == str(PEER)


def test_a_full_disk_leaves_the_trust_document_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = keys(tmp_path)
    write = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(fd, data[:100], at)

    before = (tmp_path / "trust" / "trust").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(SystemFailure) as caught:
            mine.learn(PEER, stranger().public_identity, "b", "b:1")
    assert caught.value.code == "trust-io"
    assert not mine.peers()
    assert (tmp_path / "trust" / "trust").read_bytes() == before
    assert not list((tmp_path / "trust").glob("*.new"))


class Killed(BaseException):
    """The daemon is no more."""


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(4))
def test_a_kill_while_keys_rotate_leaves_a_host_that_knows_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, done: bool
) -> None:
    mine, rename, left = keys(tmp_path), os.replace, iter(range(4))

    def killed(source: Path, target: Path) -> None:
        last = next(left) == step
        if done or not last:
            rename(source, target)
        if last:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            mine.rotate()
    for _ in range(2):
        again = keys(tmp_path)
        current = again.keyring.current(str(HOST))
        assert current is not None
        assert current.key_id == again.identity.key_id
        again.rotate()


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_while_keys_rotate_does_not_end_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    a, b = two_hosts(tmp_path)
    old, rename, left = a.identity.key_id, os.replace, iter(range(8))

    def full(source: Path, target: Path) -> None:
        if next(left) == step:
            raise OSError(errno.ENOSPC, "no space left on device")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        try:
            b.rotated(a.rotate())
        except SystemFailure:
            assert a.identity.key_id == old
    b.rotated(a.rotate())
    current = b.find("a").current
    assert current is not None
    assert current.key_id == a.identity.key_id == keys(tmp_path / "a").identity.key_id


def test_a_rotation_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    mine = keys(tmp_path)
    mine.rotate()
    files = {path.name: path.read_bytes() for path in (tmp_path / "trust").iterdir()}
    mine.identity = stranger()
    with pytest.raises(DataError):
        mine.rotate()
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "trust").iterdir()}


def test_who_has_a_join_code_does_not_become_a_host_that_is_trusted(tmp_path: Path) -> None:
    mine, before = keys(tmp_path), stranger()
    mine.learn(PEER, before.public_identity, "b", "b:1")
    for again in (None, uuid4()):
        with pytest.raises(ConflictError) as caught:
            mine.learn(PEER, stranger().public_identity, "b", "b:1", again)
        assert caught.value.code == "trust-host-other-key"
    assert mine.credentials.pins.host_of(before.public) == PEER


def test_a_host_whose_rotation_is_known_joins_again_with_its_new_key(tmp_path: Path) -> None:
    a, b = two_hosts(tmp_path)
    b.rotated(a.rotate())
    assert not b.learn(HOST, a.identity.public_identity, "a", "a:2")
    assert b.find("a").address == "a:2"


def test_a_host_that_was_removed_joins_with_new_keys_by_a_plain_code(tmp_path: Path) -> None:
    mine, old, new = keys(tmp_path), stranger(), stranger()
    mine.learn(PEER, old.public_identity, "b", "b:1")
    mine.remove("b")
    with pytest.raises(ConflictError) as caught:
        mine.learn(PEER, old.public_identity, "b", "b:1")
    assert caught.value.code == "trust-key-revoked"
    mine.learn(PEER, new.public_identity, "b", "b:1")
    assert mine.credentials.pins.host_of(new.public) == PEER


@pytest.mark.parametrize("name", ["b", "a", str(PEER), PEER.hex, str(PEER).upper()])
def test_a_name_that_leads_to_another_host_is_refused(tmp_path: Path, name: str) -> None:
    mine = keys(tmp_path)
    mine.learn(PEER, stranger().public_identity, "b", "b:1")
    with pytest.raises(ConflictError) as caught:
        mine.learn(uuid4(), stranger().public_identity, name, "c:1")
    assert caught.value.code == "trust-name-taken"


def test_a_name_in_a_fleets_document_does_not_lead_to_the_wrong_host(tmp_path: Path) -> None:
    mine, root = keys(tmp_path), SigningKey.generate(os.urandom)
    document = changes.create([root.public], 1, created_ns=1)
    third = UUID("33333333-3333-4333-8333-333333333333")
    for uuid, name in ((PEER, "b"), (third, "b"), (uuid4(), str(PEER))):
        document = changes.add_host(
            document, str(uuid), name, "b:1", stranger().public_identity, created_ns=2
        )
    mine.join_fleet(trust.sign(document, [root]), frozenset((root.key_id,)))
    assert mine.find(str(PEER)).uuid == str(PEER)
    with pytest.raises(ConflictError) as caught:
        mine.find("b")
    assert caught.value.code == "trust-host-ambiguous"


def test_old_keys_are_known_after_a_restart_and_let_nobody_in(tmp_path: Path) -> None:
    mine, old, new = keys(tmp_path), stranger(), stranger()
    mine.learn(PEER, old.public_identity, "b", "b:1")
    mine.remove("b")
    mine.learn(PEER, new.public_identity, "b", "b:1")
    again = keys(tmp_path)
    past = again.keyring.once(old.key_id)
    assert past is not None
    assert past.holder == str(PEER)
    with pytest.raises(PermissionDenied):
        again.credentials.pins.host_of(old.public)
