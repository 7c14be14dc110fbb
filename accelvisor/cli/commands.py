"""accelctl's commands: each calls the daemon and prints the reply."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from accelvisor import __version__
from accelvisor.cli import render
from accelvisor.control.client import AdminClient
from accelvisor.errors import AccelvisorError, UsageError

#: Seconds on top of a verb's own deadline before the daemon is called stuck.
MARGIN_S = 15.0
#: For verbs that wait for processes or guests with deadlines of their own.
LONG_S = 120.0


class Session:
    """One run of accelctl: the options and, once it is needed, the connection."""

    def __init__(self, options: argparse.Namespace, socket: str) -> None:
        self.options = options
        self.socket = socket
        self._client: AdminClient | None = None

    @property
    def client(self) -> AdminClient:
        if self._client is None:
            self._client = AdminClient(self.socket)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def call(self, member: str, *, reply_s: float | None = None, **given: Any) -> dict[str, Any]:
        return self.client.call(member, given, reply_s=reply_s)

    def show(self, reply: Mapping[str, Any], words: Callable[[], str]) -> None:
        """The wire object with ``--json``, else the words."""
        print(json.dumps(reply, indent=2) if self.options.json else words())


def host_show(session: Session) -> int:
    reply = session.call("GetHost")
    session.show(reply, lambda: render.host(reply["host"]))
    return 0


def function_create(session: Session) -> int:
    options = session.options
    if options.dry_run:
        return _in("isolation", "plan")(session)
    reply = session.call(
        "CreateFunction",
        reply_s=LONG_S,
        profile=options.profile,
        name=options.name,
        card=options.card,
    )
    session.show(reply, lambda: render.function(reply["function"]))
    return 0


def function_list(session: Session) -> int:
    reply = session.call("ListFunctions")
    session.show(reply, lambda: render.functions(reply["functions"]))
    return 0


def function_show(session: Session) -> int:
    reply = session.call("GetFunction", function=session.options.function)
    session.show(reply, lambda: render.function(reply["function"]))
    return 0


def function_delete(session: Session) -> int:
    options = session.options
    reply = session.call(
        "DeleteFunction",
        reply_s=LONG_S,
        function=options.function,
        force=options.force or None,
    )
    session.show(reply, lambda: f"function {options.function} is deleted")
    return 0


def function_reset(session: Session) -> int:
    reply = session.call("ResetFunction", function=session.options.function)
    session.show(reply, lambda: render.function(reply["function"]))
    return 0


def function_statistics(session: Session) -> int:
    reply = session.call("FunctionStatistics", function=session.options.function)
    session.show(reply, lambda: render.tree(reply["statistics"]))
    return 0


def function_selftest(session: Session) -> int:
    from accelvisor.cli import selftest  # numpy and the guest's runtime: only here

    reply = session.call("GetFunction", function=session.options.function)
    return selftest.run(reply["function"], as_json=session.options.json)


def attach(session: Session) -> int:
    options = session.options
    if options.card is not None:
        return _in("isolation", "attach")(session)
    if options.on_exhaustion is not None or options.timeout is not None:
        raise UsageError("--on-exhaustion and --timeout go with --card", where="accelctl")
    if options.print:
        reply = session.call(
            "PrintAttachment", function=options.function, domain=options.domain
        )
        session.show(reply, lambda: str(reply["xml"]).rstrip())
        return 0
    if options.domain is None:
        raise UsageError("attach needs a VM", hint="accelctl attach FUNCTION VM", where="accelctl")
    reply = session.call(
        "AttachFunction",
        reply_s=LONG_S,
        domain=options.domain,
        function=options.function,
        live=options.live,
        persistent=options.persistent,
    )
    session.show(reply, lambda: attachment(reply["attachment"], "attached to"))
    return 0


def detach(session: Session) -> int:
    options = session.options
    domain = options.domain
    if domain is None:
        found = session.call("GetFunction", function=options.function)["function"]
        domain = found["domain_uuid"]
        if domain is None:
            raise UsageError(
                f'no VM has function "{options.function}"',
                code="function-not-attached",
                where="accelctl",
            )
    reply = session.call(
        "DetachFunction",
        reply_s=options.timeout + MARGIN_S,
        domain=domain,
        function=options.function,
        live=options.live,
        persistent=options.persistent,
        deadline=options.timeout,
    )
    session.show(reply, lambda: attachment(reply["attachment"], "detached from"))
    return 0


def attachment(item: Mapping[str, Any], verb: str) -> str:
    """A sentence."""
    live, stored = item["live"], item["persistent"]
    what = "running VM and stored definition" if live and stored else "running VM"
    if not live:
        what = "stored definition"
    place = f" at {item['bus']} {item['address']}".rstrip() if item["bus"] else ""
    return f"function {item['function']} {verb} {item['domain']} ({what}){place}"


def vm_list(session: Session) -> int:
    reply = session.call("ListDomains")
    session.show(reply, lambda: render.domains(reply["domains"]))
    return 0


def vm_show(session: Session) -> int:
    return _vm(session, "GetDomain")


def vm_xml(session: Session) -> int:
    options = session.options
    reply = session.call("DomainXml", domain=options.domain, live=options.live or None)
    session.show(reply, lambda: str(reply["xml"]).rstrip())
    return 0


def vm_define(session: Session) -> int:
    options = session.options
    if (options.xml is None) == (options.name is None):
        raise UsageError("give a NAME with options, or --xml FILE, not both", where="accelctl")
    if options.xml is not None:
        given: dict[str, Any] = {"xml": _read(options.xml)}
    else:
        given = {"options": _domain_options(options)}
    reply = session.call("DefineDomain", dry_run=options.dry_run, **given)
    if reply["domain"] is None:
        session.show(reply, lambda: str(reply["xml"]).rstrip())
    else:
        session.show(reply, lambda: render.domain(reply["domain"]))
    return 0


def vm_prepare(session: Session) -> int:
    options = session.options
    reply = session.call(
        "PrepareDomain",
        domain=options.domain,
        hotplug_ports=options.hotplug_ports,
        dry_run=options.dry_run,
    )
    if reply["domain"] is None:
        session.show(reply, lambda: str(reply["xml"]).rstrip())
    else:
        words = "is ready for functions, from its next start on"
        session.show(reply, lambda: f"VM {reply['domain']['name']} {words}")
    return 0


def _domain_options(options: argparse.Namespace) -> dict[str, object]:
    disks = options.disk or []
    given = {
        "name": options.name,
        "memory_bytes": options.memory,
        "vcpus": options.vcpus,
        "disk": disks[0] if disks else None,
        "disks": disks[1:] or None,
        "kernel": options.kernel,
        "initrd": options.initrd,
        "cmdline": options.cmdline,
        "network": options.network,
        "machine": options.machine,
        "accelerator": options.accelerator,
        "hotplug_ports": options.hotplug_ports,
        "iommu": options.iommu,
        "console_log": options.console_log,
        "uuid": options.uuid,
    }
    return {name: value for name, value in given.items() if value is not None}


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}", where="accelctl") from error


def vm_start(session: Session) -> int:
    return _vm(session, "StartDomain", reply_s=LONG_S)


def vm_stop(session: Session) -> int:
    timeout = session.options.timeout
    return _vm(session, "StopDomain", reply_s=timeout + MARGIN_S, deadline=timeout)


def vm_suspend(session: Session) -> int:
    return _vm(session, "SuspendDomain")


def vm_resume(session: Session) -> int:
    return _vm(session, "ResumeDomain")


def vm_reboot(session: Session) -> int:
    return _vm(session, "RebootDomain")


def vm_reset(session: Session) -> int:
    return _vm(session, "ResetDomain")


def vm_destroy(session: Session) -> int:
    return _vm(session, "DestroyDomain")


def vm_undefine(session: Session) -> int:
    reply = session.call("UndefineDomain", domain=session.options.domain)
    session.show(reply, lambda: f"VM {session.options.domain} is undefined")
    return 0


def vm_console(session: Session) -> int:
    """A console needs a terminal of its own, so the command for it is printed."""
    reply = session.call("GetDomain", domain=session.options.domain)
    uri = session.call("GetHost")["host"]["libvirt_uri"]
    name = reply["domain"]["name"]
    session.show(reply, lambda: f"virsh --connect {uri} console {name}    (leave: Ctrl+])")
    return 0


def _vm(session: Session, member: str, *, reply_s: float | None = None, **given: Any) -> int:
    reply = session.call(member, reply_s=reply_s, domain=session.options.domain, **given)
    session.show(reply, lambda: render.domain(reply["domain"]))
    return 0


def events(session: Session) -> int:
    options = session.options
    if not options.follow:
        reply = session.call("ListEvents", after=options.after)
        session.show(reply, lambda: "\n".join(map(render.event, reply["events"])) or "no events")
        return 0
    for reply in session.client.stream("WatchEvents", {"after": options.after}):
        if reply["event"] is None:
            continue  # a sign of life
        print(json.dumps(reply) if options.json else render.event(reply["event"]), flush=True)
    return 0


def doctor(session: Session) -> int:
    """1 when something keeps this host from working."""
    reply = session.call("Doctor")
    session.show(reply, lambda: render.checks(reply["checks"]))
    return int(any(item["severity"] == "problem" for item in reply["checks"]))


def version(session: Session) -> int:
    """The client's version even when there is no daemon."""
    try:
        about = session.client.call("GetInfo", interface="org.varlink.service")
        daemon = about["version"]
    except AccelvisorError as error:
        daemon = None
        reason = f"{error.message} [{error.code}]"
    reply = {"accelctl": __version__, "accelvisord": daemon}
    session.show(
        reply, lambda: f"accelctl {__version__}\naccelvisord {daemon or f'unknown: {reason}'}"
    )
    return 0


def _in(module: str, name: str) -> Callable[[Session], int]:
    """A command that is loaded when it is used: a short command does not pay for the others."""

    def run(session: Session) -> int:
        return int(getattr(import_module(f"accelvisor.cli.{module}"), name)(session))

    return run


COMMANDS: Mapping[tuple[str, str | None], Callable[[Session], int]] = {
    ("host", "show"): host_show,
    ("card", "list"): _in("isolation", "card_list"),
    ("card", "show"): _in("isolation", "card_show"),
    ("card", "set"): _in("isolation", "card_set"),
    ("card", "chip"): _in("isolation", "card_chip"),
    ("topology", None): _in("topology", "topology"),
    ("trace", None): _in("trace", "trace"),
    ("profiles", None): _in("isolation", "profiles"),
    ("function", "create"): function_create,
    ("function", "list"): function_list,
    ("function", "show"): function_show,
    ("function", "delete"): function_delete,
    ("function", "reset"): function_reset,
    ("function", "resize"): _in("isolation", "resize"),
    ("function", "revoke"): _in("isolation", "revoke"),
    ("function", "statistics"): function_statistics,
    ("function", "selftest"): function_selftest,
    ("attach", None): attach,
    ("detach", None): detach,
    ("vm", "list"): vm_list,
    ("vm", "show"): vm_show,
    ("vm", "xml"): vm_xml,
    ("vm", "define"): vm_define,
    ("vm", "prepare"): vm_prepare,
    ("vm", "start"): vm_start,
    ("vm", "stop"): vm_stop,
    ("vm", "suspend"): vm_suspend,
    ("vm", "resume"): vm_resume,
    ("vm", "reboot"): vm_reboot,
    ("vm", "reset"): vm_reset,
    ("vm", "destroy"): vm_destroy,
    ("vm", "undefine"): vm_undefine,
    ("vm", "console"): vm_console,
    ("host", "drain"): _in("migrate", "drain"),
    ("migrate", None): _in("migrate", "migrate"),
    ("migration", "list"): _in("migrate", "list_all"),
    ("migration", "show"): _in("migrate", "show"),
    ("migration", "cancel"): _in("migrate", "cancel"),
    ("trust", "init"): _in("trust", "init"),
    ("trust", "show"): _in("trust", "show"),
    ("trust", "invite"): _in("trust", "invite"),
    ("trust", "join"): _in("trust", "join"),
    ("trust", "remove"): _in("trust", "remove"),
    ("trust", "revoke"): _in("trust", "revoke"),
    ("trust", "rotate"): _in("trust", "rotate"),
    ("trust", "export"): _in("trust", "export"),
    ("trust", "import"): _in("trust", "import_"),
    ("checkpoint", "create"): _in("checkpoint", "create"),
    ("checkpoint", "list"): _in("checkpoint", "list_all"),
    ("checkpoint", "show"): _in("checkpoint", "show"),
    ("checkpoint", "verify"): _in("checkpoint", "verify"),
    ("checkpoint", "restore"): _in("checkpoint", "restore"),
    ("checkpoint", "export"): _in("checkpoint", "export"),
    ("checkpoint", "import"): _in("checkpoint", "import_"),
    ("checkpoint", "delete"): _in("checkpoint", "delete"),
    ("watermark", "key"): _in("watermark", "key"),
    ("watermark", "tensors"): _in("watermark", "tensors"),
    ("watermark", "register"): _in("watermark", "register"),
    ("watermark", "unregister"): _in("watermark", "unregister"),
    ("watermark", "list"): _in("watermark", "list_all"),
    ("watermark", "check"): _in("watermark", "check"),
    ("watermark", "embed"): _in("watermark", "embed"),
    ("watermark", "look"): _in("watermark", "look"),
    ("events", None): events,
    ("doctor", None): doctor,
    ("version", None): version,
}
