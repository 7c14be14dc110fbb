#!/usr/bin/python3 -IS
"""libvirt hook: accelvisord's say in the life of a domain with accelerator functions.

Installed as /etc/libvirt/hooks/qemu.d/50-accelvisor; libvirt calls it as
``50-accelvisor DOMAIN OPERATION SUB-OPERATION EXTRA`` with the domain XML on standard input
(https://libvirt.org/hooks.html). It runs with the domain's lock held, so:

* it is one file of the standard library, forks nothing, never talks to libvirt, and has a deadline;
* for a domain with neither a function nor arguments for QEMU it ends after one search through the
  XML, before any import;
* accelvisord decides: whose a function is (``prepare``), whether a domain may come here and what
  its XML is here (``migrate``, ``restore``), whether its devices are as they were (``started``);
* at ``prepare`` the device counts, not its label: every path below accelvisord's functions and
  domains that QEMU is given must be this domain's, of a function that ``<metadata>`` names;
* where a refusal only keeps a domain from starting here, everything that goes wrong is a refusal;
  everywhere else it ends with 0 whatever happens: a failing ``reconnect`` would kill a running
  QEMU. Which is which stands in OPERATIONS.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

NAMESPACE = "https://accelvisor.io/xmlns/1"  # as accelvisor.hypervisor.xml.NAMESPACE
QEMU_NAMESPACE = (
    "http://libvirt.org/schemas/domain/qemu/1.0"  # declared by those who pass arguments
)
XML_BYTES = 4 * 1024 * 1024  # as accelvisor.limits.Limits.hook_xml_bytes
REPLY_BYTES = 1024 * 1024  # as accelvisor.limits.Limits.admin_message_bytes
FUNCTIONS = 256  # as accelvisor.limits.Limits.functions


class Refused(Exception):  # noqa: N818 - it is the hook's answer
    """The domain must not start; the text goes to libvirt's error message."""


def main(arguments: "list[str]") -> int:
    """0: libvirt goes on. 1: it refuses, having printed why on standard error."""
    operation = OPERATIONS.get(tuple(arguments[2:4]))
    if operation is None:
        return 0
    deadline_s, closed, act = operation
    import signal

    def late(*_: object) -> "NoReturn":
        raise Refused(f"no answer within {deadline_s:g} s (systemctl status accelvisor)")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        xml = read_xml(0)
        if xml is not None:
            act(arguments, xml)
    except Refused as refusal:
        print(f"accelvisor: {refusal}", file=sys.stderr)
        return int(closed)
    except Exception as error:  # a bug or a broken machine: say so in one line
        print(f"accelvisor: hook failed: {type(error).__name__}: {error}", file=sys.stderr)
        return int(closed)
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


# --- what is done at each operation --------------------------------------------------------------


def admitted(arguments: "list[str]", xml: bytes) -> None:
    """``prepare``: ask accelvisord for each function of the domain. Raises Refused."""
    domain, functions, given = parse(xml)
    sockets = connected(given)
    served: set[str] = set()
    if functions:
        with accelvisord() as connection:
            for uuid, vfio in functions.items():
                path = admit(connection, uuid, vfio, arguments[1], domain)
                served.add(os.path.realpath(path))
        stem = os.path.realpath(f"{run_directory()}/domain/libvirt-{domain}")
        served |= {f"{stem}.bus", f"{stem}.monitor"}
    for path in sockets:
        if os.path.realpath(path) not in served:
            raise Refused(
                f"the domain gives QEMU {path}, which is not its socket of a function"
                " in its metadata (remove that argument, and use accelctl attach)"
            )


def arriving(arguments: "list[str]", xml: bytes) -> None:
    """``migrate`` and ``restore``: print the XML that the domain has on this host."""
    _, functions, given = parse(xml)
    # One whose functions were all taken out while it ran still names them to QEMU.
    if functions or connected(given):
        method = {"migrate": "ReserveMigration", "restore": "PrepareRestore"}[arguments[2]]
        told = asked(method, {"xml": xml.decode()}).get("xml")
        if not isinstance(told, str) or not told:
            raise Refused("accelvisord's answer makes no sense: it has no XML")
        text = told.encode()
        while text:
            text = text[os.write(1, text) :]


def started(arguments: "list[str]", xml: bytes) -> None:
    """``started``: QEMU is there, and its guest does not run yet."""
    domain, functions, _ = parse(xml)
    if functions:
        asked("RestoreContext", {"domain": arguments[1], "domain_uuid": domain})


def gone(arguments: "list[str]", xml: bytes) -> None:
    """``stopped`` and ``release``: QEMU is not there any more. libvirt says why, or ``-``."""
    domain, functions, _ = parse(xml)
    if functions:
        why = arguments[4] if len(arguments) > 4 and arguments[4] != "-" else arguments[2]
        asked("DomainGone", {"domain_uuid": domain, "reason": why})


#: (operation, sub-operation) -> (seconds, whether what goes wrong is a refusal, what is done). The
#: seconds are those of accelvisor.limits.Limits.hook_*.
OPERATIONS: "dict[tuple[str, ...], tuple[float, bool, Callable[[list[str], bytes], None]]]" = {
    ("migrate", "begin"): (10.0, True, arriving),
    ("prepare", "begin"): (2.0, True, admitted),
    ("started", "begin"): (20.0, True, started),
    ("restore", "begin"): (10.0, False, arriving),
    ("stopped", "end"): (1.0, False, gone),
    ("release", "end"): (1.0, False, gone),
}


# --- the domain's XML ----------------------------------------------------------------------------


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
    if len(functions) > FUNCTIONS:
        raise Refused(f"the domain names {len(functions)} functions, the limit is {FUNCTIONS}")
    return "".join(uuid).strip().lower(), functions, arguments


def connected(arguments: "list[str]") -> "list[str]":
    """The paths below accelvisord's functions and domains in QEMU's arguments, however written.

    Raises Refused for a device in a form of JSON that only QEMU reads.
    """
    below = tuple(os.path.realpath(f"{run_directory()}/{w}") + "/" for w in ("function", "domain"))
    found = []
    before = ""
    for argument in arguments:
        for text in map(unescaped, strings(argument, before.lstrip("-") == "device")):
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


def unescaped(text: str) -> str:
    """With the escapes of a D-Bus address (``%2f``) resolved."""
    head, *rest = text.split("%")
    for part in rest:
        try:
            head += chr(int(part[:2], 16)) + part[2:]
        except ValueError:
            head += "%" + part
    return head


# --- accelvisord ---------------------------------------------------------------------------------


def accelvisord() -> "Any":
    """A connection to it. Raises Refused."""
    import socket

    path = run_directory() + "/admin"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise Refused(
            f"cannot reach accelvisord at {path}: {error.strerror or error}"
            " (systemctl start accelvisor)"
        ) from None
    return connection


def asked(method: str, parameters: "dict[str, str]") -> "dict[str, Any]":
    """What accelvisord returns. Raises Refused, with its words when it refuses."""
    with accelvisord() as connection:
        return answered(call(connection, f"io.accelvisor.Admin.{method}", parameters))


def answered(reply: "dict[str, Any]", about: str = "") -> "dict[str, Any]":
    """The parameters of a reply. Raises Refused when it is an error, or none."""
    told = reply.get("parameters")
    if not isinstance(told, dict):
        raise Refused(f"accelvisord's answer makes no sense: {str(reply)[:200]}")
    if "error" in reply:
        message = str(told.get("message") or reply["error"])
        hint = f" ({told['hint']})" if told.get("hint") else ""
        prefix = f"function {about}: " if about and about not in message else ""
        raise Refused(f"{prefix}{message}{hint}")
    return told


def admit(connection: "Any", uuid: str, vfio: str, name: str, domain: str) -> str:
    """The socket at which the domain's QEMU is let into the function.

    Raises Refused, also when the domain's XML names another socket.
    """
    parameters = {"function": uuid, "domain": name, "domain_uuid": domain}
    told = answered(call(connection, "io.accelvisor.Admin.AdmitDomain", parameters), uuid)
    try:
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

    raw = bytearray()
    request = json.dumps({"method": method, "parameters": parameters}).encode() + b"\0"
    try:
        connection.sendall(request)
    except OSError:  # it hung up; the answer that it may have left says why
        pass
    while not raw.endswith(b"\0"):
        try:
            block = connection.recv(1 << 16)
        except OSError as error:
            raise Refused(f"accelvisord hung up: {error.strerror or error}") from None
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
