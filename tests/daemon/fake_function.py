"""A function process as the daemon sees one: the three sockets, and a temper given by the file
``temper`` beside the specification (ready, slow, never, refuses, quits, shy). The files
UUID.gave-up, UUID.connected, UUID.quarantined and UUID.dirty there make it say so; a shy one admits
no VM, an unwilling spare becomes nothing. In UUID.shaping: "stiff" refuses another shape, "lost"
takes it and dies before it answers, "absent" dies before it takes it, "liar" only says it took it.
UUID.sandbox is added to its worker's status. UUID.fabric and UUID.trace are what it answers to
these requests, as JSON; without them it does not know them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any


def listen(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen(8)
    return sock


def serve(sock: socket.socket, answer) -> None:
    while True:
        connection, _ = sock.accept()
        with connection:
            data = b""
            while not data.endswith(b"\0"):
                chunk = connection.recv(4096)
                if not chunk:
                    break
                data += chunk
            else:
                request = json.loads(data[:-1])
                reply = answer(request["method"], request["parameters"])
                connection.sendall(json.dumps(reply).encode() + b"\0")
                if request["method"] == "shutdown":
                    os._exit(0)


def wait_as_spare(path: str, unwilling: bool) -> dict:
    with listen(path) as sock:
        keeper, _ = sock.accept()
    data = b""
    while not data.endswith(b"\0"):
        chunk = keeper.recv(65536)
        if not chunk:
            sys.exit(0)
        data += chunk
    request = json.loads(data[:-1])
    assert request["method"] == "become"
    error = {"code": "spec-invalid", "message": "I would rather not", "where": "fake", "hint": ""}
    reply = {"error": error} if unwilling else {"parameters": {}}
    keeper.sendall(json.dumps(reply).encode() + b"\0")
    return request["parameters"]["spec"]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    marker = Path(sys.argv[1]).with_name("temper")
    temper = os.environ.get("FAKE_TEMPER") or (marker.read_text() if marker.exists() else "ready")
    if temper == "quits":
        sys.exit("I do not want to")
    if spec.get("spare"):
        spec = wait_as_spare(spec["holder_socket"], unwilling=temper == "unwilling")
    gave_up = Path(sys.argv[1]).with_suffix(".gave-up")
    gave_up.unlink(missing_ok=True)
    connected = Path(sys.argv[1]).with_suffix(".connected")
    connected.unlink(missing_ok=True)
    resets = 0
    born = time.monotonic()

    peer = ""
    shares: list[int] = []
    segments = [list(item.values()) for item in spec.get("segments", [])]
    shape = {name: spec.get(name) for name in ("epoch", "cores", "memory_bytes")}
    shape["segments"] = segments

    def said_in(name: str) -> str | None:
        file = Path(sys.argv[1]).with_suffix(f".{name}")
        return file.read_text() if file.exists() else None

    def reshape(wanted: dict[str, Any]) -> dict[str, object]:
        mood = said_in("shaping")
        if mood == "stiff":
            error = {"code": "memory-in-use", "message": "no", "where": "reshape", "hint": ""}
            return {"error": error}
        if mood == "absent":
            os._exit(1)
        if mood != "liar":
            shape.update(wanted)
        if mood == "lost":
            os._exit(1)
        told = {"table_epoch": shape["epoch"], "table_bytes": shape["memory_bytes"]}
        cores = max(1, shape["cores"])
        return {"parameters": {**shape, **told, "pool_cores": cores, "scrubbed": 0}}

    def admit(name: str) -> None:
        nonlocal peer
        if peer:
            Path(spec["vfio_socket"]).with_name(peer).unlink(missing_ok=True)
        if name:
            admitted.append(listen(str(Path(spec["vfio_socket"]).with_name(name))))
        peer = name

    def holder(method: str, parameters: dict[str, Any]) -> dict[str, object]:
        if method == "admit" and marker.exists() and marker.read_text() == "shy":
            error = {"code": "function-socket", "message": "too shy", "where": "holder", "hint": ""}
            return {"error": error}
        if method == "admit" and parameters["peer"] != peer:
            admit(parameters["peer"] or "")
        if temper == "refuses":
            error = {"code": "no-memory", "message": "no memory", "where": "holder", "hint": "buy"}
            return {"error": error}
        ready = temper != "never" and (temper != "slow" or time.monotonic() - born > 0.3)
        reason = gave_up.read_text() if gave_up.exists() else ""
        if method == "renew" and connected.exists():
            error = {"code": "function-in-use", "message": "busy", "where": "", "hint": ""}
            return {"error": error}
        if method == "renew":
            shape.update(parameters)
            return {"parameters": {"shape": parameters}}
        fields = {"ready": ready and not reason, "connected": connected.exists(), "peer": peer}
        said = {
            "gave_up": reason,
            "quarantined": said_in("quarantined") is not None,
            "connection": 0,
            "data": {"memory": said_in("dirty") is not None, "window": False},
        }
        return {"parameters": {**fields, **said}}

    def control(method: str, parameters: dict[str, Any]) -> dict[str, object]:
        nonlocal resets
        if method == "reset" and said_in("shaping") != "liar":
            resets += 1
        if method == "reshape":
            return reshape(parameters)
        if method == "share":
            shares.append(parameters["borrowed"])
            Path(sys.argv[1]).with_suffix(".shares").write_text(json.dumps(shares))
        if method == "status":
            told = json.loads(said_in("sandbox") or "{}")
            now = {"epoch": shape["epoch"], "shape_epoch": shape["epoch"], "resets": resets}
            fields = {**now, **told}
            return {"parameters": fields}
        if method in ("fabric", "trace"):
            text = said_in(method)
            error = {"code": "unknown-method", "message": "?", "where": "control", "hint": ""}
            return {"error": error} if text is None else {"parameters": json.loads(text)}
        return {"parameters": {"resets": resets, "commands": 0}}

    if temper == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    vfio = listen(spec["vfio_socket"])
    admitted: list[socket.socket] = []
    admit(spec["peer"])
    for path, answer in ((spec["control_socket"], control),):
        sock = listen(path)
        threading.Thread(target=serve, args=(sock, answer), daemon=True).start()
    if temper == "stubborn":
        hold = listen(spec["holder_socket"])

        def stubborn(method: str, parameters: dict[str, Any]) -> dict[str, object]:
            if method == "shutdown":
                threading.Event().wait()
            return holder(method, parameters)

        serve(hold, stubborn)
    serve(listen(spec["holder_socket"]), holder)
    vfio.close()


if __name__ == "__main__":
    main()
