"""An accelvisord with its own directories, and guests' transports onto its functions."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from accelvisor.control.client import AdminClient
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.errors import DeadlineError, SystemFailure, UnavailableError
from accelvisor.guest.function import Function
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport

_START_S = 20.0
_STOP_S = 10.0


class EmbeddedHost:
    """A daemon in a directory of its own; as a context manager it leaves nothing behind.

    Args:
        config: TOML of accelvisor.toml; the supervisor is always ``subprocess``.
        directory: where to live; made (and removed) when None. Keep it short: a UNIX socket's path
            has at most 107 bytes.
        spares: function processes that wait for the next function.
        listen: host:port where other hosts reach this one; empty: nowhere.
    """

    #: What is run as the daemon.
    module = "accelvisor.daemon.main"

    def __init__(
        self,
        config: str = "",
        directory: Path | None = None,
        spares: int = 0,
        listen: str = "",
    ) -> None:
        self._given = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._config = (
            f'[daemon]\nsupervisor = "subprocess"\nspares = {spares}\n'
            f'[migration]\nlisten = "{listen}"\n{config}'
        )
        self._daemon: subprocess.Popen[bytes] | None = None
        self.directory = Path()

    def __enter__(self) -> Self:
        if self._given is None:
            # The sockets of a domain's functions have long names: two bytes more are too many.
            self._temporary = tempfile.TemporaryDirectory(prefix="a", dir="/tmp")
            self.directory = Path(self._temporary.name)
        else:
            self.directory = self._given
        (self.directory / "accelvisor.toml").write_text(self._config)
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
            asyncio.run(self._end_functions())
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    # --- the daemon ------------------------------------------------------------------------------

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.directory / "r"

    @property
    def environment(self) -> dict[str, str]:
        """What makes accelctl and accelvisord use this host's directories."""
        return {
            "ACCELVISOR_RUN_DIR": str(self.run),
            "ACCELVISOR_STATE_DIR": str(self.directory / "state"),
            "ACCELVISOR_CONFIG": str(self.directory / "accelvisor.toml"),
        }

    @property
    def daemon_pid(self) -> int:
        """Pid of the running daemon."""
        if self._daemon is None:
            raise UnavailableError("the daemon is not running", where="embedded")
        return self._daemon.pid

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self._daemon is not None and self._daemon.poll() is None

    def start(self) -> None:
        """Start the daemon and wait until it serves."""
        with (self.directory / "accelvisord.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", self.module],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with self.admin() as admin:
                    admin.call("GetHost")
                return
            except UnavailableError:
                pass
            if self._daemon.poll() is not None:
                raise SystemFailure(
                    f"accelvisord ended with status {self._daemon.returncode}",
                    where="embedded",
                    hint=self.log()[-2000:],
                )
            if time.monotonic() > deadline:
                raise DeadlineError("accelvisord did not start", where="embedded", hint=self.log())
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the daemon; its functions go on."""
        if self._daemon is None:
            return
        self._daemon.send_signal(number)
        try:
            self._daemon.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        self._daemon = None

    def log(self) -> str:
        """What the daemon said."""
        return (self.directory / "accelvisord.log").read_text(errors="replace")

    def admin(self) -> AdminClient:
        """A connection to the admin socket."""
        return AdminClient(str(self.run / "admin"))

    async def _end_functions(self) -> None:
        """No function process outlives its host, whatever the daemon knew of it. What a daemon that
        was killed had begun may still come up: a look after the last one was ended finds none.
        """
        supervisor = SubprocessSupervisor(Paths.from_environment(self.environment))
        while uuids := await supervisor.list():
            await asyncio.gather(*map(supervisor.stop, uuids))

    # --- functions -------------------------------------------------------------------------------

    def create(self, profile: str = "small", name: str | None = None) -> dict[str, Any]:
        """Create a function and wait until it is ready; the admin API's Function record."""
        with self.admin() as admin:
            created: dict[str, Any] = admin.call(
                "CreateFunction", {"profile": profile, "name": name}
            )
        return dict(created["function"])

    def delete(self, uuid: str) -> None:
        """End a function."""
        with self.admin() as admin:
            admin.call("DeleteFunction", {"function": uuid})

    def connect(self, function: dict[str, Any], *, ram_bytes: int = 64 * MIB) -> ClientTransport:
        """A "VM" with ``ram_bytes`` of RAM on a function's vfio-user socket."""
        return ClientTransport(Client(function["socket"]), ram_bytes=ram_bytes)

    def open(
        self, function: dict[str, Any], *, ram_bytes: int = 64 * MIB, timeout_s: float = 120.0
    ) -> Function:
        """A function opened by the guest library, as a program in a VM would."""
        return Function(self.connect(function, ram_bytes=ram_bytes), timeout_s=timeout_s)


class Administered(Protocol):
    """A host that has an admin socket."""

    def admin(self) -> AdminClient: ...


def join(a: Administered, b: Administered) -> None:
    """Each trusts the other from here on."""
    with a.admin() as admin:
        code = admin.call("InviteHost", {})["code"]
    with b.admin() as admin:
        admin.call("JoinHost", {"code": code})


def free_port() -> int:
    """One of this machine that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
