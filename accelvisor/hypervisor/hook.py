#!/usr/bin/python3 -IS
"""libvirt hook: refuses to start a domain whose accelerator functions are not there for it.

Installed as /etc/libvirt/hooks/qemu.d/50-accelvisor; libvirt calls it as
``50-accelvisor DOMAIN OPERATION SUB-OPERATION EXTRA`` with the domain XML on standard input
(https://libvirt.org/hooks.html). It runs with the domain's lock held, so:

* it is one file of the standard library, forks nothing, never talks to libvirt, and has a deadline;
* for a domain without a function it ends after one search through the XML, before any import;
* only ``prepare begin`` can refuse, and there everything that goes wrong is a refusal. Every other
  operation ends with 0 at once: a failing ``reconnect`` would kill a running QEMU.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

NAMESPACE = "https://accelvisor.io/xmlns/1"  # as accelvisor.hypervisor.xml.NAMESPACE
DEADLINE_S = 2.0  # as accelvisor.limits.Limits.hook_s
XML_BYTES = 4 * 1024 * 1024  # as accelvisor.limits.Limits.hook_xml_bytes
REPLY_BYTES = 1024 * 1024  # as accelvisor.limits.Limits.admin_message_bytes
FUNCTIONS = 256  # as accelvisor.limits.Limits.functions

#: The operations in which this hook has a say.
CHECKED = frozenset({("prepare", "begin")})
#: States of a function in which a domain can have it. "running" is its own last run, whose end
#: accelvisord may not have heard of yet.
USABLE = frozenset({"ready", "attached", "running"})


class Refused(Exception):  # noqa: N818 - it is the hook's answer
    """The domain must not start; the text goes to libvirt's error message."""


def main(arguments: "list[str]") -> int:
    """0: libvirt goes on. 1: it refuses, having printed why on standard error."""
    if tuple(arguments[2:4]) not in CHECKED:
        return 0
    import signal

    def late(*_: object) -> "NoReturn":
        raise Refused(f"no answer within {DEADLINE_S:g} s (systemctl status accelvisor)")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        xml = read_xml(0)
        if xml is not None:
            check(xml)
    except Refused as refusal:
        print(f"accelvisor: {refusal}", file=sys.stderr)
        return 1
    except Exception as error:  # a bug or a broken machine: fail closed, but say so in one line
        print(f"accelvisor: hook failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def read_xml(descriptor: int) -> "bytes | None":
    """All of the XML, or None when it never names our namespace.

    Raises Refused when it does and is larger than XML_BYTES.
    """
    wanted = NAMESPACE.encode()
    kept = bytearray()
    found = False
    size = 0
    while block := os.read(descriptor, 1 << 16):
        size += len(block)
        kept += block
        found = found or wanted in kept[-len(block) - len(wanted) :]
        if size > XML_BYTES:
            del kept[: -len(wanted)]
    if found and size > XML_BYTES:
        raise Refused(f"the domain XML has {size} bytes, the limit is {XML_BYTES}")
    return bytes(kept) if found else None


def check(xml: bytes) -> None:
    """Ask accelvisord for each function of the domain. Raises Refused."""
    domain, functions = parse(xml)
    if len(functions) > FUNCTIONS:
        raise Refused(f"the domain names {len(functions)} functions, the limit is {FUNCTIONS}")
    if not functions:
        return
    import socket

    path = os.environ.get("ACCELVISOR_RUN_DIR", "/run/accelvisor") + "/admin"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            for uuid, vfio in functions.items():
                judge(uuid, vfio, domain, call(connection, uuid))
        except OSError as error:
            raise Refused(
                f"cannot reach accelvisord at {path}: {error.strerror or error}"
                " (systemctl start accelvisor)"
            ) from None


def parse(xml: bytes) -> "tuple[str, dict[str, str]]":
    """(the domain's UUID, {function UUID: its socket or ""}). Raises Refused for a broken XML."""
    from xml.parsers import expat

    path: list[str] = []
    uuid: list[str] = []
    functions: dict[str, str] = {}
    function = ["domain", "metadata", f"{NAMESPACE} functions", f"{NAMESPACE} function"]

    def start(tag: str, attributes: "dict[str, str]") -> None:
        path.append(tag)
        if path == function:
            functions[attributes.get("uuid", "").strip().lower()] = attributes.get("socket", "")

    def text(data: str) -> None:
        if path == ["domain", "uuid"]:
            uuid.append(data)

    def doctype(*_: object) -> "NoReturn":
        # Entities are only declared in there; without it none can be expanded.
        raise Refused("the domain XML declares a document type")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _tag: path.pop()
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(xml, True)
    except expat.ExpatError as error:
        raise Refused(f"the domain XML is malformed: {error}") from None
    return "".join(uuid).strip().lower(), functions


def call(connection: "Any", uuid: str) -> "dict[str, Any]":
    """``io.accelvisor.Admin.GetFunction``: a call and its reply are JSON, ended by NUL (Varlink).

    Raises Refused.
    """
    import json

    request = {"method": "io.accelvisor.Admin.GetFunction", "parameters": {"function": uuid}}
    connection.sendall(json.dumps(request).encode() + b"\0")
    raw = bytearray()
    while not raw.endswith(b"\0"):
        block = connection.recv(1 << 16)
        raw += block
        if not block or len(raw) > REPLY_BYTES:
            raise Refused("accelvisord hung up" if not block else "too long an answer")
    try:
        reply = json.loads(raw[:-1])
        parameters = reply["parameters"]
        if "error" in reply:
            raise Refused(f"function {uuid}: {parameters.get('message') or reply['error']}")
        found = parameters["function"]
        if not isinstance(found, dict):
            raise TypeError("function is no object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"accelvisord's answer makes no sense: {error!r}") from None
    return found


def judge(uuid: str, vfio: str, domain: str, found: "dict[str, Any]") -> None:
    """Raises Refused unless this domain may start with this function."""
    owner = found.get("domain_uuid")
    if owner and owner != domain:
        name = found.get("domain") or owner
        raise Refused(f"function {uuid} belongs to domain {name} (accelctl function detach)")
    state = found.get("state")
    if state not in USABLE:
        reason = f": {found['reason']}" if found.get("reason") else ""
        raise Refused(f"function {uuid} is {state}{reason} (accelctl function show {uuid})")
    # The owner is what counts; a stale path would connect this guest to another one's function.
    if vfio and vfio != found.get("socket"):
        raise Refused(
            f"function {uuid} is at {found.get('socket')}, the domain names {vfio}"
            " (detach it and attach it again)"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
