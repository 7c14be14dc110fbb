from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from accelvisor.hypervisor import hook, xml
from accelvisor.limits import LIMITS
from tests.hypervisor.hooked import SCRIPT, Daemon, run
from tests.hypervisor.samples import BARE, DOMAIN, OTHER, OTHER_SOCKET, READY, SOCKET, UUID

WITH_FUNCTION = xml.add(READY, UUID, SOCKET)
GOOD = {
    "uuid": UUID,
    "state": "attached",
    "domain_socket": SOCKET,
    "domain": "db",
    "domain_uuid": DOMAIN,
}
#: Every operation that libvirt's documentation names, with its sub-operation.
OPERATIONS = [
    ("prepare", "begin"),
    ("start", "begin"),
    ("started", "begin"),
    ("stopped", "end"),
    ("release", "end"),
    ("migrate", "begin"),
    ("restore", "begin"),
    ("reconnect", "begin"),
    ("attach", "begin"),
]
#: In which nothing is done.
OTHERS = [operation for operation in OPERATIONS if operation not in hook.OPERATIONS]
#: In which a refusal would do harm.
OPEN = [operation for operation, (_, closed, _) in hook.OPERATIONS.items() if not closed]

Reply = Callable[[dict[str, object]], bytes]


def found(**changes: object) -> Reply:
    def reply(request: dict[str, object]) -> bytes:
        assert request["method"] == "io.accelvisor.Admin.AdmitDomain"
        parameters = request["parameters"]
        wanted = parameters["function"]  # type: ignore[index]
        told = {"function": wanted, "domain": "db", "domain_uuid": DOMAIN}
        assert parameters == told
        function = {**GOOD, "uuid": wanted, **changes}
        return json.dumps({"parameters": {"function": function}}).encode() + b"\0"

    return reply


def refused(message: str, hint: str = "") -> Reply:
    parameters = {"code": "a-code", "message": message, "where": "somewhere", "hint": hint}
    reply = {"error": "io.accelvisor.Admin.Conflict", "parameters": parameters}
    return lambda _: json.dumps(reply).encode() + b"\0"


def test_a_function_that_is_ready_lets_the_domain_start(
    tmp_path: Path, daemon: Callable[[object], Daemon]
) -> None:
    served = daemon(found())
    result = run(tmp_path, WITH_FUNCTION)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert served.asked == [UUID]


def test_every_function_is_asked_for(tmp_path: Path, daemon: Callable[[object], Daemon]) -> None:
    def reply(request: dict[str, object]) -> bytes:
        first = request["parameters"]["function"] == UUID  # type: ignore[index]
        return found(domain_socket=SOCKET if first else OTHER_SOCKET)(request)

    served = daemon(reply)
    assert run(tmp_path, xml.add(WITH_FUNCTION, OTHER, OTHER_SOCKET)).returncode == 0
    assert served.asked == [UUID, OTHER]


@pytest.mark.parametrize(
    ("message", "hint", "told"),
    [
        (f"function {UUID} is failed: no memory", "", f"function {UUID} is failed: no memory"),
        (
            f"function {UUID} belongs to domain web",
            f"accelctl detach {UUID}",
            f"function {UUID} belongs to domain web (accelctl detach {UUID})",
        ),
        ("AdmitDomain needs the level admin", "x", f"function {UUID}: AdmitDomain needs the level"),
    ],
)
def test_what_accelvisord_says_against_it_is_said_once(
    tmp_path: Path, daemon: Callable[[object], Daemon], message: str, hint: str, told: str
) -> None:
    daemon(refused(message, hint))
    assert run(tmp_path, WITH_FUNCTION).stderr.decode().startswith(f"accelvisor: {told}")


# --- what QEMU is given, whatever the metadata says ----------------------------------------------


def given(directory: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The hook's verdict on a domain with these arguments for QEMU (RUN: the run directory)."""
    values = "".join(
        f"<q:arg value={quoteattr(word.replace('RUN', str(directory)))}/>" for word in arguments
    )
    return run(directory, text.replace("</q:commandline>", f"{values}</q:commandline>"))


@pytest.fixture
def served(tmp_path: Path, daemon: Callable[[object], Daemon]) -> str:
    """A domain with the function UUID, both as they stand in the run directory of this test."""
    daemon(found(domain_socket=str(tmp_path / "function" / UUID / f"libvirt-{DOMAIN}")))
    return WITH_FUNCTION.replace("/run/accelvisor", str(tmp_path))


_JSON = '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"%s"}}'
_THEIRS = f"RUN/function/{OTHER}/libvirt-{DOMAIN}"


@pytest.mark.parametrize(
    "argument",
    [
        _JSON % _THEIRS,
        _JSON % _THEIRS.replace("/", "\\/"),
        _JSON % _THEIRS.replace("libvirt", "\\u006cibvirt"),
        _JSON % f"RUN/function/{UUID}/vfio.sock",
        _JSON % f"RUN/function/{UUID}/libvirt-{OTHER}",
        _JSON % _THEIRS.replace("/function/", "//function/./"),
        _JSON % f"RUN/function/{UUID}/../{OTHER}/libvirt-{DOMAIN}",
        f"vfio-user-pci,socket.type=unix,socket.path={_THEIRS}",
        _JSON % f"RUN/link/libvirt-{DOMAIN}",
    ],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_another_functions_socket_on_the_command_line_is_refused(
    tmp_path: Path, served: str, argument: str, labelled: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "function" / OTHER)
    result = given(tmp_path, served if labelled else READY, "-device", argument)
    assert result.returncode == 1
    assert b"not its socket of a function in its metadata" in result.stderr


def test_a_socket_that_a_character_device_reaches_is_refused_as_well(
    tmp_path: Path, served: str
) -> None:
    result = given(tmp_path, served, "-chardev", f"socket,id=x,path={_THEIRS}")
    assert b"not its socket of a function" in result.stderr


def test_ones_own_socket_is_let_pass_however_its_path_is_written(
    tmp_path: Path, served: str
) -> None:
    assert run(tmp_path, served).returncode == 0
    (tmp_path / "run").symlink_to(tmp_path)
    stored = served.replace(f"{tmp_path}/function", f"{tmp_path}/run/function")
    again = stored.replace("socket=", "ignored=", 1)  # the metadata may leave it out
    assert run(tmp_path, again).returncode == 0


def test_a_device_that_only_qemu_can_read_is_refused(tmp_path: Path) -> None:
    result = given(tmp_path, READY, "--device", "{'driver':'vfio-user-pci'}")
    assert b"cannot read the device" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-device", _JSON % "/run/spdk/vfio-user/1/cntrl"),
        ("-device", "virtio-net,netdev=x"),
        ("-blockdev", "{'driver':'null-co'}"),
        ("-object", '{"qom-type":"x","deep":[[{"path":"/run/else"}, 1, null]]}'),
        ("-device",),
    ],
)
def test_other_arguments_of_qemu_are_no_business_of_ours(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert given(tmp_path, READY, *arguments).returncode == 0


def test_one_function_at_two_sockets_is_refused(tmp_path: Path) -> None:
    entry = f"<f:function uuid='{UUID}' socket='%s'/>"
    text = (
        f"<domain><metadata><f:functions xmlns:f='{xml.NAMESPACE}'>"
        f"{entry % '/a'}{entry % '/b'}</f:functions></metadata></domain>"
    )
    assert b"twice" in run(tmp_path, text).stderr


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (refused(f"function {UUID} is failed: out of memory"), "out of memory"),
        (found(domain="other", domain_uuid=OTHER), f"belongs to domain {OTHER}"),
        (found(domain=None, domain_uuid=None), "belongs to domain None"),
        (found(domain_socket="/run/elsewhere"), "/run/elsewhere"),
        (found(domain_socket=None), "no sense"),
        (lambda _: b"", "hung up"),
        (lambda _: b"nonsense\0", "no sense"),
        (lambda _: b"[]\0", "no sense"),
        (lambda _: b"{}\0", "no sense"),
        (lambda _: b'{"parameters": {"function": 5}}\0', "no sense"),
        (lambda _: b"[" * 100_000 + b"\0", "no sense"),
        (lambda _: b"x" * (LIMITS.admin_message_bytes + 1), "too long"),
        (
            lambda _: (
                b'{"error": "io.accelvisor.Admin.NotFound", "parameters":'
                b' {"code": "function-not-found", "message": "there is no such function"}}\0'
            ),
            "there is no such function",
        ),
        (lambda _: b'{"error": "org.varlink.service.MethodNotFound"}\0', "no sense"),
    ],
)
def test_anything_else_keeps_the_domain_from_starting_and_says_why(
    tmp_path: Path, daemon: Callable[[object], Daemon], reply: object, told: str
) -> None:
    daemon(reply)
    result = run(tmp_path, WITH_FUNCTION)
    assert result.returncode == 1
    text = result.stderr.decode()
    assert text.startswith("accelvisor: ")
    assert told in text
    assert text.count("\n") == 1
    assert result.stdout == b"", "at some operations libvirt would take it for a new XML"


def test_without_a_daemon_the_domain_does_not_start(tmp_path: Path) -> None:
    result = run(tmp_path, WITH_FUNCTION)
    assert result.returncode == 1
    assert b"systemctl start accelvisor" in result.stderr


def test_a_daemon_that_never_answers_meets_the_deadline(
    tmp_path: Path, daemon: Callable[[object], Daemon]
) -> None:
    daemon(lambda _: None)
    result = run(tmp_path, WITH_FUNCTION)
    assert result.returncode == 1
    assert b"no answer within" in result.stderr


def test_a_daemon_that_never_accepts_meets_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "admin"))
        listener.listen(0)
        assert run(tmp_path, WITH_FUNCTION).returncode == 1


def test_standard_input_that_never_ends_meets_the_deadline(tmp_path: Path) -> None:
    command = [sys.executable, "-IS", str(SCRIPT), "db", "prepare", "begin", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"<domain>")
        process.stdin.flush()
        assert process.wait(120) == 1


@pytest.mark.parametrize("operation", OTHERS)
@pytest.mark.parametrize("text", [WITH_FUNCTION, "<broken", ""])
def test_no_other_operation_can_ever_fail(
    tmp_path: Path, operation: tuple[str, str], text: str
) -> None:
    result = run(tmp_path, text, operation)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


@pytest.mark.parametrize("operation", OPEN)
@pytest.mark.parametrize("text", [WITH_FUNCTION, WITH_FUNCTION[:-20], "<broken", ""])
def test_where_a_refusal_would_do_harm_there_is_none(
    tmp_path: Path, operation: tuple[str, str], text: str
) -> None:
    """Without a daemon, here."""
    result = run(tmp_path, text, operation)
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr.count(b"\n") <= 1


@pytest.mark.parametrize("arguments", [[], ["db"], ["db", "prepare"]])
def test_too_few_arguments_are_nothing_of_ours(arguments: list[str]) -> None:
    command = [sys.executable, "-IS", str(SCRIPT), *arguments]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=20).returncode == 0


@pytest.mark.parametrize("text", [BARE, READY, "<broken", "", b"\xff\x00", "x" * 9_000_000])
def test_a_domain_without_a_function_starts_even_without_a_daemon(
    tmp_path: Path, text: str | bytes
) -> None:
    result = run(tmp_path, text)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("text", "needed"),
    [(BARE, set()), (READY, {"xml", "xml.parsers", "xml.parsers.expat", "pyexpat"})],
    ids=["nothing of QEMU's own", "arguments of QEMU's"],
)
def test_a_domain_without_a_function_costs_an_interpreter_and_hardly_an_import(
    text: str, needed: set[str]
) -> None:
    """What it costs in time is a benchmark's business; here is what it would be made of."""

    def imported(*words: str) -> set[str]:
        command = [sys.executable, "-IS", "-X", "importtime", *words]
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, check=True, timeout=60
        )
        lines = done.stderr.decode().splitlines()
        return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time")}

    own = imported(str(SCRIPT), "db", "prepare", "begin", "-") - imported("-c", "import os, signal")
    assert own == needed


def test_an_empty_group_of_functions_is_no_function(tmp_path: Path) -> None:
    text = f"<domain><metadata><functions xmlns='{xml.NAMESPACE}'/></metadata></domain>"
    assert run(tmp_path, text).returncode == 0


BOMB = (
    '<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY a{i} "{f"&a{i - 1 if i else str()};" * 10}">' for i in range(20))
    + f"]><domain xmlns:x='{xml.NAMESPACE}'>&a19;</domain>"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "document type"),
        (WITH_FUNCTION[:-20], "malformed"),
        (WITH_FUNCTION + " " * LIMITS.hook_xml_bytes, "limit"),
        (
            f"<domain><metadata><functions xmlns='{xml.NAMESPACE}'>"
            + "".join(f"<function uuid='{n}'/>" for n in range(LIMITS.functions + 1))
            + "</functions></metadata></domain>",
            "limit",
        ),
    ],
)
def test_a_hostile_xml_is_refused_quickly(tmp_path: Path, text: str, told: str) -> None:
    result = run(tmp_path, text)
    assert result.returncode == 1
    assert told in result.stderr.decode()


def test_the_hook_reads_the_functions_that_the_xml_room_writes() -> None:
    text = xml.add(xml.add(READY, UUID, SOCKET), OTHER, OTHER_SOCKET)
    assert hook.parse(text.encode())[:2] == (
        DOMAIN,
        {UUID: SOCKET, OTHER: OTHER_SOCKET},
    )


def test_metadata_of_others_and_nested_copies_are_not_ours() -> None:
    text = WITH_FUNCTION.replace(
        "</metadata>",
        f"<o:snapshot xmlns:o='urn:o'><uuid>no</uuid><accelvisor:functions"
        f" xmlns:accelvisor='{xml.NAMESPACE}'><accelvisor:function uuid='{OTHER}'/>"
        "</accelvisor:functions></o:snapshot></metadata>",
    )
    assert hook.parse(text.encode())[:2] == (DOMAIN, {UUID: SOCKET})


def test_a_namespace_across_two_reads_is_found() -> None:
    wanted = xml.NAMESPACE.encode()
    for split in range(1, len(wanted)):
        reading, writing = os.pipe()
        try:
            os.write(writing, b"<a>" + wanted[:split])
            text = _read_in_two(reading, writing, wanted[split:])
        finally:
            os.close(reading)
        assert text == b"<a>" + wanted


def _read_in_two(reading: int, writing: int, rest: bytes) -> bytes | None:
    """The second half is written only when the first was read."""

    def later() -> None:
        import fcntl
        import struct
        import termios

        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            waiting = fcntl.ioctl(reading, termios.FIONREAD, struct.pack("i", 0))
            if struct.unpack("i", waiting)[0] == 0:
                break
        os.write(writing, rest)
        os.close(writing)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        return hook.read_xml(reading)
    finally:
        thread.join()


def test_the_hooks_own_constants_are_those_of_the_rest() -> None:
    assert xml.NAMESPACE == hook.NAMESPACE
    assert xml.QEMU_NAMESPACE == hook.QEMU_NAMESPACE
    assert {operation: seconds for operation, (seconds, _, _) in hook.OPERATIONS.items()} == {
        ("migrate", "begin"): LIMITS.hook_arriving_s,
        ("restore", "begin"): LIMITS.hook_arriving_s,
        ("prepare", "begin"): LIMITS.hook_s,
        ("started", "begin"): LIMITS.hook_started_s,
        ("stopped", "end"): LIMITS.hook_gone_s,
        ("release", "end"): LIMITS.hook_gone_s,
    }
    assert LIMITS.hook_xml_bytes == hook.XML_BYTES
    assert LIMITS.admin_message_bytes == hook.REPLY_BYTES
    assert LIMITS.functions == hook.FUNCTIONS


def test_the_hook_imports_only_a_few_standard_modules_and_forks_nothing() -> None:
    tree = ast.parse(SCRIPT.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or ".")
    typing = {"typing", "collections.abc"}
    assert imported - typing == {"os", "sys", "signal", "socket", "json", "xml.parsers"}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not called & {"fork", "forkpty", "system", "popen", "posix_spawn", "execv", "spawnv"}


def test_the_file_can_be_installed_as_it_is() -> None:
    assert SCRIPT.read_text().startswith("#!/usr/bin/python3 -IS\n")
    assert os.access(SCRIPT, os.X_OK)
