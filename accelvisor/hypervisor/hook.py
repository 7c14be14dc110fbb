#!/usr/bin/python3 -IS
"""libvirt hook: refuses to start a domain whose accelerator functions are not there for it.

Installed as /etc/libvirt/hooks/qemu.d/50-accelvisor; libvirt calls it as
``50-accelvisor DOMAIN OPERATION SUB-OPERATION EXTRA`` with the domain XML on standard input
(https://libvirt.org/hooks.html). It runs with the domain's lock held, so:

* it is one file of the standard library, forks nothing, never talks to libvirt, and has a deadline;
* for a domain with neither a function nor arguments for QEMU it ends after one search through the
  XML, before any import;
* accelvisord decides whose a function is: it is told that this domain is about to start with it,
  and lets the domain's QEMU in, or says why not;
* the device counts, not its label: every path below accelvisord's functions that QEMU is given must
  be this domain's socket of a function that ``<metadata>`` names;
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
            check(arguments[1], xml)
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


def check(name: str, xml: bytes) -> None:
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
                    served.add(os.path.realpath(admit(connection, uuid, vfio, name, domain)))
            except OSError as error:
                raise Refused(
                    f"cannot reach accelvisord at {path}: {error.strerror or error}"
                    " (systemctl start accelvisor)"
                ) from None
    for path in sockets:
        if os.path.realpath(path) not in served:
            raise Refused(
                f"the domain gives QEMU {path}, which is not its socket of a function"
                " in its metadata (remove that argument, and use accelctl attach)"
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


def admit(connection: "Any", uuid: str, vfio: str, name: str, domain: str) -> str:
    """The socket at which the domain's QEMU is let into the function.

    Raises Refused, also when the domain's XML names another socket.
    """
    parameters = {"function": uuid, "domain": name, "domain_uuid": domain}
    reply = call(connection, "io.accelvisor.Admin.AdmitDomain", parameters)
    try:
        told = reply["parameters"]
        if "error" in reply:
            message = str(told.get("message") or reply["error"])
            hint = f" ({told['hint']})" if told.get("hint") else ""
            prefix = "" if uuid in message else f"function {uuid}: "
            raise Refused(f"{prefix}{message}{hint}")
        found = told["function"]
        owner, served = found["domain_uuid"], found["domain_socket"]
        if not isinstance(served, str):
            raise TypeError("the socket is no path")
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"accelvisord's answer makes no sense: {error!r}") from None
    if owner != domain:
        raise Refused(f"function {uuid} belongs to domain {owner} (accelctl detach {uuid})")
    # A stale path would connect this guest to another one's function.
    if vfio and vfio != served:
        raise Refused(
            f"function {uuid} is at {served}, the domain names {vfio}"
            " (detach it and attach it again)"
        )
    return served


def call(connection: "Any", method: str, parameters: "dict[str, str]") -> "dict[str, Any]":
    """A call and its reply are JSON, ended by NUL (Varlink). Raises Refused."""
    import json

    connection.sendall(json.dumps({"method": method, "parameters": parameters}).encode() + b"\0")
    raw = bytearray()
    while not raw.endswith(b"\0"):
        block = connection.recv(1 << 16)
        raw += block
        if not block or len(raw) > REPLY_BYTES:
            raise Refused("accelvisord hung up" if not block else "too long an answer")
    try:
        reply = json.loads(raw[:-1])
        if not isinstance(reply, dict):
            raise TypeError("no object")
    except (ValueError, TypeError, RecursionError) as error:
        raise Refused(f"accelvisord's answer makes no sense: {error!r}") from None
    return reply


if __name__ == "__main__":
    sys.exit(main(sys.argv))
