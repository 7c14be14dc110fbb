"""A synchronous client of the admin socket, for accelctl and scripts. Standard library only.

Connecting, the first byte of a reply and each further one have deadlines: a stuck daemon is an
error message, not a hanging terminal.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from accelvisor.control import admin
from accelvisor.control.codec import (
    Call,
    Decoder,
    Reply,
    call_message,
    encode,
    parse_reply,
)
from accelvisor.errors import (
    AccelvisorError,
    DeadlineError,
    NotFoundError,
    PermissionDenied,
    ProtocolError,
    UnavailableError,
    UsageError,
)

#: How long the daemon may think before the first byte of a reply. Creating a function takes up to
#: ``function_ready_s``, starting a VM some seconds; longer verbs pass their own deadline.
REPLY_S = 30.0
CONNECT_S = 5.0


class RemoteError(AccelvisorError):
    """An error of a class that this client does not know; its four fields are the server's."""


class AdminClient:
    """One connection.

    Args:
        path: of the admin socket.
        connect_s, reply_s: deadlines in seconds.

    Raises:
        UnavailableError: ``daemon-unreachable``.
        PermissionDenied: ``socket-permission``: the caller is in none of the groups.
    """

    def __init__(
        self, path: str, *, connect_s: float = CONNECT_S, reply_s: float = REPLY_S
    ) -> None:
        self._where = path
        self._reply_s = reply_s
        self._decoder = Decoder(max_pending=4096)
        self._replies: deque[dict[str, Any]] = deque()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._sock.settimeout(connect_s)
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise _unreachable(error, path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def call(
        self,
        member: str,
        parameters: Mapping[str, object] | None = None,
        *,
        interface: str = admin.INTERFACE,
        reply_s: float | None = None,
    ) -> dict[str, Any]:
        """One call, one reply: its parameters. Given parameters that are None are left out.

        Raises:
            AccelvisorError: what the daemon answered, of the class that its name stands for.
            DeadlineError: ``daemon-deadline``.
            ProtocolError: ``reply-malformed`` or the codec's codes.
        """
        self._send(Call(interface, member, _given(parameters)))
        reply = self._receive(self._reply_s if reply_s is None else reply_s)
        if reply.continues:
            raise _out_of_order("a stream where one reply was asked for", self._where)
        return reply.parameters

    def stream(
        self,
        member: str,
        parameters: Mapping[str, object] | None = None,
        *,
        gap_s: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """A call with ``more``: the parameters of each reply until the last.

        Args:
            gap_s: the longest silence between two replies (seconds).
        """
        self._send(Call(admin.INTERFACE, member, _given(parameters), more=True))
        while True:
            reply = self._receive(self._reply_s if gap_s is None else gap_s)
            if not reply.continues:
                return
            yield reply.parameters

    def _send(self, call: Call) -> None:
        if self._replies or self._decoder.partial:
            raise _out_of_order("a reply before the call", self._where)
        try:
            self._sock.settimeout(self._reply_s)
            self._sock.sendall(encode(call_message(call)))
        except TimeoutError as error:
            raise self._late(self._reply_s) from error
        except BrokenPipeError:
            # The daemon hung up, but may have said why before: let the reading find it.
            pass
        except OSError as error:
            raise _unreachable(error, self._where) from error

    def _receive(self, deadline_s: float) -> Reply:
        while not self._replies:
            try:
                self._sock.settimeout(deadline_s)
                data = self._sock.recv(65536)
            except TimeoutError as error:
                raise self._late(deadline_s) from error
            except OSError as error:
                raise _unreachable(error, self._where) from error
            if not data:
                raise UnavailableError(
                    "the daemon hung up before it answered",
                    code="daemon-unreachable",
                    where=self._where,
                    hint="systemctl status accelvisor; journalctl -u accelvisor",
                )
            self._replies.extend(self._decoder.feed(data))
        reply = parse_reply(self._replies.popleft())
        if reply.error is not None:
            raise to_error(reply)
        return reply

    def _late(self, deadline_s: float) -> DeadlineError:
        return DeadlineError(
            f"no answer within {deadline_s:g} s",
            code="daemon-deadline",
            where=self._where,
            hint="the daemon may be busy or stuck: systemctl status accelvisor",
        )


def to_error(reply: Reply) -> AccelvisorError:
    """The exception that an error reply stands for."""
    name = reply.error or ""
    fields = {
        key: value if isinstance(value := reply.parameters.get(key), str) else ""
        for key in ("code", "message", "where", "hint")
    }
    interface, _, member = name.rpartition(".")
    if interface == admin.INTERFACE and fields["code"]:
        kind = admin.ERRORS.get(member, RemoteError)
        return kind(
            fields["message"], code=fields["code"], where=fields["where"], hint=fields["hint"]
        )
    return _standard(member, reply)


def _standard(member: str, reply: Reply) -> AccelvisorError:
    """Errors of org.varlink.service, and of interfaces that we do not know."""
    detail = str(next(iter(reply.parameters.values()), ""))
    older = "the daemon may be older or newer than this client: accelctl version"
    match member:
        case "InvalidParameter":
            return UsageError(
                f'the daemon does not accept "{detail}"', code="parameter-invalid", where="admin"
            )
        case "MethodNotFound" | "MethodNotImplemented" | "InterfaceNotFound":
            return NotFoundError(
                f"the daemon does not know {detail}",
                code="method-unknown",
                where="admin",
                hint=older,
            )
        case "PermissionDenied":
            return PermissionDenied("the daemon refused", where="admin")
        case _:
            return RemoteError(
                f"the daemon answered {reply.error} {detail}".rstrip(),
                code="remote-error",
                where="admin",
                hint=older,
            )


def _given(parameters: Mapping[str, object] | None) -> dict[str, Any]:
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _out_of_order(what: str, where: str) -> ProtocolError:
    return ProtocolError(f"the daemon sent {what}", code="reply-malformed", where=where)


def _unreachable(error: OSError, path: str) -> AccelvisorError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            "no permission to open the admin socket",
            code="socket-permission",
            where=path,
            hint="join the group accelvisor (adduser USER accelvisor, log in again), or use sudo",
        )
    text = error.strerror or str(error)
    return UnavailableError(
        f"cannot reach the daemon: {text}",
        code="daemon-unreachable",
        where=path,
        hint="systemctl start accelvisor; systemctl status accelvisor says why it does not run",
    )
