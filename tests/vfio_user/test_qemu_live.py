"""A real QEMU against the sample device: does it still say what the golden transcripts say?

Uses the laboratory's images and runs QEMU in a private copy of the host image, without booting it.
Fails when a newer QEMU speaks otherwise: then record the transcripts again and read the difference.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelvisor.vfio_user.negotiate import parse_version
from accelvisor.vfio_user.protocol import Command
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.transcript import Record, Said, commands, read, replay
from accelvisor.vfio_user.wire import Message
from tests.amount import by_night
from tests.laboratory import require_laboratory

from .sample import SampleDevice

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "fixtures" / "vfio_user"

#: $1 host image, $2 work directory; the rest is the command. Mounts vanish with its namespace.
_INSIDE = """
set -e
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/scratch" "$2/root"
mkdir -p "$2/root$2/shared"
mount --bind "$2/shared" "$2/root$2/shared"
mount --bind /dev "$2/root/dev"
mount -t proc proc "$2/root/proc"
shift 2
exec "$@"
"""


def images() -> tuple[Path, Path]:
    """The laboratory's host image and its guest images."""
    from accelvisor.lab import guestimage
    from accelvisor.lab import images as host_images
    from accelvisor.lab.progress import Progress

    require_laboratory()
    progress = Progress()
    return host_images.host(progress), guestimage.guest(progress)


def transcript(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as lines:
        return list(read(lines))


def proposals(records: list[Record]) -> list[object]:
    """What QEMU proposes at each connection."""
    messages = [Message(r.raw) for r in records if isinstance(r, Said) and r.side == "client"]
    return [parse_version(m.body) for m in messages if m.command == Command.VERSION]


@pytest.mark.lab
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", by_night(["boot", "iommu"], ["boot"]))
def test_this_qemu_speaks_as_the_golden_one(
    scenario: str, tmp_path: Path, device: SampleDevice
) -> None:
    host, guest = images()
    for name in ("upper", "scratch", "root", "shared/images"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("vmlinux", "initrd.img", "base.squashfs"):
        shutil.copyfile(guest / name, tmp_path / "shared/images" / name)
    qemu = shlex.join(["chroot", str(tmp_path / "root"), "qemu-system-x86_64"])
    shared = tmp_path / "shared"
    record = [
        sys.executable, "-m", "tests.vfio_user.record_qemu", "--qemu", qemu, "--out", str(tmp_path),
        "--images", str(shared / "images"), "--work", str(shared), scenario,
    ]  # fmt: skip
    words = ["unshare", "-m", "sh", "-c", _INSIDE, "sh", str(host), str(tmp_path), *record]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]

    golden = transcript(FIXTURES / f"{scenario}.jsonl")
    live = transcript(tmp_path / f"{scenario}.jsonl")
    assert set(commands(live)) == set(commands(golden))
    assert proposals(live) == proposals(golden)
    assert replay(live, lambda: ServerSession(device)) == []
