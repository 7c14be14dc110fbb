"""The laboratory's parts that need no root: sources, caches, archives, identities."""

from __future__ import annotations

import contextlib
import lzma
import os
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from accelvisor.errors import ConflictError, DeadlineError, SystemFailure, UsageError
from accelvisor.lab import apt, cache, images, process, state, takedown, tree
from accelvisor.lab.cpio import Archive
from accelvisor.lab.domain import DomainSpec
from accelvisor.lab.guestimage import load_order, unpacked
from accelvisor.lab.process import ProcessId
from accelvisor.lab.progress import Progress, apt_percent, counted, run_logged

DEB822 = """\
Types: deb
# a comment in between
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
 contrib

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: trixie
Components: main
"""
ONE_LINE = """\
# deb http://commented.example/debian trixie main
deb [signed-by=/x arch=amd64] https://third.example/debian trixie stable
deb http://one.example/debian/ trixie main contrib # why
deb-src http://source.example/debian trixie main
"""


def test_sources_in_both_formats() -> None:
    assert [(s.uri, s.suites, s.components) for s in apt.parse_deb822(DEB822)] == [
        ("http://mirror.example/debian", ("bookworm", "bookworm-updates"), ("main",)),
        ("http://mirror.example/debian-security", ("bookworm-security",), ("main", "contrib")),
    ]
    assert [(s.uri, s.components) for s in apt.parse_one_line(ONE_LINE)] == [
        ("https://third.example/debian", ("stable",)),
        ("http://one.example/debian/", ("main", "contrib")),
    ]


def test_the_mirror_is_the_debian_archive_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/a.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d/b.sources").write_text(DEB822)
    (tmp_path / "sources.list.d/c.list.disabled").write_text("deb http://no.example x main")
    assert apt.choose_mirror(apt.machine_sources(tmp_path)) == "http://one.example/debian"
    assert apt.choose_mirror([]) is None


def test_a_cloud_image_names_its_mirror_in_a_file(tmp_path: Path) -> None:
    listing = tmp_path / "mirrors.list"
    listing.write_text("# comment\nhttp://cloud.example/debian\n")
    source = apt.Source(f"mirror+file:{listing}", ("trixie",), ("main",))
    assert apt.choose_mirror([source]) == "http://cloud.example/debian"
    listing.unlink()
    assert apt.choose_mirror([source]) == apt.PUBLIC_MIRROR


def test_a_cached_thing_is_built_once_and_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(tmp_path))
    built = []

    def build(work: Path) -> None:
        built.append(work)
        (work / "content").write_text("x")

    def fail(work: Path) -> None:
        (work / "half").write_text("")
        raise SystemFailure("no")

    key = cache.digest("one")
    with pytest.raises(SystemFailure):
        cache.obtain("thing", key, fail)
    assert cache.find("thing", key) is None
    first = cache.obtain("thing", key, build)
    assert cache.obtain("thing", key, build) == first
    assert len(built) == 1
    assert (first / "content").read_text() == "x"
    # What a builder left that was killed (no such process) goes with the next build.
    left = tmp_path / ".build-thing-1-1"
    left.mkdir()
    cache.obtain("thing", cache.digest("two"), build)
    assert not left.exists()
    for word in ("one", "two", "three"):
        cache.obtain("host", cache.digest(word), build)
    assert len(list(tmp_path.glob("host-*"))) == 2


def test_a_digest_tells_lists_of_parts_apart() -> None:
    assert cache.digest("ab", "c") != cache.digest("a", "bc")
    assert cache.digest("a", "") != cache.digest("a")


def test_cpio_as_the_tool_of_that_name_reads_it(tmp_path: Path) -> None:
    archive = Archive()
    archive.directory("bin")
    archive.file("bin/program", b"#!/bin/sh\n", executable=True)
    archive.symlink("bin/other", "program")
    listing = subprocess.run(
        [sys.executable, "-c", _READ_CPIO], input=archive.finish(), capture_output=True, check=True
    ).stdout.decode()
    assert listing.splitlines() == [
        "bin 40755 0 ",
        "bin/program 100755 10 #!/bin/sh",
        "bin/other 120777 7 program",
    ]


# An independent reader, written from the format's description: fields by position, 4-aligned.
_READ_CPIO = """
import sys
data, at = sys.stdin.buffer.read(), 0
while True:
    head = data[at:at + 110]
    assert head[:6] == b"070701" and at % 4 == 0
    mode, size, length = (int(head[6 + 8 * i:14 + 8 * i], 16) for i in (1, 6, 11))
    name = data[at + 110:at + 110 + length - 1].decode()
    body = (at + 110 + length + 3) & ~3
    if name == "TRAILER!!!":
        break
    print(name, f"{mode:o}", size, data[body:body + size].decode().strip())
    at = (body + size + 3) & ~3
"""


def test_modules_load_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/a/lone.ko.xz:\nkernel/b/top-one.ko: kernel/b/mid.ko kernel/b/low.ko\n"
        "kernel/b/mid.ko: kernel/b/low.ko\nkernel/b/low.ko:\n"
    )
    order = [path.name for path in load_order(tmp_path, ("mid", "top_one", "lone"))]
    assert order == ["low.ko", "mid.ko", "top-one.ko", "lone.ko.xz"]
    with pytest.raises(SystemFailure, match="absent"):
        load_order(tmp_path, ("absent",))


def bzimage(payload: bytes, size: int, setup_sectors: int = 2) -> bytes:
    """By the boot protocol: set-up sectors, then code, then what is packed and its size."""
    head = bytearray((setup_sectors + 1) * 512)
    head[0x1F1] = setup_sectors
    head[0x202:0x206] = b"HdrS"
    packed = payload + size.to_bytes(4, "little")
    head[0x248:0x250] = (64).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    return bytes(head) + bytes(64) + packed + b"what follows"


def test_a_kernel_is_unpacked_whole_or_not_at_all() -> None:
    plain = b"\x7fELF" + bytes(range(256)) * 40
    packed = lzma.compress(plain)
    told: list[bytes] = []

    def take(data: bytes) -> bytes:
        told.append(data)
        return plain

    assert unpacked(bzimage(packed, len(plain)), lambda data: b"") == plain
    zstd = b"\x28\xb5\x2f\xfd and so on"
    assert unpacked(bzimage(zstd, len(plain)), take) == plain
    assert told == [zstd]
    other = b"\x02!L\x18" + bytes(60)
    for image in (
        bytes(4096),
        bzimage(packed, len(plain) + 1),
        bzimage(lzma.compress(bytes(9)), 9),
        bzimage(other, 9),
    ):
        with pytest.raises(SystemFailure, match="guest kernel"):
            unpacked(image, lambda data: b"")


def test_a_pid_that_was_reused_is_another_process() -> None:
    own = ProcessId.own()
    assert own.alive()
    other = ProcessId(own.pid, own.started + 1)
    assert not other.alive()
    # Ending "it" reports success and harms nobody.
    assert other.end(deadline_s=1)
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = ProcessId.of(child.pid)
        assert identity is not None
        assert identity.end(deadline_s=5)
    assert not identity.alive()
    assert ProcessId.of(child.pid) is None


def test_a_process_is_ended_by_whoever_has_a_thousand_descriptors_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, subprocess.Popen(["sleep", "60"]) as child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (fd := os.open("/dev/null", os.O_RDONLY)) < 1024:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        identity = ProcessId.of(child.pid)
        assert identity is not None
        assert identity.end(deadline_s=60)


def test_commands_past_their_timeout_go_with_their_children() -> None:
    with pytest.raises(DeadlineError):
        process.run(["sh", "-c", "sleep 61 & sleep 61"], timeout=0.3)
    left = subprocess.run(["pgrep", "-fx", "sleep 61"], capture_output=True, check=False)
    assert left.stdout == b""


def test_a_state_file_survives_damage(lab_run: Path) -> None:
    saved = state.LabState("x", ProcessId.own(), [state.HostState(1, ProcessId.own())], "deb-1")
    saved.save()
    assert state.load("x") == saved
    assert not saved.abandoned
    (lab_run / "x/state.json").write_text('{"owner": 7}')
    damaged = state.load("x")
    assert damaged is not None
    assert damaged.abandoned
    assert state.load("y") is None
    assert state.names() == ["x"]
    damaged.forget()
    assert state.names() == []


def test_each_tree_and_user_has_a_default_laboratory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {tree.default_name()}
    monkeypatch.setenv("SUDO_UID", "4711")
    names.add(tree.default_name())
    monkeypatch.setattr(tree, "repository", lambda: Path("/home/other/accelvisor"))
    names.add(tree.default_name())
    assert len(names) == 3
    assert {state.checked_name(name) for name in names} == names


@pytest.mark.parametrize("what", ["tree", "uid"])
def test_down_and_clean_leave_somebody_elses_laboratory_alone(
    lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Progress, what: str
) -> None:
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    other = state.LabState("other", None)
    setattr(other, what, {"tree": "/home/other/accelvisor", "uid": 4711}[what])
    other.save()
    assert state.load("other") == other
    with pytest.raises(ConflictError) as caught:
        takedown.remove("other")
    assert caught.value.code == "lab-foreign"
    with pytest.raises(ConflictError) as caught:
        takedown.clean(quiet)
    assert caught.value.code == "lab-cache-in-use"
    assert "other" in caught.value.message
    assert state.load("other") == other
    # On another cache it is in nobody's way.
    other.cache = str(tmp_path / "elsewhere")
    other.save()
    takedown.clean(quiet)
    assert state.load("other") == other
    assert not (tmp_path / "cache").exists()


def test_clean_waits_for_no_builder_and_refuses(
    lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Progress
) -> None:
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(tmp_path))
    own = ProcessId.own()
    building = tmp_path / f".build-host-{own.pid}-{own.started}"
    building.mkdir()
    with pytest.raises(ConflictError, match=str(own.pid)):
        takedown.clean(quiet)
    assert building.exists()
    cache.sweep()
    assert building.exists()


def test_clean_leaves_own_laboratories_on_another_cache_alone(
    lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Progress
) -> None:
    running = state.LabState("own", None)
    running.save()
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(tmp_path / "cache"))
    takedown.clean(quiet)
    assert state.load("own") == running


def test_clean_refuses_while_a_test_run_of_this_tree_has_a_laboratory(
    lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Progress
) -> None:
    monkeypatch.setenv("ACCELVISOR_LAB_CACHE", str(tmp_path / "cache"))
    state.LabState("p1", ProcessId.own()).save()
    with pytest.raises(ConflictError, match="p1"):
        takedown.clean(quiet)


def test_a_lock_whose_file_went_with_its_laboratory_locks_nothing(
    lab_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_LOCK_S", 0.2)
    with state.locked("x"):
        state.forget_lock("x")
        # The one who comes now makes a new file, and holds the lock of that.
        with state.locked("x"), pytest.raises(ConflictError), state.locked("x"):
            pass
    assert state.names() == []


def test_what_the_packages_depend_on_comes_from_their_control_file_alone() -> None:
    control = """\
Source: a
Build-Depends: debhelper-compat (= 13)

# a comment
Package: a
Depends:
 a-lib (= ${binary:Version}),
# another
 python3-one (>= 1:1.2) | python3-two,
 ${misc:Depends},
Recommends: unwanted
Pre-Depends: first

Package: a-lib
Depends: zlib1g
"""
    assert tree.runtime_depends(control) == ("first", "python3", "python3-one", "zlib1g")
    # What only the laboratory lists cannot be what makes an import of the product work.
    listed = {*images.BACKPORTS, *images.PACKAGES}
    assert [name for name in listed if name.startswith("python3")] == []
    assert not listed & (set(images.depends()) - {"systemd"}) - {"libvirt-daemon-system"}


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "-x", "x" * 21, "é"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        state.checked_name(name)


def test_a_domain_is_well_formed_whatever_its_strings_hold() -> None:
    spec = DomainSpec("a<b&c", functions=('/run/x"/vfio.sock',), qemu=("-name", "a'b<"), iommu=True)
    root = ET.fromstring(spec.xml())
    assert root.findtext("name") == "a<b&c"
    words = [
        arg.get("value") for arg in root.iter("{http://libvirt.org/schemas/domain/qemu/1.0}arg")
    ]
    assert words[:2] == ["-name", "a'b<"]
    assert words[2] == "-device"
    assert r"/run/x\"/vfio.sock" in str(words[3])


def test_progress_knows_how_far_apt_and_listing_tools_are(tmp_path: Path) -> None:
    assert apt_percent("pmstatus:python3:41.5:Unpacking python3") == 41.5
    assert apt_percent("Setting up python3") is None
    share = counted("I: ", 4)
    assert [share("I: a"), share("b"), share("I: c")] == [25.0, None, 50.0]


def test_a_failing_build_says_where_its_output_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Progress(quiet=True).step("breaking") as step,
        pytest.raises(SystemFailure, match="it broke") as caught,
    ):
        run_logged(["sh", "-c", "echo it broke; exit 4"], step=step, log=log)
    assert str(log) in caught.value.hint
    assert log.read_text() == "it broke\n"


def test_the_tree_names_no_registry_but_the_public_one() -> None:
    for path in Path(apt.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if "://deb." in line:
                assert apt.PUBLIC_MIRROR in line
    assert os.path.exists(apt.__file__)
