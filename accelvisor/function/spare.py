"""A spare: a function process that was started before anybody asked for a function.

Its zygote imports what every function needs while it waits for a specification, so that creating a
function costs no interpreter's start. Whoever started it holds one connection to its holder.sock;
when that ends without a specification, so does the spare. Standard library only: the holder's.

Who starts it writes ``{"spare": true, "uuid", "holder_socket"}`` in the place of a specification.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from accelvisor.errors import AccelvisorError, UsageError
from accelvisor.function.endpoints import listen, notify_ready
from accelvisor.function.requests import REQUEST_BYTES, taken
from accelvisor.function.spec import Spec, parse, read
from accelvisor.limits import LIMITS


def obtain(path: str) -> Spec | None:
    """The specification in a file, at once; for a spare the one that it is given later. None when
    nobody wants the spare any more.

    Raises:
        ConfigError: the file is wrong.
        SystemFailure: the spare's socket cannot be made.
    """
    fields = read(path)
    where = f"spec:{path}"
    if not (isinstance(fields, dict) and fields.get("spare") is True):
        return parse(fields, where=where)
    uuid, address = str(fields.get("uuid")), str(fields.get("holder_socket"))
    listener = listen(address)
    try:
        notify_ready("a spare: waits for its specification")
        keeper = _accept(listener)
        if keeper is None:
            return None
        with keeper:
            return _wait(keeper, uuid)
    finally:
        listener.close()
        os.unlink(address)


def _accept(listener: socket.socket) -> socket.socket | None:
    listener.settimeout(LIMITS.function_ready_s)
    try:
        return listener.accept()[0]
    except OSError:
        return None


def _wait(keeper: socket.socket, uuid: str) -> Spec | None:
    """Answer until a valid specification came, or the other end is gone."""
    keeper.settimeout(None)
    buffer = bytearray()
    while True:
        try:
            data = keeper.recv(REQUEST_BYTES)
            buffer += data
            if not data or len(buffer) > REQUEST_BYTES:
                return None
            for request in taken(buffer):
                reply, spec = _answer(request, uuid)
                keeper.sendall(json.dumps(reply).encode() + b"\0")
                if spec is not None:
                    return spec
        except OSError:
            return None


def _answer(raw: bytes, uuid: str) -> tuple[Mapping[str, Any], Spec | None]:
    try:
        try:
            request = json.loads(raw)
            method, parameters = request["method"], request.get("parameters", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"not a request: {error}", where="spare") from error
        if method == "status":
            return {"parameters": {"ready": False, "spare": True}}, None
        if method != "become":
            raise UsageError(
                f"a spare knows no {method!r}", where="spare", hint="methods: status, become"
            )
        spec = parse(parameters.get("spec") if isinstance(parameters, dict) else None)
        if spec.uuid != uuid:
            raise UsageError(f"this spare can only become {uuid}", where="spare")
        return {"parameters": {}}, spec
    except AccelvisorError as error:
        return {"error": error.to_dict()}, None
