"""Files that come to the daemon in parts."""

from __future__ import annotations

import base64
import errno
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon.moving.uploads import Uploads, failed, parts
from accelvisor.errors import AccelvisorError, CapacityError, DataError, NotFoundError, UsageError
from accelvisor.limits import LIMITS


class Host:
    """Room and time, as a test says."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.free = 1000
        limits = replace(LIMITS, checkpoint_part_bytes=8, checkpoint_uploads=2)
        self.uploads = Uploads(directory, self.room, limits=limits, clock=lambda: self.now)

    def room(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise CapacityError("full", code="checkpoint-space")

    def send(self, name: str, data: bytes) -> int:
        return self.uploads.add(name, base64.b64encode(data).decode())


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.uploads.close()


def gone(here: Host, name: str) -> bool:
    try:
        with here.uploads.whole(name):
            return False
    except NotFoundError:
        return True


def test_a_file_comes_in_parts_and_is_used_once(here: Host, tmp_path: Path) -> None:
    name = here.uploads.begin(11)
    assert here.send(name, b"12345678") == 3
    assert here.send(name, b"abc") == 0
    with here.uploads.whole(name) as file:
        assert file.read() == b"12345678abc"
    assert gone(here, name)
    assert list(tmp_path.iterdir()) == [], "it never had a name"


@pytest.mark.parametrize(
    "part",
    ["no base64!", "", base64.b64encode(bytes(9)).decode(), base64.b64encode(bytes(6)).decode()],
    ids=["no base64", "empty", "larger than a part", "more than was promised"],
)
def test_what_is_no_part_ends_the_upload(here: Host, part: str) -> None:
    name = here.uploads.begin(5)
    with pytest.raises(DataError) as refused:
        here.uploads.add(name, part)
    assert refused.value.code == "upload-part"
    assert gone(here, name)


def test_a_file_of_which_something_is_missing_is_not_used(here: Host) -> None:
    name = here.uploads.begin(5)
    here.send(name, b"1234")
    with pytest.raises(DataError, match="1 bytes"), here.uploads.whole(name):
        pass
    assert gone(here, name)


def test_one_that_stands_still_makes_room_for_others(here: Host) -> None:
    first, _ = here.uploads.begin(5), here.uploads.begin(5)
    with pytest.raises(CapacityError) as refused:
        here.uploads.begin(5)
    assert refused.value.code == "upload-many"
    here.now = LIMITS.checkpoint_upload_idle_s + 1
    here.uploads.begin(5)
    assert gone(here, first)


def test_what_others_have_yet_to_bring_takes_room_too(here: Host) -> None:
    here.uploads.begin(700)
    with pytest.raises(CapacityError, match="full"):
        here.uploads.begin(400)


def test_a_file_of_no_bytes_is_none(here: Host) -> None:
    with pytest.raises(UsageError):
        here.uploads.begin(0)


def test_a_name_that_was_guessed_reaches_nothing(here: Host) -> None:
    here.uploads.begin(5)
    with pytest.raises(AccelvisorError) as refused:
        here.send("0" * 32, b"12345")
    assert refused.value.code == "upload-unknown"


@given(st.integers(0, 3 * LIMITS.checkpoint_part_bytes), st.binary(max_size=64))
def test_parts_are_the_file(zeros: int, data: bytes) -> None:
    whole = bytes(zeros) + data
    assert b"".join(base64.b64decode(part) for part in parts(BytesIO(whole))) == whole


def test_no_part_is_larger_than_a_message_takes() -> None:
    sizes = [len(part) for part in parts(BytesIO(bytes(2 * LIMITS.checkpoint_part_bytes + 1)))]
    assert len(sizes) == 3
    assert max(sizes) < LIMITS.admin_message_bytes


def test_a_full_disk_is_told_as_such() -> None:
    assert failed(OSError(errno.ENOSPC, "full")).code == "checkpoint-space"
    assert failed(OSError(errno.EIO, "broken")).code == "checkpoint-io"
