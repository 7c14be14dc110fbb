"""``python -m accelvisor.lab``: the laboratory from a shell."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from accelvisor.errors import AccelvisorError, CallerError, NotFoundError, UnavailableError
from accelvisor.lab import (
    cache,
    guestimage,
    images,
    laboratory,
    package,
    requirements,
    state,
    takedown,
)
from accelvisor.lab.domain import DomainSpec
from accelvisor.lab.host import LabHost
from accelvisor.lab.laboratory import Laboratory
from accelvisor.lab.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        return _demo(words[1:])
    options = _parser().parse_args(words)
    # Ended by `timeout` or a service manager, it still cleans up.
    signal.signal(signal.SIGTERM, _terminate)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except AccelvisorError as error:
        hint = f"\n  hint: {error.hint}" if error.hint else ""
        print(f"error [{error.code}]: {error.message}{hint}", file=sys.stderr)
        return 2 if isinstance(error, CallerError) else 3
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads has had enough (`| head`). Nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accelvisor.lab",
        description="Real hosts with systemd, libvirt, QEMU and accelvisor on this one machine.",
        epilog="The laboratory meant is ACCELVISOR_LAB_NAME, by default one of this tree's own.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    up = add("up", _up, "build what is missing, boot the hosts, install this tree's packages")
    up.add_argument("--hosts", type=int, default=1, help="how many (default 1)")
    up.add_argument("--bare", action="store_true", help="do not install accelvisor")
    down = add("down", _down, "take the laboratory away, and your abandoned ones")
    down.add_argument("--all", action="store_true", help="every laboratory of this source tree")
    down.add_argument("--abandoned", action="store_true", help="only those left by the dead")
    add("status", _status, "what runs here")
    add("build", _build, "build and cache the images and packages, boot nothing")
    deb = add("deb", _deb, "build the Debian packages")
    deb.add_argument("--output", type=Path, default=Path("dist"), help="where to (default dist)")
    add("clean", _clean, "take this tree's laboratories down and delete the cache")
    commands.add_parser("demo", help="the demonstration (its own options: demo --help)")

    execute = add("exec", _exec, "run a command on a host: exec host1 -- virsh list --all")
    execute.add_argument("host")
    execute.add_argument("words", nargs="+", metavar="CMD")
    shell = add("shell", _shell, "a root shell on a host")
    shell.add_argument("host", nargs="?", default="host1")
    boot = add("boot", _boot, "define and boot a guest: boot host1 vm1 --memory 512")
    boot.add_argument("host")
    boot.add_argument("domain")
    boot.add_argument("--memory", type=int, default=256, metavar="MIB")
    boot.add_argument("--iommu", action="store_true", help="with an emulated IOMMU")
    guest = add("guest", _guest, "run a command in a guest: guest host1 vm1 -- lspci")
    guest.add_argument("host")
    guest.add_argument("domain")
    guest.add_argument("words", nargs="+", metavar="CMD")
    guest.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    return parser


def _up(options: argparse.Namespace) -> int:
    began = time.monotonic()
    progress = Progress()
    lab = Laboratory(options.hosts, persistent=True, install=not options.bare, progress=progress)
    lab.up()
    names = ", ".join(f"{host.name} ({host.address})" for host in lab.hosts)
    progress.say(f"laboratory {lab.name}: {names}, up in {time.monotonic() - began:.1f} s")
    return 0


def _down(options: argparse.Namespace) -> int:
    takedown.reap(Progress())
    if options.abandoned:
        return 0
    for name in _own() if options.all else [laboratory.chosen_name()]:
        if takedown.remove(name):
            print(f"laboratory {name}: taken down", file=sys.stderr)
    return 0


def _own() -> list[str]:
    found = [state.load(name) for name in state.names()]
    return [each.name for each in found if each is not None and each.mine]


def _status(options: argparse.Namespace) -> int:
    for item in requirements.missing():
        print(f"missing: {item.what} ({item.remedy})")
    for name in state.names():
        found = state.load(name)
        if found is None:
            continue
        owner = "persistent" if found.owner is None else f"owned by process {found.owner.pid}"
        owner = "abandoned" if found.abandoned else owner
        print(f"laboratory {name}: {owner}, packages {found.package or 'not installed'}")
        if not found.mine:
            print(f"  of user {found.uid}, from {found.tree}")
        for record in found.hosts:
            alive = record.leader is not None and record.leader.alive()
            print(f"  host{record.index}: {'running' if alive else 'dead'}")
    print(f"cache: {cache.root()}")
    for kind, key in (
        ("base", images.base_key()),
        ("host", images.host_key()),
        ("guest", guestimage.base_key()),
        ("deb", package.key()),
    ):
        print(f"  {kind}: {'built' if cache.find(kind, key) else 'to be built'}")
    return 0


def _build(options: argparse.Namespace) -> int:
    requirements.require()
    progress = Progress()
    image = images.host(progress)
    guestimage.guest(progress)
    built = package.build(progress)
    guestimage.layer(package.package(built, package.GUEST), image, progress)
    return 0


def _deb(options: argparse.Namespace) -> int:
    built = package.build(Progress())
    options.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(built.glob("*.deb")):
        shutil.copyfile(path, options.output / path.name)
        print(options.output / path.name)
    return 0


def _clean(options: argparse.Namespace) -> int:
    takedown.clean(Progress())
    return 0


def _host(name: str) -> LabHost:
    lab = Laboratory.attach()
    for host in lab.hosts:
        if host.name == name:
            return host
    known = ", ".join(host.name for host in lab.hosts)
    raise NotFoundError(f"no host {name!r} in the laboratory", where="lab", hint=f"hosts: {known}")


def _exec(options: argparse.Namespace) -> int:
    argv = _host(options.host).enter(options.words)
    os.execvp(argv[0], argv)


def _shell(options: argparse.Namespace) -> int:
    term = {"TERM": os.environ.get("TERM", "dumb")}
    argv = _host(options.host).enter(["bash", "--login"], term)
    os.execvp(argv[0], argv)


def _boot(options: argparse.Namespace) -> int:
    host = _host(options.host)
    spec = DomainSpec(options.domain, memory_mib=options.memory, iommu=options.iommu)
    with Progress().step(f"{host.name}: booting guest {options.domain}"):
        host.boot_guest(spec)
    return 0


def _guest(options: argparse.Namespace) -> int:
    guest = _host(options.host).guest(options.domain)
    result = guest.run(options.words, timeout=options.timeout, check=False)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.returncode


def _demo(words: list[str]) -> int:
    """The demonstration is a module of its own, of which only ``main(words) -> int`` is known."""
    try:
        module = importlib.import_module("accelvisor.lab.demo")
    except ModuleNotFoundError as error:
        missing = UnavailableError(f"no demonstration in this tree: {error}", where="lab")
        print(f"error [{missing.code}]: {missing.message}", file=sys.stderr)
        return 3
    return int(module.main(words))
