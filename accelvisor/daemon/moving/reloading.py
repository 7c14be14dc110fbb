"""Loading a verified state into a function, so that it has either the new state or the old one.

Before anything is loaded the old state is kept: registers and window as copies, device memory as
the file that the function gives up when it loads. What fails before the device took anything over
leaves it as it was; what fails later is answered by loading the old state again. Blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from accelvisor.daemon.moving import documents
from accelvisor.daemon.moving.capture import Link
from accelvisor.daemon.moving.lent import Lent, Piece
from accelvisor.daemon.moving.orders import ask
from accelvisor.daemon.moving.staged import Staged
from accelvisor.daemon.moving.unpacking import Unpacked
from accelvisor.daemon.paths import FunctionPaths
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, StateError
from accelvisor.frames.chunks import Kind
from accelvisor.function import ram

LOG = logging.getLogger(__name__)
#: Loading reads all device memory back (seconds).
_LOAD_S = 20.0


@dataclass
class _Old:
    """What the function was before."""

    section: bytes
    window: list[Piece]
    lent: Lent

    def staged(self, function: Function) -> Staged:
        """The same, ready to be loaded again. Only where that must be: it copies the memory."""
        sizes: dict[int, int] = {
            Kind.STATE: len(self.section),
            Kind.WINDOW: function.window_bytes,
            Kind.MEMORY: function.memory_bytes,
            Kind.EXTENTS: len(ram.NOTHING),
        }
        staged = Staged(sizes)
        staged.views[Kind.STATE][:] = self.section
        staged.views[Kind.EXTENTS][:] = ram.NOTHING
        memory = (piece for piece in self.lent.everything() if piece.kind is Kind.MEMORY)
        for piece in chain(self.window, memory):
            end = piece.offset + len(piece.view)
            staged.views[piece.kind][piece.offset : end] = piece.view
        staged.finish(sizes)
        return staged


class Reloading:
    """One load: :meth:`load`, then :meth:`go` or :meth:`back`, then :meth:`release` in any case.

    Args:
        clients: whether a VM is connected whose PCI context must be the state's.
    """

    def __init__(self, function: Function, paths: FunctionPaths, *, clients: bool) -> None:
        self.function = function
        self.link = Link(paths)
        self._control = paths.control_socket
        self._clients = clients
        self._old: _Old | None = None

    def load(self, state: Unpacked, fault: Callable[[str], None]) -> None:
        """Fence the function, load, compare. It does not compute when this returns.

        Raises:
            StateError: ``status-...``; AccelvisorError: what the function answered.
        """
        link = self.link
        link.control("fence", on=True)
        # From here to the load it is RESUMING, from the load on STOP: whoever finds it tells which.
        link.control("migrate", to="RESUMING")
        fault("restore:frozen")
        self._old = self._keep()
        before = link.describe()
        if state.frame is not None and self._clients:
            # What QEMU has configured must be what the state was used with: it does not hear of it.
            documents.require_context(state.frame, before)
        fault("restore:kept")
        self._load(state, before)
        fault("restore:loaded")

    def go(self) -> None:
        """Let it compute; the guest is told that its function is another one now."""
        self.link.control("migrate", to="RUNNING")
        self.link.control("moved")
        self.link.control("fence", on=False)

    def resume(self) -> None:
        """Let it go on as it was before."""
        self.link.thaw()

    def back(self, why: AccelvisorError) -> None:
        """The old state again, wherever the load has got to. Never raises."""
        try:
            state = self.link.describe().migration_state
            if state == "RESUMING" or self._old is None:
                return  # nothing was taken over
            if state == "ERROR":
                self.link.control("reset")
            self.link.control("migrate", to="RESUMING")
            staged = self._old.staged(self.function)
            try:
                ask(self._control, "load", None, staged.descriptors(), 0, _LOAD_S)
            finally:
                staged.close()
        except AccelvisorError as error:
            LOG.error(
                "function %s has neither its new state (%s) nor its old one (%s)",
                self.function.uuid,
                why.message,
                error.message,
            )

    def release(self) -> None:
        """Forget the old state."""
        old, self._old = self._old, None
        if old is not None:
            old.lent.close()

    def _load(self, state: Unpacked, before: documents.Described) -> None:
        after = ask(self._control, "load", None, state.staged.descriptors(), 0, _LOAD_S)
        frame = state.frame
        if frame is None:
            frame = documents.function_frame(before)
            _require_firmware(state, frame)
        documents.validate(frame, state.status, before, after)

    def _keep(self) -> _Old:
        lent, _, _ = self.link.lend(self.function)
        return _Old(lent.section(), list(lent.window_changes()), lent)


def _require_firmware(state: Unpacked, here: documents.FunctionFrame) -> None:
    """V1 of a checkpoint that has no function frame: its manifest names what computed it."""
    if documents.manifest_firmware(here).blas != state.manifest.firmware.blas:
        raise StateError(
            "results would have other bits on this host",
            code="status-firmware",
            where="status:V1",
            hint="restore a checkpoint with its function frame to see every difference",
        )
