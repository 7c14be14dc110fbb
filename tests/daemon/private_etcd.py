"""A private etcd on loopback for a test; scripts/bootstrap puts Debian's program into .venv."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accelvisor.daemon.etcd import EtcdClient, Range
from accelvisor.errors import UnavailableError

#: A loaded machine needs a few seconds for the first election.
READY_S = 60.0


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class PrivateEtcd:
    """Its data outlives its process, as on a disk.

    Args:
        tls: its arguments for https, and what a client that it lets in needs.
    """

    def __init__(
        self, directory: Path, tls: tuple[Sequence[str], ssl.SSLContext] | None = None
    ) -> None:
        binary = shutil.which("etcd", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert binary, "etcd is missing: scripts/bootstrap puts it into .venv/bin"
        self._binary, self._directory = binary, directory
        client, peer = free_ports(2)
        self._arguments, self._context = tls or ((), None)
        scheme = "http" if tls is None else "https"
        self.url, self._peer = f"{scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binary, "--name=private", f"--data-dir={self._directory / 'data'}",
                    f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}",
                    f"--listen-peer-urls={self._peer}",
                    f"--initial-advertise-peer-urls={self._peer}",
                    f"--initial-cluster=private={self._peer}", *self._arguments,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={},
            )  # fmt: skip
        client = EtcdClient([self.url], tls=self._context)
        until = time.monotonic() + READY_S
        while True:
            try:
                client.read([Range(b"ready")])
                return
            except UnavailableError:
                running = self._process.poll() is None
                if not running or time.monotonic() > until:
                    log_text = (self._directory / "log").read_text(errors="replace")
                    raise AssertionError(f"etcd did not start: {log_text[-2000:]}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def private_etcd(
    directory: Path, tls: tuple[Sequence[str], ssl.SSLContext] | None = None
) -> Iterator[PrivateEtcd]:
    etcd = PrivateEtcd(directory, tls)
    etcd.start()
    try:
        yield etcd
    finally:
        etcd.stop()
