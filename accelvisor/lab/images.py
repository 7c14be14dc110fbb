"""The host image: a Debian 13 with systemd, libvirt and QEMU, as a directory to boot from.

Two steps, each cached by its own recipe: the *base* (debootstrap) is shared with the guest image.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from accelvisor.errors import SystemFailure
from accelvisor.lab import apt, cache, tree
from accelvisor.lab.process import in_private_mounts
from accelvisor.lab.progress import Progress, apt_percent, counted, run_logged

# Raised to rebuild an image when what it should be has changed but no line of its recipe has.
_BASE_EDITION = "1"
_HOST_EDITION = "3"

# libvirt and QEMU as a Debian user installs them; from backports, since vfio-user-pci needs
# QEMU 10.1. Without recommended packages: no graphics, no sound, no network boot.
BACKPORTS = (
    "libvirt-clients",
    "libvirt-daemon-system",
    "qemu-system-x86",
    "qemu-utils",
)
# What makes it a host, and tools of the laboratory and its tests; apparmor compiles profiles that
# no kernel here loads. No Python module is among them, and nothing for accelvisor's sake: that
# comes from the Depends of debian/control (``depends``), so that `dpkg -i` of the packages proves
# them.
PACKAGES = (
    "apparmor",
    "iproute2",
    "libpam-systemd",
    "man-db",
    "procps",
    "systemd",
    "systemd-sysv",
)
# Timers that would wake up in the middle of a test and ask a network that is not there.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "logrotate.timer",
    "systemd-networkd-wait-online.service",
)
# A container has no AppArmor, no /dev to fill per VM, and here no cgroup controllers.
QEMU_CONF = """
# accelvisor laboratory: what a container cannot give to libvirt
security_driver = "none"
namespaces = []
cgroup_controllers = []
"""
# Two lab hosts migrate to each other over TCP inside a network that nothing else can reach.
LIBVIRTD_CONF = """
# accelvisor laboratory: a network of its own, no one else on it
auth_tcp = "none"
"""
_DEBOOTSTRAP_LINES = 416
_EXCLUDED = """\
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
force-unsafe-io
"""


def base_key() -> str:
    """Changes when the base must be built anew."""
    return cache.digest(_BASE_EDITION, apt.SUITE, _EXCLUDED)


def host_key() -> str:
    """Changes when the host image must be built anew."""
    lists = (*BACKPORTS, "|", *PACKAGES, "|", *depends(), "|", *MASKED)
    parts = (*lists, QEMU_CONF, LIBVIRTD_CONF)
    return cache.digest(_HOST_EDITION, base_key(), *parts)


def depends() -> tuple[str, ...]:
    """What this tree's own packages depend on; on a host that is no place else they come from."""
    control = (tree.repository() / "debian/control").read_text(encoding="utf-8")
    return tree.runtime_depends(control)


def base(progress: Progress) -> Path:
    """The minimal Debian root that both images grow from."""

    def build(work: Path) -> None:
        address = apt.mirror()
        argv = ["debootstrap", "--variant=minbase", apt.SUITE, str(work / "root"), address]
        with progress.step(f"base image: debootstrap {apt.SUITE}") as step:
            env = {**os.environ, **apt.proxy_environment()}
            percent = counted("I: ", _DEBOOTSTRAP_LINES)
            run_logged(
                in_private_mounts(argv), step=step, log=log_of("base"), env=env, percent=percent
            )
            (work / "root/etc/dpkg/dpkg.cfg.d/accelvisor-lab").write_text(_EXCLUDED)
            # debootstrap leaves the lists of its one suite: apt would take them for complete.
            _empty(work / "root/var/lib/apt/lists")
            _empty(work / "root/var/cache/apt/archives")

    return cache.obtain("base", base_key(), build) / "root"


def host(progress: Progress) -> Path:
    """The root directory of the host image."""

    def build(work: Path) -> None:
        root = grow(base(progress), work / "root", progress, "host image")
        temporary = apt.configure(root, apt.mirror())
        install(root, progress, "host image: libvirt and QEMU", BACKPORTS, backports=True)
        install(root, progress, "host image: systemd and tools", PACKAGES)
        # apt has no network later: what the packages need is there before they come.
        install(root, progress, "host image: what the packages depend on", depends())
        _settle(root)
        clean(root, temporary)

    return cache.obtain("host", host_key(), build) / "root"


def log_of(kind: str) -> Path:
    """Where the output of a build goes."""
    logs = cache.root() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{kind}.log"


def grow(source: Path, root: Path, progress: Progress, name: str) -> Path:
    """A copy of the base for an image to be made of."""
    with progress.step(f"{name}: copying the base") as step:
        argv = ["cp", "--archive", "--reflink=auto", str(source), str(root)]
        run_logged(argv, step=step, log=log_of(name.split()[0]))
    return root


def chroot(root: Path, argv: list[str]) -> list[str]:
    """A command inside an image under construction, leaving no mount and no process behind."""
    env = ["env", "-i", "PATH=/usr/sbin:/usr/bin", "LC_ALL=C.UTF-8", "HOME=/root"]
    inside = ["chroot", str(root), *env, "DEBIAN_FRONTEND=noninteractive", *argv]
    return in_private_mounts(inside, proc=root / "proc")


def install(
    root: Path, progress: Progress, what: str, packages: tuple[str, ...], *, backports: bool = False
) -> None:
    """apt-get install in the image, with apt's own percentage."""
    log = log_of(what.split()[0])
    suite = ["--target-release", f"{apt.SUITE}-backports"] if backports else []
    options = ["--yes", "--no-install-recommends", "--option", "APT::Status-Fd=1"]
    with progress.step(what) as step:
        if not any((root / "var/lib/apt/lists").glob("*Packages*")):
            run_logged(chroot(root, ["apt-get", "update"]), step=step, log=log)
        argv = ["apt-get", "install", *options, *suite, *packages]
        run_logged(chroot(root, argv), step=step, log=log, percent=apt_percent)


def _settle(root: Path) -> None:
    """Settings of the host image; what differs from host to host is added when one boots."""
    units = root / "etc/systemd/system"
    for unit in MASKED:
        (units / unit).symlink_to("/dev/null")
    wants = units / "sockets.target.wants"
    wants.mkdir(exist_ok=True)
    tcp = wants / "libvirtd-tcp.socket"
    if not tcp.is_symlink():
        tcp.symlink_to("/usr/lib/systemd/system/libvirtd-tcp.socket")
    for name, text in (("qemu.conf", QEMU_CONF), ("libvirtd.conf", LIBVIRTD_CONF)):
        with (root / "etc/libvirt" / name).open("a", encoding="utf-8") as sink:
            sink.write(text)
    # Without a locale systemd asks for one on the console of the first boot.
    (root / "etc/locale.conf").write_text("LANG=C.UTF-8\n", encoding="utf-8")
    # An index of manual pages would be built at each installation.
    (root / "var/lib/man-db/auto-update").unlink(missing_ok=True)
    # From here on a package is installed with its documentation, as a user would have it.
    (root / "etc/dpkg/dpkg.cfg.d/accelvisor-lab").unlink()
    # Newer than everything in /usr: the first boot has no caches to rebuild.
    for stamp in ("etc/.updated", "var/.updated"):
        (root / stamp).touch()


def clean(root: Path, temporary: list[Path]) -> None:
    """Take out of an image what belonged to this machine or only to its building."""
    # debootstrap copies the resolver and the host name by itself.
    copied = [root / "etc/resolv.conf", root / "etc/hostname", root / "var/log/bootstrap.log"]
    for path in [*temporary, *copied]:
        path.unlink(missing_ok=True)
    _empty(root / "var/cache/apt/archives")
    _empty(root / "var/lib/apt/lists")
    # An empty file makes systemd pick an identity; each lab host gets one of its own.
    (root / "etc/machine-id").write_text("", encoding="ascii")
    for path in (root / "etc").glob("ssl/private/*"):
        path.unlink()


def _empty(directory: Path) -> None:
    if not directory.is_dir():
        raise SystemFailure(f"not an image: {directory} is missing", where="lab")
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
