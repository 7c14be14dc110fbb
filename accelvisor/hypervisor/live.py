"""A running domain: plug a function into it and take it out again, through QEMU's monitor."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from accelvisor.errors import (
    AccelvisorError,
    CapacityError,
    DeadlineError,
    NotFoundError,
    SystemFailure,
)
from accelvisor.hypervisor import binding, hotplug, xml
from accelvisor.hypervisor.companions import Companions, farewell, is_there

logger = logging.getLogger(__name__)

_POLL_S = 0.05
#: For taking back a device that was plugged a moment ago (seconds).
_UNDO_S = 10.0


class LiveDomain:
    """Hot-plug on one libvirt domain handle. Errors of libvirt itself pass through untranslated."""

    def __init__(
        self,
        handle: Any,
        monitor: Callable[[str], str],
        clock: Callable[[], float],
        whose: xml.Ownership | None = None,
    ) -> None:
        """``monitor`` sends one QMP command (JSON text) and returns the reply (JSON text);
        ``whose`` the functions are is written with them, where it is not empty."""
        self._handle = handle
        self._monitor = monitor
        self._clock = clock
        self._whose = whose or xml.Ownership()

    def plug(self, uuid: str, socket: str, window_bytes: int = 0) -> tuple[str, str]:
        """Hot-plug a function behind a free root port; (the port's id, the PCI address).

        The live metadata names it before QEMU has it, and until it is certain that QEMU has it no
        more: whoever dies at whatever step leaves something that a detach finds and ends.

        Args:
            window_bytes: of its BAR2, with which a port that is too small is refused before
                anything is plugged; 0 when unknown.

        ConflictError ``domain-memory``, ``domain-machine`` or ``function-attached``; CapacityError
        ``no-hotplug-port`` or ``port-window``; SystemFailure ``device-add-failed``.
        """
        definition = str(self._handle.XMLDesc(0))
        xml.require_pcie(definition)
        xml.require_shared_memory(definition)
        identifier = xml.device_id(uuid)
        before = self._command("query-pci")
        if hotplug.find_device(before, identifier) is not None or self._present(identifier):
            hotplug.device_add_failed(identifier, {"desc": "Duplicate device ID"})
        port = hotplug.free_port(before, xml.hotplug_ports(definition))
        cpu = self._cpu()
        _require_window(uuid, hotplug.port_problem(before, port, window_bytes, cpu))
        self._remember(xml.FunctionEntry(uuid, socket, port))
        try:
            self._accompany(socket)
            reply = self._ask("device_add", xml.function_device(uuid, socket, port))
            if "error" in reply:
                hotplug.device_add_failed(identifier, reply["error"])
            after = self._command("query-pci")
            _require_window(uuid, hotplug.window_problem(after, port, identifier, cpu))
        except BaseException as error:
            self._take_back(uuid, error)
            raise
        device = hotplug.find_device(after, identifier)
        return port, hotplug.address(device) if device is not None else ""

    def _take_back(self, uuid: str, error: BaseException) -> None:
        """Undo a plug; what QEMU keeps stays in the metadata, and ``error`` says so."""
        try:
            with suppress(NotFoundError):
                self._release(xml.device_id(uuid), _UNDO_S)
            self._forget(uuid)
        except Exception as left:
            logger.warning("function %s is still plugged after a failed attach: %s", uuid, left)
            if isinstance(error, AccelvisorError):
                error.hint = (
                    f"it could not be taken back ({left}): detach it"
                    f" once the guest runs{'; ' if error.hint else ''}{error.hint}"
                )

    def unplug(self, uuid: str, *, deadline_s: float) -> None:
        """Hot-unplug and wait until the guest let go; :meth:`forget` has to follow.

        NotFoundError ``function-not-attached``, DeadlineError ``detach-deadline``.
        """
        try:
            self._release(xml.device_id(uuid), deadline_s)
        except NotFoundError:
            # Fine when the metadata has it: the guest ejected it by itself, an earlier detach got
            # this far, or an attach did not get as far as QEMU.
            if uuid not in {entry.uuid for entry in self._entries()}:
                raise

    def forget(self, uuid: str) -> bool:
        """Take a function that QEMU does not have (any more) out of the live metadata; False, and
        nothing changes, when QEMU has it or the metadata does not.
        """
        known = uuid in {entry.uuid for entry in self._entries()}
        if not known or self._present(xml.device_id(uuid)):
            return False
        self._forget(uuid)
        return True

    def _accompany(self, socket: str) -> None:
        """Give a domain that started without functions what one with functions has besides them."""
        companions = Companions.beside(socket)
        for command, arguments in companions.commands() if companions is not None else ():
            reply = self._ask(command, arguments)
            text = str(reply.get("error", {}).get("desc", ""))
            if "error" in reply and not is_there(text):
                raise SystemFailure(
                    f"QEMU did not take its part in a migration: {command}: {text}",
                    code="companion-failed",
                    where="hot-plug",
                    hint="accelvisord listens for it while the domain has a function"
                    " (systemctl status accelvisor)",
                )

    def _leave(self) -> None:
        """The last function went: QEMU would ask in vain when the domain migrates."""
        for command, arguments in farewell():
            reply = self._ask(command, arguments)
            if "error" in reply:
                logger.debug("%s: %s", command, reply["error"])

    def _release(self, identifier: str, deadline_s: float) -> None:
        until = self._clock() + deadline_s
        reply = self._ask("device_del", {"id": identifier})
        if "error" in reply:
            hotplug.device_del_failed(identifier, reply["error"])
        # The object's absence is asked for, not the event DEVICE_DELETED: that one would be lost
        # when libvirtd restarts in between, this one cannot be.
        while self._present(identifier):
            if self._clock() >= until:
                raise DeadlineError(
                    f"the guest did not let go of {identifier} within {deadline_s:g} s",
                    code="detach-deadline",
                    where="hot-plug",
                    hint="its operating system may be busy or down; try again,"
                    " or detach with --persistent and power it off",
                )
            time.sleep(_POLL_S)

    def _present(self, identifier: str) -> bool:
        listed = self._command("qom-list", {"path": "/machine/peripheral"})
        return any(item.get("name") == identifier for item in listed)

    def _cpu(self) -> hotplug.Cpu:
        path = self._command("query-cpus-fast")[0]["qom-path"]
        vendor, bits = (
            self._command("qom-get", {"path": path, "property": name})
            for name in ("vendor", "phys-bits")
        )
        return hotplug.Cpu(str(vendor), int(bits))

    def _remember(self, entry: xml.FunctionEntry) -> None:
        others = [other for other in self._entries() if other.uuid != entry.uuid]
        self._write([*others, entry])

    def _forget(self, uuid: str) -> None:
        left = [entry for entry in self._entries() if entry.uuid != uuid]
        if not left:
            self._leave()
        self._write(left)

    def _entries(self) -> list[xml.FunctionEntry]:
        return xml.functions(str(self._handle.XMLDesc(0)))

    def _write(self, entries: list[xml.FunctionEntry]) -> None:
        lv = binding.libvirt()
        whose = xml.ownership(str(self._handle.XMLDesc(0)))
        whose = xml.Ownership(self._whose.host or whose.host, self._whose.owner or whose.owner)
        self._handle.setMetadata(
            lv.VIR_DOMAIN_METADATA_ELEMENT,
            xml.metadata_element(entries, whose) if entries else None,
            "accelvisor",
            xml.NAMESPACE,
            lv.VIR_DOMAIN_AFFECT_LIVE,
        )

    def _ask(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"execute": command}
        if arguments is not None:
            message["arguments"] = arguments
        reply = json.loads(self._monitor(json.dumps(message)))
        if not isinstance(reply, dict):
            raise SystemFailure(f"{command}: the monitor answered {reply!r}", where="hot-plug")
        return reply

    def _command(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        reply = self._ask(command, arguments)
        if "error" in reply:
            text = reply["error"].get("desc", reply["error"])
            raise SystemFailure(f"{command}: {text}", code="monitor-failed", where="hot-plug")
        return reply["return"]


def _require_window(uuid: str, problem: str | None) -> None:
    if problem is not None:
        raise CapacityError(
            f"the guest could not give function {uuid} an address: {problem}",
            code="port-window",
            where="hot-plug",
            hint="attach with --persistent and power the domain off and on: firmware then"
            " gives the function its addresses",
        )
