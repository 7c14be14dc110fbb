"""Fixtures: the sample device, a server in a thread, a client, a count of descriptors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.negotiate import Agreement
from accelvisor.vfio_user.server import Server
from accelvisor.vfio_user.session import ServerSession
from tests.descriptors import open_fds

from .sample import SampleDevice


def until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Wait for a condition; fails with ``what`` when time is up."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not in {deadline_s} s: {what}"
        time.sleep(0.002)


@pytest.fixture
def device() -> Iterator[SampleDevice]:
    before = open_fds()
    model = SampleDevice()
    yield model
    model.close()
    assert open_fds() == before, "descriptors leaked"


@pytest.fixture
def session(device: SampleDevice) -> ServerSession:
    """Negotiated already, with everything that this implementation can do."""
    return ServerSession(device, agreement=Agreement(peer_max_fds=16, write_multiple=True))


class Running:
    """A server in a thread."""

    def __init__(self, device: SampleDevice, path: Path, **options: object) -> None:
        self.server = Server(device, path, **options)  # type: ignore[arg-type]
        device.defer = self.server.defer
        self.path = path
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def wait_free(self) -> None:
        """Until the last client has been cleaned up."""
        until(lambda: self.server.connection is None, "the server let its client go")

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(device: SampleDevice, tmp_path: Path) -> Iterator[Running]:
    server = Running(device, tmp_path / "vfio.sock")
    yield server
    server.stop()


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.path) as connected:
        yield connected
    running.wait_free()
