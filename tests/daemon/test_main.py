"""accelvisord as a process: activation, notification, signals, exit codes."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accelvisor.control.client import AdminClient
from accelvisor.daemon import main as main_module
from accelvisor.errors import UnavailableError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "accelvisor.daemon.main"]


class Daemon:
    """accelvisord in a process, with a notification socket of the test's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "accelvisor.toml"
        self.config.write_text('[libvirt]\nuri = ""\n')
        self.admin = root / "run" / "admin"
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(root / "notify"))
        self.manager.settimeout(20)
        self.process: subprocess.Popen[str] | None = None
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCELVISOR_RUN_DIR": str(root / "run"),
            "ACCELVISOR_STATE_DIR": str(root / "state"),
            "ACCELVISOR_CONFIG": str(self.config),
            "NOTIFY_SOCKET": str(root / "notify"),
        }

    def start(self, wrapper: Sequence[str] = (), **environ: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, *COMMAND],
            env={**self.environ, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )

    def message(self, beginning: str) -> str:
        """The next notification that begins so."""
        while True:
            text = self.manager.recv(4096).decode()
            if text.startswith(beginning):
                return text

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=20)
        code, self.process = self.process.returncode, None
        return code, err

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.manager.close()


@pytest.fixture
def daemon(short_path: Path) -> Iterator[Daemon]:
    made = Daemon(short_path)
    yield made
    made.close()


def test_ready_means_that_it_serves(daemon: Daemon) -> None:
    """D1: ready announced before it can serve."""
    daemon.start()
    assert daemon.message("READY=1") == "READY=1\nSTATUS=0 functions"
    with AdminClient(str(daemon.admin)) as client:
        assert client.call("ListFunctions") == {"functions": []}
    code, err = daemon.stop()
    assert code == 0
    assert daemon.message("STOPPING=1")
    assert not daemon.admin.exists()
    assert all(line.startswith("<") for line in err.splitlines()), err


def test_recovery_extends_the_start_timeout(daemon: Daemon) -> None:
    """D10: long start killed."""
    daemon.start()
    first = daemon.manager.recv(4096).decode()
    assert first.startswith("EXTEND_TIMEOUT_USEC=")
    assert daemon.message("STATUS=") == "STATUS=recovering functions: 0 of 0"
    daemon.message("READY=1")
    daemon.stop()


def test_the_watchdog_is_fed_by_the_loop(daemon: Daemon) -> None:
    daemon.start(WATCHDOG_USEC="100000")
    for _ in range(3):
        daemon.message("WATCHDOG=1")
    daemon.stop(signal.SIGINT)


def test_reload_takes_new_profiles_and_keeps_the_old_ones_when_wrong(daemon: Daemon) -> None:
    daemon.start()
    daemon.message("READY=1")
    with AdminClient(str(daemon.admin)) as client:
        daemon.config.write_text('[libvirt]\nuri = ""\n[profiles.mine]\ncores = 2\n')
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.message("RELOADING=1").split("MONOTONIC_USEC=")[1].isdecimal()
        daemon.message("READY=1")
        assert [item["name"] for item in client.call("ListProfiles")["profiles"]] == ["mine"]
        daemon.config.write_text("[profiles.mine]\ncoors = 2\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert "the new one is wrong" in daemon.message("READY=1")
        assert [item["name"] for item in client.call("ListProfiles")["profiles"]] == ["mine"]
    _, err = daemon.stop()
    assert "[config-unknown-key]" in err


# Stands in for systemd: binds the socket, then becomes the daemon with it as descriptor 3.
ACTIVATE = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen(8)
os.dup2(sock.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES=sys.argv[2])
os.execv(sys.argv[3], sys.argv[3:])
"""


def test_socket_activation_serves_and_leaves_the_socket(daemon: Daemon) -> None:
    """D3: socket gone. What systemd made is systemd's to remove."""
    (daemon.root / "run").mkdir()
    daemon.start([sys.executable, "-c", ACTIVATE, str(daemon.admin), "admin"])
    daemon.message("READY=1")
    with AdminClient(str(daemon.admin)) as client:
        assert client.call("ListFunctions") == {"functions": []}
    code, _ = daemon.stop()
    assert code == 0
    assert daemon.admin.exists()


def test_a_socket_of_another_name_is_not_ours(daemon: Daemon) -> None:
    (daemon.root / "run").mkdir()
    other = daemon.root / "other"
    daemon.start([sys.executable, "-c", ACTIVATE, str(other), "metrics"])
    daemon.message("READY=1")
    with AdminClient(str(daemon.admin)) as client:
        assert client.call("ListFunctions") == {"functions": []}
    _, err = daemon.stop()
    assert 'the socket "metrics" was passed, but only "admin" is used' in err


def test_a_second_daemon_says_who_is_there(daemon: Daemon) -> None:
    daemon.start()
    daemon.message("READY=1")
    done = subprocess.run(
        COMMAND, env=daemon.environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert (
        f"another accelvisord runs here (pid {daemon.process.pid}) [already-running]" in done.stderr
    )
    assert "hint:" in done.stderr
    daemon.stop()


def test_a_killed_daemons_socket_does_not_stop_the_next(daemon: Daemon) -> None:
    """A1, the whole way: kill -9 leaves the socket, the next daemon takes its place."""
    daemon.start()
    daemon.message("READY=1")
    daemon.stop(signal.SIGKILL)
    assert daemon.admin.exists()
    with pytest.raises(UnavailableError):
        AdminClient(str(daemon.admin))
    daemon.start()
    daemon.message("READY=1")
    with AdminClient(str(daemon.admin)) as client:
        assert client.call("ListFunctions") == {"functions": []}
    daemon.stop()


def test_a_wrong_configuration_stops_the_start(daemon: Daemon) -> None:
    daemon.config.write_text("[demon]\n")
    done = subprocess.run(
        COMMAND, env=daemon.environ, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert 'unknown key "demon" [config-unknown-key]' in done.stderr
    assert 'did you mean "daemon"?' in done.stderr


def test_a_thread_that_libvirt_holds_does_not_hold_the_end_up() -> None:
    script = (
        "import threading, sys\n"
        "from accelvisor.daemon.main import leave\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('committed')\n"
        "leave(3)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (3, b"committed\n")


def check(path: Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main_module.check_config(path, out, err), out.getvalue(), err.getvalue()


def test_check_config_lists_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "accelvisor.toml"
    path.write_text("[demon]\n[daemon]\nsupervisor = 3\n")
    code, out, err = check(path)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f'config:{path}:1: unknown key "demon" [config-unknown-key]'
    assert err.count("config:") == 2
    path.write_text("")
    assert check(path) == (0, f"{path} is valid\n", "")
    path.unlink()
    assert check(path)[0] == 0


def test_log_lines_have_priorities() -> None:
    formatter = main_module.PriorityFormatter("%(message)s")
    for level, prefix in ((logging.DEBUG, "<7>"), (logging.INFO, "<6>"), (logging.WARNING, "<4>")):
        record = logging.LogRecord("x", level, "", 0, "one\ntwo", None, None)
        assert formatter.format(record) == f"{prefix}one\n{prefix}two"
