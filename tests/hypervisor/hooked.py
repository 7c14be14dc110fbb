"""The hook as libvirt runs it, and an accelvisord that answers it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from accelvisor.hypervisor import hook

SCRIPT = Path(hook.__file__)


class Daemon:
    """An accelvisord that answers with ``reply``; an empty answer hangs up, None never answers."""

    def __init__(self, directory: Path, reply: Callable[[dict[str, object]], bytes | None]) -> None:
        self._reply = reply
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._open: list[socket.socket] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(directory / "admin"))
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(client)
            buffer = b""
            while data := client.recv(65536):
                buffer += data
                while b"\0" in buffer:
                    raw, _, buffer = buffer.partition(b"\0")
                    request = json.loads(raw)
                    self.calls.append((request["method"].rpartition(".")[2], request["parameters"]))
                    answer = self._reply(request)
                    if answer == b"":
                        client.shutdown(socket.SHUT_RDWR)
                    elif answer is not None:
                        client.sendall(answer)
            client.close()

    @property
    def asked(self) -> list[str]:
        """The functions that were asked for."""
        return [parameters["function"] for _, parameters in self.calls]

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        for client in self._open:
            client.close()
        assert not self._thread.is_alive()


def run(
    directory: Path,
    text: str | bytes,
    operation: tuple[str, str] = ("prepare", "begin"),
    extra: str = "-",
) -> subprocess.CompletedProcess[bytes]:
    """As libvirt runs it: a file, four arguments, the XML on standard input, few variables."""
    return subprocess.run(
        [sys.executable, "-IS", str(SCRIPT), "db", *operation, extra],
        input=text.encode() if isinstance(text, str) else text,
        env={"ACCELVISOR_RUN_DIR": str(directory), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
    )
