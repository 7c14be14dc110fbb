from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelvisor.daemon.notify import Notifier, adopt_listener, take_listeners
from accelvisor.errors import SystemFailure


@pytest.fixture
def manager(short_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(short_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_messages_as_systemd_reads_them(manager: socket.socket) -> None:
    notifier = Notifier(manager.getsockname())
    notifier.ready("3 functions")
    notifier.status("busy")
    notifier.alive()
    notifier.reloading(1234)
    notifier.extend_timeout(1.5)
    notifier.stopping("bye")
    assert [manager.recv(1000).decode() for _ in range(6)] == [
        "READY=1\nSTATUS=3 functions",
        "STATUS=busy",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=1234",
        "EXTEND_TIMEOUT_USEC=1500000",
        "STOPPING=1\nSTATUS=bye",
    ]


def test_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"accelvisor-test-{os.getpid()}"
        sock.bind("\0" + name)
        sock.settimeout(5)
        Notifier("@" + name).alive()
        assert sock.recv(100) == b"WATCHDOG=1"


def test_a_manager_that_is_gone_is_no_reason_to_stop(short_path: Path) -> None:
    Notifier(str(short_path / "nobody")).ready("fine")
    Notifier(None).ready("fine")


def test_variables_do_not_leak_into_children() -> None:
    """D5: activation variables leak into children."""
    environ = {
        "NOTIFY_SOCKET": "/x",
        "WATCHDOG_USEC": "1000000",
        "WATCHDOG_PID": "7",
        "LISTEN_PID": "7",
        "LISTEN_FDS": "0",
        "LISTEN_FDNAMES": "",
        "PATH": "/bin",
    }
    Notifier.from_environment(environ, 7)
    take_listeners(environ, 7)
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [
        ("30000000", "7", 15.0),
        ("100000", "7", 0.05),  # D8: no floor that is longer than the watchdog allows
        ("30000000", "", 15.0),
        ("30000000", "8", None),  # meant for somebody else
        ("0", "7", None),
        ("-3", "7", None),
        ("x", "7", None),
        ("", "7", None),
    ],
)
def test_the_watchdogs_interval(usec: str, pid: str, interval: float | None) -> None:
    environ = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    assert Notifier.from_environment(environ, 7).interval_s == interval


def listeners(names: str, count: str, pid: str = "7") -> dict[str, int]:
    environ = {"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": names}
    return take_listeners(environ, 7, set_cloexec=lambda fd: None)


def test_descriptors_are_taken_by_name() -> None:
    assert listeners("metrics:admin", "2") == {"metrics": 3, "admin": 4}


def test_descriptors_of_another_process_are_left() -> None:
    assert listeners("admin", "1", pid="8") == {}


@pytest.mark.parametrize(
    ("names", "count"),
    [("admin", "2"), ("a:a", "2"), ("admin", "x"), ("admin", "-1"), ("a", "999")],
)
def test_malformed_activation_is_an_error(names: str, count: str) -> None:
    with pytest.raises(SystemFailure) as caught:
        listeners(names, count)
    assert caught.value.code == "activation"


def test_descriptors_are_not_inherited_by_children() -> None:
    closed: list[int] = []
    environ = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    take_listeners(environ, 7, set_cloexec=closed.append)
    assert closed == [3, 4]


def test_a_listening_socket_is_adopted(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as original:
        original.bind(str(short_path / "s"))
        original.listen()
        with adopt_listener(os.dup(original.fileno())) as adopted:
            assert adopted.getsockname() == str(short_path / "s")
            assert not adopted.getblocking()


def wrong_descriptors(path: Path) -> Iterator[int]:
    with socket.socket(socket.AF_UNIX) as idle:
        yield idle.fileno()
    with socket.socket(socket.AF_INET) as inet:
        inet.bind(("127.0.0.1", 0))
        inet.listen()
        yield inet.fileno()
    with (path / "file").open("w") as file:
        yield file.fileno()
    yield 999_999


def test_any_other_descriptor_is_refused(short_path: Path) -> None:
    for fd in wrong_descriptors(short_path):
        with pytest.raises(SystemFailure) as caught:
            adopt_listener(fd)
        assert caught.value.code == "activation"
