"""accelctl's commands and options, as argparse. A test compares them with accelctl(1)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from accelvisor import __version__
from accelvisor.limits import LIMITS

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def size(text: str) -> int:
    """``512MiB``, ``2GiB`` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+)\s*(|b|kib|mib|gib)\s*", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 512MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of up to 600 seconds")
    return value


def milliseconds(text: str) -> int:
    """A positive whole number up to a minute."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of 1 to 60000 milliseconds")
    return int(text)


def count(text: str) -> int:
    """A positive whole number up to a thousand."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000")
    return int(text)


def number(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def functions(text: str) -> int:
    """A number of static functions; which ones a card takes the daemon says."""
    return 0 if text == "0" else count(text)


def wait(text: str) -> float:
    """A positive number of seconds up to a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LIMITS.function_wait_s:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of up to a day, in seconds")
    return value


def margin(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number up to 1000")
    return value


class _Group:
    """A place for commands: the top level, or a noun such as ``function``."""

    def __init__(self, parser: argparse.ArgumentParser, dest: str, common: _Common) -> None:
        self._actions = parser.add_subparsers(dest=dest, metavar="COMMAND", required=True)
        self._common = common

    def command(self, name: str, about: str, json_file: str = "") -> argparse.ArgumentParser:
        """``json_file``: what --json writes when it is given a file."""
        return self._actions.add_parser(
            name,
            help=about,
            description=about[:1].upper() + about[1:] + ".",
            parents=[self._common(json_file)],
        )

    def noun(self, name: str, about: str, dest: str) -> _Group:
        made = self._actions.add_parser(
            name, help=about, description=about[:1].upper() + about[1:] + "."
        )
        return _Group(made, dest, self._common)


_Common = Callable[[str], argparse.ArgumentParser]


def _common(json_file: str = "") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    about = "print the object that the admin interface carries"
    if json_file:
        made.add_argument(
            "--json", nargs="?", const=True, default=False, metavar="FILE",
            help=f"{about}; with FILE: write there {json_file}",
        )  # fmt: skip
    else:
        made.add_argument("--json", action="store_true", help=about)
    made.add_argument(
        "--socket", metavar="PATH", help="admin socket (default: admin in ACCELVISOR_RUN_DIR)"
    )
    return made


def build(chosen: str | None = None) -> argparse.ArgumentParser:
    """The command line. ``command`` (and ``verb``) hold what was chosen.

    Args:
        chosen: the first word of the command line, if known: of the other nouns only the names are
            made, which halves the time of a short command. None for everything.
    """
    parser = argparse.ArgumentParser(
        prog="accelctl",
        description="Manage this host's accelerator functions and the VMs that have them.",
        epilog="accelctl(1) has examples, and the exit codes.",
    )
    parser.add_argument("--version", action="version", version=f"accelctl {__version__}")
    top = _Group(parser, "command", _common)
    for name, about, fill in _NOUNS:
        if chosen in (None, name):
            fill(top.noun(name, about, "verb"))
        else:
            top.command(name, about)
    top.command("profiles", "list the profiles, with how many more of each fit")
    topology = top.command("topology", "draw the chips and links of cards, and who has them")
    topology.add_argument("card", metavar="CARD", nargs="?", help="only this one")
    topology.add_argument("--svg", metavar="FILE", help="as a picture (- for standard output)")
    _trace(top)
    _attachments(top)
    _migrate(top)
    events = top.command("events", "print what happened on this host")
    events.add_argument("--follow", "-f", action="store_true", help="go on with new events")
    events.add_argument("--after", type=int, metavar="ID", help="only events after this one")
    top.command("doctor", "look at this host and say what is missing")
    top.command("version", "print the versions of accelctl and of the daemon")
    return parser


def _host(group: _Group) -> None:
    group.command("show", "show the host and its daemon")


    drain = group.command("drain", "move every running VM that has functions to other hosts")
    drain.add_argument(
        "--to", metavar="HOST", action="append", help="only to this host (default: all trusted)"
    )
    drain.add_argument("--uri", metavar="TEMPLATE", help="their libvirt, {address} in it")
    drain.add_argument("--dry-run", action="store_true", default=None, help="only show the plan")


def _cards(group: _Group) -> None:
    group.command("list", "list the cards")
    show = group.command("show", "show one card")
    show.add_argument("card", metavar="CARD")
    show.add_argument(
        "--config-space", action="store_true", help="of its physical function, for lspci -F"
    )
    cut = group.command("set", "cut a card into equal static functions, or make it dynamic again")
    cut.add_argument("card", metavar="CARD")
    cut.add_argument(
        "--functions", type=functions, required=True, metavar="N",
        help="1, 2, 4, 8 or 16; 0: dynamic",
    )  # fmt: skip
    chip = group.command("chip", "switch a chip on or off, or let links only lead over it")
    chip.add_argument("card", metavar="CARD")
    chip.add_argument("chip", type=number, metavar="CHIP", help="its number on the card")
    chip.add_argument("mode", choices=("enable", "disable", "pass-through"))


def _functions(group: _Group) -> None:
    create = group.command("create", "create a function and wait until it is ready")
    create.add_argument("profile", metavar="PROFILE")
    create.add_argument("--name", help="a name of its own (default: its UUID)")
    create.add_argument("--card", help="the card to take it from (default: the first with room)")
    create.add_argument("--dry-run", action="store_true", default=None, help="only show the plan")
    group.command("list", "list the functions")
    for name, about in (
        ("show", "show one function"),
        ("delete", "end a function"),
        ("reset", "reset a function; a failed one gets a new process"),
        ("statistics", "show what a function counts"),
        ("selftest", "compute on a function that no VM has, and compare with the reference"),
    ):
        verb = group.command(name, about)
        verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
        if name == "delete":
            verb.add_argument("--force", action="store_true", help="take it from its VM first")
    resize = group.command("resize", "give a function more or less of its card while it computes")
    resize.add_argument("--cores", type=count, metavar="N", help="over all of its chips")
    resize.add_argument("--memory", type=size, metavar="SIZE")
    revoke = group.command("revoke", "take everything from a function, also while its VM runs")
    for verb in (resize, revoke):
        verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
        verb.add_argument(
            "--dry-run", action="store_true", default=None, help="only show the plan"
        )


def _trace(top: _Group) -> None:
    verb = top.command(
        "trace", "show what ran when on the chips of a function", json_file="as a Chrome trace"
    )
    verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    verb.add_argument("--svg", metavar="FILE", help="as a picture (- for standard output)")
    verb.add_argument("--png", metavar="FILE", help="the same, in pixels")


def _attachments(top: _Group) -> None:
    for name, about in (
        ("attach", "give a function to a VM"),
        ("detach", "take a function away from its VM"),
    ):
        verb = top.command(name, about)
        words = "its name or UUID; with --card it is left out" if name == "attach" else ""
        verb.add_argument("function", metavar="FUNCTION", help=words or "its name or UUID")
        verb.add_argument("domain", metavar="VM", nargs="?", help="the VM's name or UUID")
        verb.add_argument("--live", action="store_true", default=None, help="the running VM")
        verb.add_argument(
            "--persistent", action="store_true", default=None, help="the stored definition"
        )
        if name == "attach":
            verb.add_argument(
                "--print", action="store_true", help="change nothing, print the XML for that VM"
            )
            _partition(verb)
        else:
            verb.add_argument(
                "--timeout",
                type=seconds,
                default=15.0,
                metavar="SECONDS",
                help="how long the guest may take to let go (default: 15)",
            )


def _partition(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--card", metavar="CARD|any", help="a new static function of this card: accelctl attach VM"
    )
    verb.add_argument(
        "--on-exhaustion",
        choices=("wait", "deny", "migrate"),
        help="when none is free (default: deny)",
    )
    verb.add_argument("--timeout", type=wait, metavar="SECONDS", help="how long to wait for one")


def _migrate(top: _Group) -> None:
    verb = top.command("migrate", "move a running VM with its functions to another host")
    verb.add_argument("domain", metavar="VM", help="its name or UUID")
    verb.add_argument("host", metavar="HOST", help="a trusted host's name or UUID")
    verb.add_argument("--dry-run", action="store_true", default=None, help="only say what happens")
    verb.add_argument("--uri", metavar="URI", help="of that host's libvirt")
    verb.add_argument(
        "--downtime", type=milliseconds, metavar="MS", help="of the VM, aimed at (milliseconds)"
    )
    verb.add_argument("--bandwidth", type=size, metavar="SIZE", help="of QEMU, bytes a second")
    verb.add_argument(
        "--transient", action="store_true", default=None, help="leave the stored definition here"
    )


def _migrations(group: _Group) -> None:
    group.command("list", "list the migrations of this host, the finished ones too")
    group.command("show", "show one migration").add_argument("id", metavar="ID")
    cancel = group.command("cancel", "end a migration before its point of no return")
    cancel.add_argument("domain", metavar="VM", help="its name or UUID")


def _trust(group: _Group) -> None:
    group.command("init", "show this host's identity, and how hosts come to trust each other")
    group.command("show", "show whom this host trusts, and its own keys")
    invite = group.command("invite", "make a code with which one other host can join")
    invite.add_argument("--address", metavar="HOST:PORT", help="how that one reaches this host")
    invite.add_argument(
        "--again", metavar="HOST", help="let this trusted host come with other keys (name or UUID)"
    )
    join = group.command("join", "trust the host that made a code, and be trusted by it")
    join.add_argument("code", metavar="CODE")
    remove = group.command("remove", "trust a host no longer")
    remove.add_argument("host", metavar="HOST", help="its name or UUID")
    revoke = group.command("revoke", "make a key count no more, and what it signed")
    revoke.add_argument("key", metavar="KEY", help="its id")
    group.command("rotate", "give this host new keys, and tell the hosts that trust it")
    for name, about in (
        ("export", "write the signed trust document"),
        ("import", "take over a trust document that a fleet's root keys have signed"),
    ):
        verb = group.command(name, about)
        verb.add_argument("file", metavar="FILE", help="- for standard input or output")
        if name == "import":
            verb.add_argument(
                "--roots",
                metavar="ID,...",
                help="the root keys of a fleet, in the place of this host's own",
            )


def _checkpoints(group: _Group) -> None:
    create = group.command("create", "take a checkpoint of a function, which computes on")
    create.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    create.add_argument("--label", metavar="NAME", help="what it is called (default: its number)")
    create.add_argument("--parent", metavar="NAME", help="hold only what changed since that one")
    create.add_argument(
        "--follow", action="store_true", default=None, help="so that the next can continue this"
    )
    create.add_argument("--zstd", action="store_true", default=None, help="compress it")
    create.add_argument("--seal-for", metavar="HOST", help="encrypt it for this host alone")
    create.add_argument(
        "--keep", type=count, metavar="N", help="automatic ones of this function to keep"
    )
    listed = group.command("list", "list the checkpoints on this host, the newest last")
    listed.add_argument("function", metavar="FUNCTION", nargs="?", help="only of this one")
    for name, about in (
        ("show", "verify a checkpoint, and show what it is"),
        ("verify", "verify a checkpoint, or a file with one"),
        ("restore", "load a checkpoint into its function"),
        ("export", "write a copy of a checkpoint into a file"),
        ("delete", "delete a checkpoint"),
    ):
        verb = group.command(name, about)
        target = "NAME|FILE" if name == "verify" else "NAME"
        verb.add_argument("checkpoint", metavar=target, help="as it is listed")
        if name == "verify":
            verb.add_argument(
                "--trust", metavar="FILE", help="a trust document: no daemon is needed then"
            )
        if name == "restore":
            verb.add_argument("function", metavar="FUNCTION", nargs="?", help="default: its own")
            verb.add_argument(
                "--rollback", action="store_true", default=None, help="also an older one"
            )
        if name == "export":
            verb.add_argument("file", metavar="FILE", help="- for standard output")
            verb.add_argument("--for", dest="host", metavar="HOST", help="who may load it")
    verb = group.command("import", "verify a checkpoint that another host made for this one")
    verb.add_argument("file", metavar="FILE")
    verb.add_argument("--label", metavar="NAME", help="what it is called here")


def _watermarks(group: _Group) -> None:
    _watermark_keys(group.noun("key", "keys of owners on this host", "deed"))
    verb = group.command("tensors", "list what of a function could be a marked layer")
    verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    verb = group.command("register", "name a tensor of a function as the marked layer of a model")
    verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    verb.add_argument("model", metavar="MODEL", help="its owner's name for it")
    verb.add_argument("handle", metavar="HANDLE", help="of the tensor, as tensors lists it")
    verb.add_argument("key", metavar="KEY", help="the key's id")
    verb = group.command("unregister", "look for a model no more")
    verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    verb.add_argument("model", metavar="MODEL")
    verb = group.command("list", "list the models that are looked for")
    verb.add_argument("function", metavar="FUNCTION", nargs="?", help="only of this one")
    verb = group.command("check", "look for a function's models now")
    verb.add_argument("function", metavar="FUNCTION", help="its name or UUID")
    verb.add_argument("--nonce", metavar="HEX", help="32 digits of whoever asks")
    for name, about in (
        ("embed", "mark a layer in a file, without a daemon"),
        ("look", "look for a mark in a file, without a daemon"),
    ):
        verb = group.command(name, about)
        verb.add_argument("source", metavar="FILE", help=".npz or .npy")
        if name == "embed":
            verb.add_argument("target", metavar="OUTPUT", help=".npz")
            verb.add_argument("--margin", type=margin, metavar="N", help="how strong (default: 16)")
        verb.add_argument("--model", required=True, metavar="NAME", help="its owner's name for it")
        verb.add_argument("--key", required=True, metavar="FILE", help="the owner's key")
        verb.add_argument("--array", metavar="NAME", help="which layer (default: the largest)")


def _watermark_keys(group: _Group) -> None:
    verb = group.command("create", "make a key, on this host or in a file")
    verb.add_argument("--file", metavar="FILE", help="in this file; no daemon is needed then")
    verb = group.command("import", "keep a key on this host")
    verb.add_argument("file", metavar="FILE", help="- for standard input")
    for name, about in (
        ("export", "write a key, which is a secret, into a file"),
        ("remove", "forget a key"),
    ):
        verb = group.command(name, about)
        verb.add_argument("key", metavar="KEY", help="its id")
        if name == "export":
            verb.add_argument("file", metavar="FILE", help="- for standard output")
    group.command("list", "list the ids of the keys on this host")


def _vms(group: _Group) -> None:
    group.command("list", "list the VMs")
    _define(group.command("define", "define a VM from a few options or from an XML file"))
    for name, about in (
        ("show", "show one VM"),
        ("xml", "print a VM's XML"),
        ("prepare", "make a VM that exists ready for functions"),
        ("start", "start a VM"),
        ("stop", "ask the guest to power off, and wait for it"),
        ("suspend", "pause a VM"),
        ("resume", "let a paused VM go on"),
        ("reboot", "ask the guest to reboot"),
        ("reset", "reset a VM, as its reset button would"),
        ("destroy", "end a VM at once"),
        ("undefine", "forget a VM's definition"),
        ("console", "say how to reach a VM's console"),
    ):
        verb = group.command(name, about)
        verb.add_argument("domain", metavar="VM", help="its name or UUID")
        if name == "stop":
            verb.add_argument(
                "--timeout",
                type=seconds,
                default=60.0,
                metavar="SECONDS",
                help="how long to wait (default: 60)",
            )
        if name == "prepare":
            verb.add_argument(
                "--hotplug-ports", type=int, metavar="N", help="spare root ports (default: 4)"
            )
            verb.add_argument(
                "--dry-run", action="store_true", default=None, help="only print the XML"
            )
        if name == "xml":
            verb.add_argument("--live", action="store_true", help="of the running VM")


def _define(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="NAME", nargs="?", help="the VM's name (without --xml)")
    verb.add_argument("--xml", metavar="FILE", help="take this definition (- for standard input)")
    verb.add_argument("--memory", type=size, default=1 << 30, help="default: 1GiB")
    verb.add_argument("--vcpus", type=int, help="default: 1")
    verb.add_argument(
        "--disk",
        metavar="IMAGE[,readonly]",
        action="append",
        help="qcow2 or raw; read-only ones can be shared; repeatable",
    )
    verb.add_argument("--kernel", metavar="FILE", help="boot this kernel directly")
    verb.add_argument("--initrd", metavar="FILE")
    verb.add_argument("--cmdline", metavar="TEXT", help="of the kernel")
    verb.add_argument("--network", metavar="NAME", help="a libvirt network")
    verb.add_argument("--machine", help="default: q35")
    verb.add_argument("--accelerator", choices=("auto", "kvm", "tcg"), help="default: auto")
    verb.add_argument(
        "--hotplug-ports", type=int, metavar="N", help="for functions to come (default: 4)"
    )
    verb.add_argument("--iommu", action="store_true", default=None, help="an emulated IOMMU")
    verb.add_argument("--console-log", metavar="FILE", help="a copy of the serial console")
    verb.add_argument("--uuid", help="default: libvirt chooses")
    verb.add_argument("--dry-run", action="store_true", default=None, help="only print the XML")


_NOUNS: tuple[tuple[str, str, Callable[[_Group], None]], ...] = (
    ("host", "this host", _host),
    ("card", "accelerator cards", _cards),
    ("function", "accelerator functions", _functions),
    ("vm", "virtual machines (libvirt domains)", _vms),
    ("migration", "migrations of this host", _migrations),
    ("trust", "hosts that trust each other with functions", _trust),
    ("checkpoint", "checkpoints of functions", _checkpoints),
    ("watermark", "owners' marks in models", _watermarks),
)
