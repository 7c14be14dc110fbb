"""The control socket: what the daemon asks a worker, one request at a time.

Framing (docs/contracts.md section 2): a JSON object and a NUL; the answer is ``{"parameters":
...}`` or ``{"error": {code, message, where, hint}}``.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from accelvisor.errors import AccelvisorError, ProtocolError, UsageError
from accelvisor.function import state as s
from accelvisor.function.endpoints import open_descriptors
from accelvisor.function.requests import taken
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState

if TYPE_CHECKING:
    from accelvisor.function.device import Device

log = logging.getLogger(__name__)


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One request."""

    method: str
    parameters: dict[str, Any] = {}


_DECODER = msgspec.json.Decoder(Request)


class Control:
    """Serves the listening socket until the process ends.

    Args:
        connected: whether a client is connected now.
        sandbox: which measures are active, for ``status``.
    """

    def __init__(
        self, device: Device, listener: socket.socket, sandbox: Mapping[str, bool]
    ) -> None:
        self._device = device
        self._listener = listener
        self._sandbox = sandbox
        self._buffers: dict[socket.socket, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._methods = {
            "status": self._status,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "reset": self._reset,
            "statistics": lambda: self._device.queries.statistics(),
            "objects": lambda: {"contexts": self._device.queries.objects()},
        }

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._receive(key.fileobj)
                except Exception:
                    log.exception("control socket")

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        if len(self._buffers) >= LIMITS.admin_clients:
            client.close()
            return
        client.settimeout(LIMITS.control_reply_s)
        self._buffers[client] = bytearray()
        self._selector.register(client, selectors.EVENT_READ)

    def _receive(self, client: socket.socket) -> None:
        try:
            data = client.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer = self._buffers[client]
        buffer += data
        for request in taken(buffer) if data else ():
            try:
                client.sendall(answer(request, self._methods) + b"\0")
            except OSError:
                data = b""
                break
        if not data or len(buffer) > LIMITS.admin_message_bytes:
            self._selector.unregister(client)
            del self._buffers[client]
            client.close()

    # --- methods ----------------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        device = self._device
        u32 = device.state.u32
        return {
            **device.queries.info(),
            "ready": True,
            "pid": os.getpid(),
            "connected": not u32[s.R_FREEZE] & s.FREEZE_DETACHED,
            "frozen_by": [
                name
                for bit, name in (
                    (s.FREEZE_CONTROL, "control"),
                    (s.FREEZE_MIGRATION, "migration"),
                    (s.FREEZE_DETACHED, "detached"),
                )
                if u32[s.R_FREEZE] & bit
            ],
            "migration_state": MigState(u32[s.R_MIGRATION]).name,
            "model_clock": device.registers.model_clock(),
            "dma_maps": len(device.maps),
            "contexts": sum(
                1 for c in range(s.CONTEXTS) if device.state.u32[s.context_at(c) // 4]
            ),
            "sandbox": self._sandbox,
            "open_descriptors": open_descriptors(),
        }

    def _freeze(self) -> dict[str, Any]:
        self._device.engine.freeze(s.FREEZE_CONTROL, LIMITS.control_reply_s - 0.5)
        return {"frozen": True, "digest": self._device.state.digest()}

    def _thaw(self) -> dict[str, Any]:
        self._device.engine.thaw(s.FREEZE_CONTROL)
        return {"frozen": bool(self._device.state.u32[s.R_FREEZE])}

    def _reset(self) -> dict[str, Any]:
        self._device.function_reset()
        return {"resets": self._device.state.u32[s.R_RESETS]}


def answer(raw: bytes, methods: dict[str, Any]) -> bytes:
    """The reply to one request's JSON."""
    try:
        try:
            request = _DECODER.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(str(error), where="control", hint="send one JSON object") from error
        method = methods.get(request.method)
        if method is None:
            raise UsageError(
                f"unknown method {request.method!r}", code="unknown-method", where="control",
                hint="one of " + ", ".join(sorted(methods)),
            )  # fmt: skip
        if request.parameters:
            raise UsageError(f"{request.method} takes no parameters", where="control")
        return msgspec.json.encode({"parameters": method()})
    except (AccelvisorError, Refusal) as error:
        return msgspec.json.encode({"error": error.to_dict()})
    except Exception as error:
        log.exception("control request failed")
        fields = {"code": "internal", "message": str(error), "where": "control", "hint": ""}
        return msgspec.json.encode({"error": fields})
