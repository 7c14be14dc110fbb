#!/usr/bin/python3 -IS
"""libvirt hook: refuses to start a domain whose accelerator functions are not there for it.

Installed as /etc/libvirt/hooks/qemu.d/50-accelvisor; libvirt calls it as
``50-accelvisor DOMAIN OPERATION SUB-OPERATION EXTRA`` with the domain XML on standard input
(https://libvirt.org/hooks.html). It runs with the domain's lock held, so:

* it is one file of the standard library, forks nothing, never talks to libvirt, and has a deadline;
* for a domain with neither a function nor arguments for QEMU it ends after one search through the
  XML, before any import;
* the device counts, not its label: every path below accelvisord's functions that QEMU is given must
  be the socket of a function that ``<metadata>`` names and this domain owns;
* only ``prepare begin`` can refuse, and there everything that goes wrong is a refusal. Every other
  operation ends with 0 at once: a failing ``reconnect`` would kill a running QEMU.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

NAMESPACE = "https://accelvisor.io/xmlns/1"  # as accelvisor.hypervisor.xml.NAMESPACE
QEMU_NAMESPACE = (
    "http://libvirt.org/schemas/domain/qemu/1.0"  # declared by those who pass arguments
)
DEADLINE_S = 2.0  # as accelvisor.limits.Limits.hook_s
XML_BYTES = 4 * 1024 * 1024  # as accelvisor.limits.Limits.hook_xml_bytes
REPLY_BYTES = 1024 * 1024  # as accelvisor.limits.Limits.admin_message_bytes
FUNCTIONS = 256  # as accelvisor.limits.Limits.functions

#: The operations in which this hook has a say.
CHECKED = frozenset({("prepare", "begin")})
#: States of a function in which its domain can have it. "running" is its own last run, whose end
#: accelvisord may not have heard of yet.
USABLE = frozenset({"ready", "attached", "running"})
#: And in which a domain can have it that accelvisord knows nothing of: a pasted XML.
FREE = frozenset({"ready"})


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
    """All of the XML, or None when it names neither our namespace nor QEMU's.

    Raises Refused when it does and is larger than XML_BYTES.
    """
    wanted = (NAMESPACE.encode(), QEMU_NAMESPACE.encode())
    longest = max(map(len, wanted))
    kept = bytearray()
    found = False
    size = 0
    while block := os.read(descriptor, 1 << 16):
        size += len(block)
        kept += block
        if not found:
            end = kept[-len(block) - longest :]
            found = any(name in end for name in wanted)
        if size > XML_BYTES:
            del kept[:-longest]
    if found and size > XML_BYTES:
        raise Refused(f"the domain XML has {size} bytes, the limit is {XML_BYTES}")
    return bytes(kept) if found else None


def run_directory() -> str:
    return os.environ.get("ACCELVISOR_RUN_DIR", "/run/accelvisor")


def check(xml: bytes) -> None:
    """Ask accelvisord for each function of the domain. Raises Refused."""
    domain, functions, arguments = parse(xml)
    if len(functions) > FUNCTIONS:
        raise Refused(f"the domain names {len(functions)} functions, the limit is {FUNCTIONS}")
    sockets = connected(arguments)
    served: set[str] = set()
    if functions:
        import socket

        path = run_directory() + "/admin"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(path)
                for uuid, vfio in functions.items():
                    found = call(connection, uuid)
                    judge(uuid, vfio, domain, found)
                    served.add(os.path.realpath(str(found.get("socket"))))
            except OSError as error:
                raise Refused(
                    f"cannot reach accelvisord at {path}: {error.strerror or error}"
                    " (systemctl start accelvisor)"
                ) from None
    for path in sockets:
        if os.path.realpath(path) not in served:
            raise Refused(
                f"the domain gives QEMU {path}, which is no socket of a function in its metadata"
                " (remove that argument, and use accelctl attach)"
            )


def parse(xml: bytes) -> "tuple[str, dict[str, str], list[str]]":
    """(the domain's UUID, {function UUID: its socket or ""}, QEMU's arguments).

    Raises Refused for a broken XML.
    """
    from xml.parsers import expat

    path: list[str] = []
    uuid: list[str] = []
    functions: dict[str, str] = {}
    arguments: list[str] = []
    function = ["domain", "metadata", f"{NAMESPACE} functions", f"{NAMESPACE} function"]
    argument = ["domain", f"{QEMU_NAMESPACE} commandline", f"{QEMU_NAMESPACE} arg"]

    def start(tag: str, attributes: "dict[str, str]") -> None:
        path.append(tag)
        if path == function:
            name, vfio = attributes.get("uuid", "").strip().lower(), attributes.get("socket", "")
            if functions.setdefault(name, vfio) != vfio:
                raise Refused(f"the domain names function {name} twice, at two sockets")
        elif path == argument:
            arguments.append(attributes.get("value", ""))

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
    return "".join(uuid).strip().lower(), functions, arguments


def connected(arguments: "list[str]") -> "list[str]":
    """The paths below accelvisord's functions in QEMU's arguments, however they are written.

    Raises Refused for a device in a form of JSON that only QEMU reads.
    """
    below = os.path.realpath(run_directory() + "/function") + "/"
    found = []
    before = ""
    for argument in arguments:
        for text in strings(argument, before.lstrip("-") == "device"):
            path = text[text.find("/") :] if "/" in text else ""
            # Not only the plain path: /var/run, //, .. and links lead to the same socket.
            if path and os.path.realpath(path).startswith(below):
                found.append(path)
        before = argument
    return found


def strings(argument: str, device: bool) -> "list[str]":
    """All texts in one argument: of a JSON value, or between the commas of ``a=b,c=d``."""
    if not argument.lstrip().startswith("{"):
        return [part for piece in argument.split(",") for part in piece.split("=")]
    import json

    try:
        waiting = [json.loads(argument)]
    except (ValueError, RecursionError):
        if device:
            raise Refused(f"cannot read the device {argument[:80]!r} in the domain XML") from None
        return [argument]
    texts = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            texts.append(value)
    return texts


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
        raise Refused(f"function {uuid} belongs to domain {name} (accelctl detach {uuid})")
    state = found.get("state")
    if state not in (USABLE if owner else FREE):
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
