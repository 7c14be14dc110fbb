"""The guest image: kernel, a tiny initial RAM file system, and a squashed Debian root.

A guest must be ready in seconds although every instruction is emulated, so there is no systemd in
it: busybox init starts QEMU's guest agent and a shell. For the same reason its kernel is unpacked
here, and QEMU enters it as it is (PVH). Its root is an overlay of the *base* (dear,
rarely built), the *layer* (the files of the accelvisor-guest package, built in about a second), and
memory; both squashed disks are read-only and shared by all guests of a host.
"""

from __future__ import annotations

import lzma
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from accelvisor.errors import SystemFailure
from accelvisor.lab import apt, cache, images
from accelvisor.lab.cpio import Archive
from accelvisor.lab.process import die_with_parent, in_private_mounts, run
from accelvisor.lab.progress import Progress, run_logged

_EDITION = "4"
_DATA = Path(__file__).parent / "data"

PACKAGES = (
    "busybox-static",
    "iproute2",
    "kmod",
    "pciutils",
    "python3-numpy",
    "python3-minimal",
    "qemu-guest-agent",
)
KERNEL = "linux-image-cloud-amd64"
# What the initial RAM file system needs beyond the drivers that are built into that kernel.
MODULES = ("overlay", "squashfs", "virtio_blk")
# Never read in a guest; together they would triple the time to squash.
EXCLUDED = (
    "boot",
    "usr/lib/apt",
    "usr/lib/python3/dist-packages/numpy/*/tests",
    "usr/lib/python3/dist-packages/numpy/f2py",
    "usr/lib/python3.13/idlelib",
    "usr/lib/python3.13/test",
    "usr/lib/systemd",
    "usr/lib/udev",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl-base",
    "usr/lib/x86_64-linux-gnu/systemd",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl5",
    "usr/share/zoneinfo",
    "var/cache/*",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/log/*",
)
_BUSYBOX_LINKS = ("cat", "echo", "insmod", "ls", "mkdir", "mount", "sh", "switch_root")
# lz4 costs the emulated processor least; the disk is small either way.
_SQUASH = ("-comp", "lz4", "-b", "131072", "-noappend", "-no-progress", "-all-root", "-quiet")


def base_key() -> str:
    """Changes when kernel, initial RAM file system and base must be built anew."""
    data = cache.digest_tree(_DATA, list(_DATA.iterdir()))
    return cache.digest(
        _EDITION, images.base_key(), data, KERNEL, *PACKAGES, "|", *MODULES, "|", *EXCLUDED,
        *_SQUASH, *_BUSYBOX_LINKS,
    )  # fmt: skip


def guest(progress: Progress) -> Path:
    """A directory with ``vmlinux``, ``initrd.img`` and ``base.squashfs``."""

    def build(work: Path) -> None:
        root = images.grow(images.base(progress), work / "root", progress, "guest image")
        temporary = apt.configure(root, apt.mirror())
        images.install(root, progress, "guest image: Python, numpy, agent", PACKAGES)
        _add_kernel(root, progress)
        images.clean(root, temporary)
        _add_init(root)
        _take_kernel(root, work)
        _squash(root, work / "base.squashfs", progress, "guest image: squashing")
        shutil.rmtree(root)
        # Stands where the layer goes as long as nothing is installed.
        (work / "empty").mkdir()
        _squash(work / "empty", work / "empty.squashfs", progress, "guest image: empty layer")

    return cache.obtain("guest", base_key(), build)


def layer(package: Path, host_root: Path, progress: Progress) -> Path:
    """The second disk: the files of a .deb, with their byte code compiled for the guest's Python.

    ``host_root`` lends its Python, which is the guest's: compiling in the guest would cost seconds
    at every first import.
    """

    def build(work: Path) -> None:
        tree = work / "tree"
        run(["dpkg-deb", "--extract", str(package), str(tree)], timeout=60)
        compile_all = f"mount --bind {tree} {host_root}/mnt && chroot {host_root} " + (
            "python3 -m compileall -q -o 0 -s /mnt -p / --invalidation-mode unchecked-hash "
            "/mnt/usr/lib/python3/dist-packages"
        )
        run(in_private_mounts(["sh", "-c", compile_all]), timeout=120)
        _squash(tree, work / "layer.squashfs", progress, "guest layer: squashing")
        shutil.rmtree(tree)

    key = cache.digest(_EDITION, package.read_bytes(), *_SQUASH)
    return cache.obtain("layer", key, build) / "layer.squashfs"


def _add_kernel(root: Path, progress: Progress) -> None:
    """Unpack the kernel without installing it: its install would build an initramfs of 30 MB."""
    script = (
        # For _take_kernel alone, where the squashed root does not have it.
        "cd /tmp && apt-get download -o APT::Sandbox::User=root zstd &&"
        " dpkg-deb -x zstd_*.deb zstd && "
        f"name=$(apt-cache depends {KERNEL} | sed -n 's/.*Depends: \\(linux-image-[0-9].*\\)/\\1/p'"
        ' | head -n 1) && apt-get download -o APT::Sandbox::User=root "$name" &&'
        " dpkg-deb --fsys-tarfile linux-image-*.deb | tar -x --keep-directory-symlink -C / &&"
        ' rm *.deb && depmod "$(ls /usr/lib/modules)"'
    )
    with progress.step("guest image: kernel") as step:
        run_logged(
            images.chroot(root, ["sh", "-ec", script]), step=step, log=images.log_of("guest")
        )


def _add_init(root: Path) -> None:
    """Put the lab's init scripts in place."""
    home = root / "usr/lib/accelvisor-lab"
    home.mkdir()
    for name in ("start", "agent", "buttons"):
        _script(_DATA / f"guest-{name}.sh", home / name)
    _script(_DATA / "guest-shutdown.sh", root / "usr/sbin/shutdown")
    shutil.copyfile(_DATA / "guest-inittab", root / "etc/inittab")
    for name in ("init", "poweroff", "reboot", "halt", "acpid"):
        link = root / "usr/sbin" / name
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/bin/busybox")
    # What minimal Debian lacks and people type anyway: ps, kill, free, top, vi, less, ping.
    local = root / "usr/local/bin"
    for applet in run([str(root / "usr/bin/busybox"), "--list"], timeout=20).stdout.split():
        name = applet.decode()
        if not any((root / "usr" / place / name).exists() for place in ("bin", "sbin")):
            (local / name).symlink_to("/usr/bin/busybox")
    # busybox acpid runs this for the power button.
    power = root / "etc/acpi/PWRF"
    power.mkdir(parents=True)
    (power / "00000080").write_text("#!/bin/sh\nexec busybox poweroff\n", encoding="ascii")
    (power / "00000080").chmod(0o755)
    # No escape sequences around each prompt of the console's log.
    (root / "root/.inputrc").write_text("set enable-bracketed-paste off\n", encoding="ascii")
    (root / "etc/hostname").write_text("guest\n", encoding="ascii")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n", encoding="ascii")


def _script(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o755)


def _take_kernel(root: Path, work: Path) -> None:
    """The kernel, and the initial RAM file system made for it."""
    releases = sorted(path.name for path in (root / "usr/lib/modules").iterdir())
    if len(releases) != 1:
        raise SystemFailure(f"one kernel expected in the guest image, found {releases}")
    release = releases[0]
    packed = (root / f"boot/vmlinuz-{release}").read_bytes()
    (work / "vmlinux").write_bytes(unpacked(packed, lambda data: _unzstd(root, data)))
    shutil.rmtree(root / "tmp/zstd")
    (work / "initrd.img").write_bytes(initial_ram(root, root / "usr/lib/modules" / release))


def unpacked(kernel: bytes, unzstd: Callable[[bytes], bytes]) -> bytes:
    """The ELF file in a bzImage, by Linux' boot protocol (Documentation/arch/x86/boot.rst).

    Raises:
        SystemFailure: it is none, or packed in a way that is not known here.
    """
    if kernel[0x202:0x206] != b"HdrS":
        raise SystemFailure("the guest kernel is no bzImage", where="lab")
    setup = (kernel[0x1F1] or 4) * 512 + 512
    offset, length = struct.unpack_from("<II", kernel, 0x248)
    payload = kernel[setup + offset : setup + offset + length]
    # Behind what is packed stands its size.
    packed, size = payload[:-4], int.from_bytes(payload[-4:], "little")
    if packed.startswith(b"\x28\xb5\x2f\xfd"):
        found = unzstd(packed)
    elif packed.startswith(b"\xfd7zXZ\0"):
        found = lzma.decompress(packed)
    else:
        raise SystemFailure(f"the guest kernel is packed as {packed[:6].hex()}", where="lab")
    if len(found) != size or not found.startswith(b"\x7fELF"):
        raise SystemFailure("the guest kernel does not unpack to an ELF file", where="lab")
    return found


def _unzstd(root: Path, data: bytes) -> bytes:
    argv = images.chroot(root, ["/tmp/zstd/usr/bin/zstd", "-dc"])
    return run(argv, input=data, timeout=60).stdout


def initial_ram(root: Path, modules: Path) -> bytes:
    """busybox, the few modules, and the script that mounts the root."""
    archive = Archive()
    for name in ("bin", "dev", "proc", "sys", "base", "layer", "memory", "root", "modules"):
        archive.directory(name)
    archive.character_device("dev/console", 5, 1)
    archive.file("bin/busybox", (root / "usr/bin/busybox").read_bytes(), executable=True)
    for name in _BUSYBOX_LINKS:
        archive.symlink(f"bin/{name}", "busybox")
    for number, path in enumerate(load_order(modules, MODULES)):
        content = path.read_bytes()
        plain = lzma.decompress(content) if path.suffix == ".xz" else content
        stem = path.name.split(".")[0]
        archive.file(f"modules/{number:02}-{stem}.ko", plain)
    archive.file("init", (_DATA / "initramfs-init.sh").read_bytes(), executable=True)
    # Not compressed: unpacking would cost the emulated processor more than loading does.
    return archive.finish()


def load_order(modules: Path, wanted: tuple[str, ...]) -> list[Path]:
    """The files of the wanted modules, each after those it depends on."""
    depends: dict[str, tuple[str, list[str]]] = {}
    for line in (modules / "modules.dep").read_text(encoding="ascii").splitlines():
        path, _, rest = line.partition(":")
        name = path.rpartition("/")[2].split(".")[0].replace("-", "_")
        depends[name] = (path, rest.split())
    order: list[Path] = []
    for name in wanted:
        if name not in depends:
            raise SystemFailure(f"the guest kernel has no module {name}", where="lab")
        path, needs = depends[name]
        # modules.dep lists the nearest dependency first.
        order += [modules / need for need in reversed(needs)] + [modules / path]
    return list(dict.fromkeys(order))


def _squash(tree: Path, target: Path, progress: Progress, what: str) -> None:
    excluded = ["-wildcards", "-e", *EXCLUDED]
    argv = ["mksquashfs", str(tree), str(target), *_SQUASH, *excluded]
    with progress.step(what) as step:
        run_logged(die_with_parent(argv), step=step, log=images.log_of("guest"))
