"""A spare function process: becomes what it is told, or goes away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from accelvisor.abi.registers import MAGIC, Reg
from accelvisor.function import spare
from accelvisor.function.spec import Spec
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.transport import ClientTransport
from tests.function.harness import DEADLINE_S, call, environment, make_spec, wait_for


class Spare:
    """A spare process and the connection that keeps it."""

    def __init__(self, folder: Path) -> None:
        self.spec = make_spec(folder)
        path = folder / "spec.json"
        path.write_text(
            json.dumps(
                {"spare": True, "uuid": self.spec.uuid, "holder_socket": self.spec.holder_socket}
            )
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelvisor.function", str(path)],
            cwd=Path(__file__).parents[2],
            env=environment(),
        )
        wait_for(lambda: os.path.exists(self.spec.holder_socket), "the spare to listen")
        self.keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.keeper.settimeout(DEADLINE_S)
        wait_for(self._connected, "the spare to accept")

    def _connected(self) -> bool:
        try:
            self.keeper.connect(self.spec.holder_socket)
        except ConnectionRefusedError:
            return False
        return True

    def ask(self, raw: bytes) -> Any:
        self.keeper.sendall(raw + b"\0")
        reply = b""
        while not reply.endswith(b"\0"):
            chunk = self.keeper.recv(65536)
            assert chunk, "the spare hung up"
            reply += chunk
        return json.loads(reply[:-1])

    def become(self, spec: Spec) -> Any:
        return self.ask(
            json.dumps({"method": "become", "parameters": {"spec": asdict(spec)}}).encode()
        )


@pytest.fixture
def waiting() -> Iterator[Spare]:
    with tempfile.TemporaryDirectory(prefix="avf-") as name:
        made = Spare(Path(name))
        yield made
        made.keeper.close()
        if made.process.poll() is None:
            made.process.terminate()
        made.process.wait(DEADLINE_S)


def ready(spec: Spec) -> bool:
    try:
        return bool(call(spec.holder_socket, "status")["ready"])
    except OSError:
        return False


def test_a_spare_becomes_a_function_that_a_client_can_use(waiting: Spare) -> None:
    assert waiting.ask(b'{"method": "status"}')["parameters"] == {"ready": False, "spare": True}
    assert waiting.become(waiting.spec) == {"parameters": {}}
    waiting.keeper.close()
    wait_for(lambda: ready(waiting.spec), "the function to be ready")
    transport = ClientTransport(Client(waiting.spec.vfio_socket, timeout_s=DEADLINE_S))
    assert transport.read32(Reg.MAGIC) == MAGIC
    transport.close()


def test_a_spare_whose_keeper_goes_away_ends_and_leaves_no_process(waiting: Spare) -> None:
    children = Path(f"/proc/{waiting.process.pid}/task/{waiting.process.pid}/children")
    (zygote,) = children.read_text().split()
    waiting.keeper.close()
    assert waiting.process.wait(DEADLINE_S) == 0
    wait_for(lambda: not Path(f"/proc/{zygote}").exists(), "the zygote to end")
    assert not os.path.exists(waiting.spec.holder_socket)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"nonsense", "usage"),
        (b"[]", "usage"),
        (b'{"method": "shutdown"}', "usage"),
        (b'{"method": "become"}', "spec-invalid"),
        (b'{"method": "become", "parameters": 7}', "spec-invalid"),
        (b'{"method": "become", "parameters": {"spec": {"uuid": 1}}}', "spec-invalid"),
    ],
)
def test_a_spare_refuses_nonsense_and_waits_on(
    waiting: Spare, request_: bytes, code: str
) -> None:
    assert waiting.ask(request_)["error"]["code"] == code
    assert waiting.become(waiting.spec) == {"parameters": {}}


def test_a_spare_becomes_no_function_but_its_own(waiting: Spare) -> None:
    other = replace(waiting.spec, uuid="01234567-89ab-cdef-0123-456789abcdef")
    assert "can only become" in waiting.become(other)["error"]["message"]
    assert waiting.become(waiting.spec) == {"parameters": {}}


def test_a_spare_that_is_asked_too_much_ends(waiting: Spare) -> None:
    try:
        waiting.keeper.sendall(b"x" * (1 << 20))
    except OSError:
        pass  # it has hung up already
    assert waiting.process.wait(DEADLINE_S) == 0


def test_nobody_keeps_the_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "LIMITS", replace(LIMITS, function_ready_s=0.01))
    with tempfile.TemporaryDirectory(prefix="avf-") as name:
        spec = make_spec(Path(name))
        path = tmp_path / "spec.json"
        path.write_text(
            json.dumps({"spare": True, "uuid": spec.uuid, "holder_socket": spec.holder_socket})
        )
        assert spare.obtain(str(path)) is None
        assert not os.path.exists(spec.holder_socket)


def test_a_specification_is_taken_at_once(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    (tmp_path / "spec.json").write_text(spec.to_json())
    taken: list[Spec | None] = []
    path = str(tmp_path / "spec.json")
    thread = threading.Thread(target=lambda: taken.append(spare.obtain(path)))
    thread.start()
    thread.join(DEADLINE_S)
    assert taken == [spec]
