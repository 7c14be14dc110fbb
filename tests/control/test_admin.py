from __future__ import annotations

import os
import socket

import pytest

from accelvisor.control.admin import LEVELS, Level, Peer, Policy, authorise
from accelvisor.control.server import peer_of
from accelvisor.errors import PermissionDenied

POLICY = Policy(read={10}, operate={20}, admin={30}, uids={0, 500})


@pytest.mark.parametrize(
    ("peer", "level"),
    [
        (Peer(1000, {1}), Level.NONE),
        (Peer(1000, {1, 10}), Level.READ),
        (Peer(1000, {20}), Level.OPERATE),
        (Peer(1000, {10, 20}), Level.OPERATE),
        (Peer(1000, {10, 30}), Level.ADMIN),
        (Peer(0, {1}), Level.ADMIN),
        (Peer(500, {1}), Level.ADMIN),
        (Peer(1000, {0}), Level.NONE),  # group 0 is not root
    ],
)
def test_levels_follow_from_uid_and_groups(peer: Peer, level: Level) -> None:
    assert POLICY.level(peer) == level


@pytest.mark.parametrize("level", list(Level))
def test_each_level_may_call_its_methods_and_no_others(level: Level) -> None:
    """A9: access to the socket equals root."""
    gids = {Level.NONE: 1, Level.READ: 10, Level.OPERATE: 20, Level.ADMIN: 30}
    peer = Peer(1000, {gids[level]})
    for method, need in LEVELS.items():
        if need <= level:
            authorise(POLICY, peer, method)
        else:
            with pytest.raises(PermissionDenied) as caught:
                authorise(POLICY, peer, method)
            assert need.name.lower() in caught.value.message


def test_no_method_is_open_to_everybody() -> None:
    assert min(LEVELS.values()) == Level.READ
    for method in LEVELS:
        if method.startswith(("Get", "List", "Watch", "Print")):
            assert LEVELS[method] == Level.READ
        if method.startswith(("Create", "Delete", "Define", "Undefine")):
            assert LEVELS[method] == Level.ADMIN


def test_credentials_come_from_the_kernel() -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        peer = peer_of(one)
    assert (peer.uid, peer.pid) == (os.getuid(), os.getpid())
    assert set(peer.gids) == {os.getgid(), *os.getgroups()}


class ManyGroups(socket.socket):
    """A peer in more groups than one getsockopt here can tell."""

    def getsockopt(self, level: int, option: int, size: int = 0):  # type: ignore[override]
        if option == 59:
            raise OSError(34, "Numerical result out of range")
        return super().getsockopt(level, option, size)


def test_more_than_256_groups_are_asked_of_the_user_database() -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with two, ManyGroups(fileno=one.detach()) as crowded:
        peer = peer_of(crowded)
    assert os.getgid() in peer.gids
