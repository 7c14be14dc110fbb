"""A host whose daemon runs in the test's own process, where a test can look into it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from accelvisor.control.client import AdminClient
from accelvisor.daemon import config as configuration
from accelvisor.daemon.daemon import Daemon, Setup
from accelvisor.daemon.moving.moves import Moves
from accelvisor.daemon.notify import Notifier
from accelvisor.daemon.paths import Paths
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport

from .moving import config


class InProcessHost:
    """As :class:`EmbeddedHost`, as far as a VM needs it.

    Attributes:
        steps: what the daemon did, in order.
        on_step: called with each step, in the daemon's loop.
    """

    def __init__(self, name: str, port: int, more: str = "", address: str = "") -> None:
        self.name, self.port = name, port
        self.steps: list[str] = []
        self.on_step: Callable[[str], None] = lambda step: None
        self._undo = contextlib.ExitStack()
        self._config = (
            '[daemon]\nsupervisor = "subprocess"\nspares = 0\n'
            f'[migration]\nlisten = "127.0.0.1:{port}"\naddress = "{address}"\n{config(name, more)}'
        )

    def __enter__(self) -> InProcessHost:
        root = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="a", dir="/tmp"))
        self.directory = Path(root)
        self.paths = Paths(
            self.directory / "r", self.directory / "state", self.directory / "accelvisor.toml"
        )
        self.paths.config.write_text(self._config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name)
        self._thread.start()
        self._undo.callback(self._end)
        self.do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    async def _start(self) -> None:
        setup = Setup(
            configuration.load(self.paths.config), self.paths, Notifier(), fault=self._fault
        )
        self.daemon = Daemon(setup)
        await self.daemon.start()

    def _fault(self, step: str) -> None:
        self.steps.append(step)
        self.on_step(step)

    def _end(self) -> None:
        self.do(self.daemon.stop())
        self.do(self._end_functions())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _end_functions(self) -> None:
        supervisor = SubprocessSupervisor(self.paths)
        for uuid in await supervisor.list():
            await supervisor.stop(uuid)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Something in the daemon's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @property
    def run(self) -> Path:
        return self.paths.run

    @property
    def moves(self) -> Moves:
        return self.daemon._moving.moves

    def admin(self) -> AdminClient:
        return AdminClient(str(self.paths.admin_socket))

    def create(self, profile: str) -> dict[str, Any]:
        with self.admin() as admin:
            return dict(admin.call("CreateFunction", {"profile": profile})["function"])

    def delete(self, uuid: str) -> None:
        with self.admin() as admin:
            admin.call("DeleteFunction", {"function": uuid})

    def connect(self, function: dict[str, Any], *, ram_bytes: int) -> ClientTransport:
        return ClientTransport(Client(function["socket"]), ram_bytes=ram_bytes)

    def left(self) -> dict[str, Any]:
        """Everything that a move may leave: empty values when it left nothing."""

        async def look() -> dict[str, Any]:
            functions = self.daemon._functions
            return {
                "functions": [function.uuid for function in functions.registry.all()],
                "held": sorted(functions.held),
                "processes": list(await SubprocessSupervisor(self.paths).list()),
                "files": sorted(path.name for path in self.paths.functions.iterdir()),
            }

        return dict(self.do(look()))
