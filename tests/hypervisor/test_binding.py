from __future__ import annotations

import importlib
import threading

import libvirt
import pytest

from accelvisor.errors import (
    AccelvisorError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PermissionDenied,
    SystemFailure,
    UnavailableError,
)
from accelvisor.hypervisor import binding


def libvirt_error(code: int, domain: int = 10, text: str = "it did not please") -> Exception:
    error = libvirt.libvirtError("fallback")
    error.err = (code, domain, text, 2, None, None, None, -1, -1)
    return error


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        (libvirt.VIR_ERR_NO_DOMAIN, NotFoundError, "domain-not-found"),
        (libvirt.VIR_ERR_OPERATION_INVALID, ConflictError, "domain-state"),
        (libvirt.VIR_ERR_DOM_EXIST, ConflictError, "domain-exists"),
        (libvirt.VIR_ERR_XML_ERROR, ConfigError, "domain-xml"),
        (libvirt.VIR_ERR_CONFIG_UNSUPPORTED, ConfigError, "domain-xml"),
        (libvirt.VIR_ERR_HOOK_SCRIPT_FAILED, ConflictError, "hook-refused"),
        (libvirt.VIR_ERR_ACCESS_DENIED, PermissionDenied, "libvirt-denied"),
        (libvirt.VIR_ERR_OPERATION_TIMEOUT, DeadlineError, "libvirt-deadline"),
        (libvirt.VIR_ERR_NO_CONNECT, UnavailableError, "libvirt-unavailable"),
        (libvirt.VIR_ERR_INTERNAL_ERROR, SystemFailure, "libvirt-failed"),
        (9999, SystemFailure, "libvirt-failed"),
    ],
)
def test_errors_of_libvirt_become_ours_with_its_own_text(
    code: int, kind: type[AccelvisorError], expected: str
) -> None:
    original = libvirt_error(code)
    with pytest.raises(kind) as caught, binding.translated("vm1"):
        raise original
    assert caught.value.code == expected
    assert "it did not please" in caught.value.message
    assert caught.value.__cause__ is original


@pytest.mark.parametrize("domain", [libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE])
@pytest.mark.parametrize("code", [libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_SYSTEM_ERROR])
def test_a_broken_connection_is_unavailable_and_not_a_refusal(domain: int, code: int) -> None:
    with pytest.raises(UnavailableError), binding.translated("vm1"):
        raise libvirt_error(code, domain, "client socket is closed")


def test_an_internal_error_of_qemu_is_no_broken_connection() -> None:
    assert not binding.lost(libvirt_error(libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_QEMU))


def test_our_own_errors_pass_through() -> None:
    with pytest.raises(ConflictError), binding.translated("vm1"):
        raise ConflictError("mine")


def test_a_missing_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(binding, "import_module", absent)
    with pytest.raises(UnavailableError) as caught:
        binding.libvirt()
    assert caught.value.code == "libvirt-unavailable"
    assert "python3-libvirt" in caught.value.hint


def test_importing_the_room_does_not_import_libvirt() -> None:
    import subprocess
    import sys

    modules = [
        f"accelvisor.hypervisor.{name}"
        for name in ("domains", "xml", "builder", "capabilities", "events", "monitor", "hook")
    ]
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in modules
    )
    code += "sys.exit('libvirt' in sys.modules or 'libvirtmod' in sys.modules)"
    assert all(importlib.util.find_spec(name) for name in modules)
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_event_loop_runs_while_somebody_holds_it() -> None:
    loop = binding.EVENT_LOOP

    def running() -> bool:
        return any(thread.name == "libvirt-events" for thread in threading.enumerate())

    assert not running()
    for _ in range(3):  # it can be stopped and started again
        loop.hold()
        loop.hold()
        loop.release()
        assert running()
        fired = threading.Event()
        timer = libvirt.virEventAddTimeout(1, lambda *_, fired=fired: fired.set(), None)
        assert fired.wait(5)
        libvirt.virEventRemoveTimeout(timer)
        loop.release()
        assert not running()
