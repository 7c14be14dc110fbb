"""A function process as the daemon sees one: the three sockets, and a temper given by the file
``temper`` beside the specification (ready, slow, never, refuses, quits). The files UUID.gave-up and
UUID.connected there make it say so."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


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
                connection.sendall(json.dumps(answer(request["method"])).encode() + b"\0")
                if request["method"] == "shutdown":
                    os._exit(0)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    marker = Path(sys.argv[1]).with_name("temper")
    temper = os.environ.get("FAKE_TEMPER") or (marker.read_text() if marker.exists() else "ready")
    if temper == "quits":
        sys.exit("I do not want to")
    gave_up = Path(sys.argv[1]).with_suffix(".gave-up")
    gave_up.unlink(missing_ok=True)
    connected = Path(sys.argv[1]).with_suffix(".connected")
    connected.unlink(missing_ok=True)
    resets = 0
    born = time.monotonic()

    def holder(method: str) -> dict[str, object]:
        if temper == "refuses":
            error = {"code": "no-memory", "message": "no memory", "where": "holder", "hint": "buy"}
            return {"error": error}
        ready = temper != "never" and (temper != "slow" or time.monotonic() - born > 0.3)
        reason = gave_up.read_text() if gave_up.exists() else ""
        fields = {"ready": ready and not reason, "connected": connected.exists()}
        return {"parameters": {**fields, "gave_up": reason}}

    def control(method: str) -> dict[str, object]:
        nonlocal resets
        if method == "reset":
            resets += 1
        return {"parameters": {"resets": resets, "commands": 0}}

    if temper == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    vfio = listen(spec["vfio_socket"])
    for path, answer in ((spec["control_socket"], control),):
        sock = listen(path)
        threading.Thread(target=serve, args=(sock, answer), daemon=True).start()
    if temper == "stubborn":
        hold = listen(spec["holder_socket"])

        def stubborn(method: str) -> dict[str, object]:
            if method == "shutdown":
                threading.Event().wait()
            return holder(method)

        serve(hold, stubborn)
    serve(listen(spec["holder_socket"]), holder)
    vfio.close()


if __name__ == "__main__":
    main()
