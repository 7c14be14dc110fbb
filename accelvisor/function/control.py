"""The control socket: what the daemon asks a worker, one request at a time.

Framing (docs/contracts.md section 2): a JSON object and a NUL; the answer is ``{"parameters":
...}`` or ``{"error": {code, message, where, hint}}``. Descriptors come with the bytes of a request,
and go with those of an answer.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from accelvisor.errors import AccelvisorError, ProtocolError, UsageError
from accelvisor.function import state as s
from accelvisor.function.endpoints import open_descriptors
from accelvisor.function.moving import Moving
from accelvisor.function.requests import allowed, reply, taken
from accelvisor.function.reshape import Reshaping
from accelvisor.limits import LIMITS
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import MigState
from accelvisor.vfio_user.wire import close_fds

if TYPE_CHECKING:
    from accelvisor.function.device import Device

log = logging.getLogger(__name__)
T = TypeVar("T")
#: From parameters and descriptors to those of the reply.
Method: TypeAlias = Callable[
    [Mapping[str, Any], Sequence[int]], tuple[dict[str, Any], list[int]]
]


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One request."""

    method: str
    parameters: dict[str, Any] = {}


_DECODER = msgspec.json.Decoder(Request)
_MOST_FDS = 8


class _Client:
    """Of one connection: what came and is not answered yet."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.fds: list[int] = []

    def drop_fds(self) -> None:
        """Close the descriptors that came."""
        close_fds(self.fds)
        self.fds = []


class Control:
    """Serves the listening socket until the process ends.

    Args:
        sandbox: which measures are active, for ``status``.
        tell: sends a message with descriptors to the holder.
    """

    def __init__(
        self,
        device: Device,
        listener: socket.socket,
        sandbox: Mapping[str, int],
        tell: Callable[[bytes, tuple[int, ...]], None],
    ) -> None:
        self._device = device
        self._listener = listener
        self._sandbox = sandbox
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        moving = Moving(device, tell)
        reshaping = Reshaping(device)
        self._methods: dict[str, Method] = {
            "status": _plain(self._status),
            "freeze": _plain(self._freeze),
            "thaw": _plain(self._thaw),
            "reset": _plain(self._reset),
            "statistics": _plain(lambda: self._device.queries.statistics()),
            "trace": _plain(lambda: self._device.queries.trace()),
            "fabric": _plain(lambda: self._device.links.describe()),
            "objects": _plain(lambda: {"contexts": self._device.queries.objects()}),
            "describe": _plain(moving.describe),
            "migrate": _with("to", str, moving.walk),
            "fence": _with("on", bool, moving.fence),
            "track": _with("on", bool, moving.track),
            "throttle": _with("percent", int, self._throttle),
            "port": _with("rate", int, self._port),
            "moved": _plain(moving.moved),
            "digests": _plain(moving.digests),
            "extents": lambda _parameters, _fds: moving.extents(),
            "reshape": lambda parameters, _fds: (reshaping.reshape(parameters), []),
            "share": lambda parameters, _fds: (reshaping.share(parameters), []),
            "load": lambda _parameters, fds: (moving.load(fds), []),
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
        if len(self._clients) >= LIMITS.admin_clients or not allowed(
            client, self._device.spec.keeper
        ):
            client.close()
            return
        client.settimeout(LIMITS.control_reply_s)
        self._clients[client] = _Client()
        self._selector.register(client, selectors.EVENT_READ)

    def _receive(self, client: socket.socket) -> None:
        known = self._clients[client]
        try:
            data, fds, flags, _ = socket.recv_fds(client, 65536, _MOST_FDS, socket.MSG_DONTWAIT)
            known.fds += fds
            if flags & socket.MSG_CTRUNC or len(known.fds) > _MOST_FDS:
                data = b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        known.buffer += data
        for request in taken(known.buffer) if data else ():
            try:
                text, given = answer(request, self._methods, known.fds)
                known.drop_fds()
                reply(client, text + b"\0", given)
            except OSError:
                data = b""
                break
        if not data or len(known.buffer) > LIMITS.admin_message_bytes:
            self._selector.unregister(client)
            known.drop_fds()
            del self._clients[client]
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
                    (s.FREEZE_FENCED, "fenced"),
                    (s.FREEZE_SHAPE, "shape"),
                    (s.FREEZE_QUARANTINE, "quarantine"),
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

    def _throttle(self, percent: int) -> dict[str, Any]:
        if not 1 <= percent <= 100:
            raise UsageError("percent is 1 to 100", where="control")
        self._device.engine.throttle(percent)
        return {"percent": percent}

    def _port(self, rate: int) -> dict[str, Any]:
        self._device.port.set_rate(rate)
        return {"rate": rate}

    def _reset(self) -> dict[str, Any]:
        migration = self._device.migration
        self._device.function_reset()
        self._device.absolve()
        with migration.lock:
            if migration.machine.state is MigState.ERROR:
                migration.reset()  # nothing else leads out of it; a fence stays
        return {"resets": self._device.state.u32[s.R_RESETS]}


def _plain(call: Callable[[], dict[str, Any]]) -> Method:
    """A method without parameters."""

    def method(parameters: Mapping[str, Any], _: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        if parameters:
            raise UsageError("this method takes no parameters", where="control")
        return call(), []

    return method


def _with(name: str, kind: type[T], call: Callable[[T], dict[str, Any]]) -> Method:
    """A method with one parameter."""

    def method(parameters: Mapping[str, Any], _: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        value = parameters.get(name)
        if set(parameters) != {name} or not isinstance(value, kind):
            raise UsageError(
                f"this method takes one parameter: {name}, a {kind.__name__}", where="control"
            )
        return call(value), []

    return method


def answer(
    raw: bytes, methods: Mapping[str, Method], fds: Sequence[int] = ()
) -> tuple[bytes, list[int]]:
    """The reply to one request's JSON, and the descriptors that go with it."""
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
        found, given = method(request.parameters, fds)
        return msgspec.json.encode({"parameters": found}), given
    except (AccelvisorError, Refusal) as error:
        return msgspec.json.encode({"error": error.to_dict()}), []
    except Exception as error:
        log.exception("control request failed")
        fields = {"code": "internal", "message": str(error), "where": "control", "hint": ""}
        return msgspec.json.encode({"error": fields}), []
