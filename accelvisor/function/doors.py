"""Where a vfio-user client may come in (docs/contracts.md, section 2). Standard library only: the
holder's.

Two doors: ``vfio.sock`` for whoever runs this host, which has the function's own group, and one
for the QEMU of the VM that has the function. That one is there only while the daemon admits the VM,
and is called as AppArmor calls the VM's QEMU, so that a rule for all of them can give each its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from accelvisor.errors import UsageError
from accelvisor.function.endpoints import listen
from accelvisor.function.spec import PEER, Spec


class Doors:
    """The listening sockets, of which either all are watched or none.

    Args:
        watch: calls back when a descriptor is readable.
        forget: stops that.
        comes: called with a socket on which somebody waits to be accepted.

    Raises:
        SystemFailure: one cannot be made.
    """

    def __init__(
        self,
        spec: Spec,
        watch: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
        comes: Callable[[socket.socket], None],
    ) -> None:
        self._spec = spec
        self._watch = watch
        self._forget = forget
        self._comes = comes
        self._open = False
        self._sockets: dict[str, socket.socket] = {}
        self.peer = ""
        # Of a holder that was killed: whoever it had admitted may be another VM's by now.
        for name in filter(PEER.fullmatch, os.listdir(os.path.dirname(spec.vfio_socket))):
            self._unlink(self._path(name))
        self._add(spec.vfio_socket, "")
        self._let(spec.peer)

    def open(self) -> None:
        """Call for each who comes."""
        self._open = True
        for sock in self._sockets.values():
            self._watch_one(sock)

    def shut(self) -> None:
        """Let whoever comes wait in the backlog."""
        self._open = False
        for sock in self._sockets.values():
            self._forget(sock.fileno())

    def admit(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """``admit`` on holder.sock: the one VM, by its profile's name, whose QEMU may come; None
        for no VM. Who came before stays; who still waits at a door that goes is hung up on.

        Raises:
            UsageError: ``peer-invalid``.
            SystemFailure: the socket cannot be made; then no VM is admitted.
        """
        peer = parameters.get("peer", "")
        if peer is not None and not (isinstance(peer, str) and PEER.fullmatch(peer)):
            raise UsageError(
                f"no VM's profile has the name {str(peer)[:80]!r}", code="peer-invalid",
                where="holder", hint="libvirt-UUID, or null for no VM",
            )  # fmt: skip
        if (peer or "") != self.peer:
            self._let(peer or "")
        return {"peer": self.peer}

    def remove(self) -> None:
        """Leave nothing behind."""
        for path in self._sockets:
            self._unlink(path)

    def _let(self, peer: str) -> None:
        if self.peer:
            path = self._path(self.peer)
            sock = self._sockets.pop(path)
            self._forget(sock.fileno())
            sock.close()
            self._unlink(path)
            self.peer = ""
        if peer:
            self._add(self._path(peer), self._spec.socket_group)
            self.peer = peer

    def _add(self, path: str, group: str) -> None:
        self._sockets[path] = sock = listen(path, group)
        if self._open:
            self._watch_one(sock)

    def _watch_one(self, sock: socket.socket) -> None:
        self._watch(sock.fileno(), lambda: self._comes(sock))

    def _path(self, peer: str) -> str:
        return os.path.join(os.path.dirname(self._spec.vfio_socket), peer)

    @staticmethod
    def _unlink(path: str) -> None:
        with suppress(OSError):
            os.unlink(path)
