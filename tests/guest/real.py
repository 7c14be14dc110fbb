"""A real function process, reached through the in-tree client: the guest's own end-to-end bench."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from accelvisor.function.spec import Spec
from accelvisor.guest.function import Function
from accelvisor.limits import MIB
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport

_READY_S = 30.0


class Process:
    """One ``python3 -m accelvisor.function``, its sockets in ``folder`` (a short path)."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "uuid": str(uuid.uuid4()), "profile": "test", "cores": 2, "chips": 1,
            "memory_bytes": 64 * MIB, "window_bytes": 4 * MIB, "queues": 2, "ring_entries": 64,
            "vfio_socket": str(folder / "vfio.sock"), "holder_socket": str(folder / "holder.sock"),
            "control_socket": str(folder / "control.sock"), "socket_group": "", **changes,
        }  # fmt: skip
        self.spec = Spec(**fields)
        path = folder / "spec.json"
        path.write_text(self.spec.to_json())
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelvisor.function", str(path)],
            cwd=Path(__file__).parents[2],
            stderr=self._log,
        )
        deadline = time.monotonic() + _READY_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError((folder / "log").read_text())
            time.sleep(0.01)

    def ask(self, method: str) -> dict[str, Any]:
        """One call on the holder's socket."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_READY_S)
            sock.connect(self.spec.holder_socket)
            sock.sendall(json.dumps({"method": method, "parameters": {}}).encode() + b"\0")
            answer = b""
            while not answer.endswith(b"\0"):
                part = sock.recv(65536)
                assert part, "the holder hung up"
                answer += part
        return dict(json.loads(answer[:-1])["parameters"])

    def _ready(self) -> bool:
        try:
            return bool(self.ask("status")["ready"])
        except OSError:
            return False

    def kill_worker(self) -> None:
        """SIGKILL, as a crash would."""
        pid = self.ask("status").get("worker_pid")
        if pid:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def open(self, **options: Any) -> Function:
        """A guest's view of it."""
        client = Client(self.spec.vfio_socket, timeout_s=_READY_S)
        return Function(ClientTransport(client, ram_bytes=32 * MIB), **options)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_READY_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(_READY_S)
        self._log.close()
