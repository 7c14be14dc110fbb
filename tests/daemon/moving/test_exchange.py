"""Checkpoints that go to another host, and come from one; verification with a file alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelvisor.daemon.moving.checkpoints import verify_file
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, DataError, FrameRefused, NotFoundError
from accelvisor.frames.chunks import Kind
from accelvisor.frames.steps import STEPS
from tests.daemon.moving.resting import Host, KilledError, N, Vm, computes, function, host
from tests.function.harness import Guest, Process, call, running


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "here", name="alpha") as made:
        yield made


@pytest.fixture
def there(tmp_path: Path, here: Host) -> Iterator[Host]:
    with host(tmp_path / "there", name="beta") as made:
        made.trust(here)
        here.trust(made)
        made.now = here.now
        yield made


@pytest.fixture
def one(here: Host) -> Iterator[tuple[Process, Function]]:
    with function(here, domain=None) as made:
        yield made


def exported(here: Host, name: str, audience: str | None, sealed: bool = True) -> bytes:
    file = io.BytesIO()
    asyncio.run(here.points.export(name, file, audience, sealed=sealed))
    return file.getvalue()


def imported(there: Host, data: bytes, label: str | None = None) -> str:
    return asyncio.run(there.points.import_(io.BytesIO(data), label)).name


@pytest.mark.parametrize("sealed", [True, False])
def test_a_chain_goes_to_another_host_as_one_and_is_restored_there(
    here: Host, there: Host, one: tuple[Process, Function], sealed: bool
) -> None:
    process, found = one
    with Guest(process) as guest:
        vm = Vm(guest)
        y = vm.ring.tensor(np.full(N, 1, np.float32))
        whole = asyncio.run(here.points.create(found.uuid, follow=True))
        vm.ring.write(y, np.full(N, 2, np.float32))
        part = asyncio.run(here.points.create(found.uuid, parent=whole.digest))
        want = call(process.spec.control_socket, "digests")["memory"]
    data = exported(here, part.name, "beta", sealed)
    assert (np.full(4096, 2, np.float32).tobytes() in data) is not sealed
    name = imported(there, data)
    assert name == f"{found.uuid}/import-1.2"
    assert asyncio.run(there.points.show(name)).status is not None
    with running(uuid=found.uuid) as again:
        there.functions.coming = lambda uuid, profile: again
        asyncio.run(there.points.restore(name))
        assert call(again.spec.control_socket, "digests")["memory"] == want
        assert computes(again)


def test_as_it_is_it_is_the_same_file_and_for_this_host_alone(
    here: Host, there: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    data = exported(here, entry.name, None)
    assert data == (here.root / "checkpoints" / f"{entry.name}.xckp").read_bytes()
    with pytest.raises(FrameRefused) as caught:
        imported(there, data)
    assert caught.value.code == "frame-audience"
    with pytest.raises(ConflictError) as conflict:
        imported(here, data)
    assert conflict.value.code == "checkpoint-known"
    asyncio.run(here.points.delete(entry.name))
    assert imported(here, data, "back") == f"{one[1].uuid}/back"
    asyncio.run(here.points.restore("back"))


def test_taken_for_another_host_it_is_of_no_use_here(
    here: Host, there: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid, seal_for="beta"))
    with pytest.raises(FrameRefused) as caught:
        asyncio.run(here.points.restore(entry.name))
    assert caught.value.code == "frame-audience"
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    assert imported(there, path.read_bytes())
    with pytest.raises(NotFoundError):
        asyncio.run(here.points.create(one[1].uuid, seal_for="gamma"))


def test_what_is_refused_is_not_kept_and_is_recorded(
    here: Host, there: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    data = exported(here, entry.name, "beta", sealed=False)
    for bad in (data[:-1], data + b"x", b"", b"XCKP" + bytes(100)):
        with pytest.raises(AccelvisorError):
            imported(there, bad)
    there.keys.remove("alpha")
    with pytest.raises(FrameRefused) as caught:
        imported(there, data)
    assert caught.value.code == "frame-key-revoked"
    assert there.files() == []
    assert len(there.audited()) == 5
    path = here.root / "checkpoints" / f"{entry.name}.xckp"
    path.write_bytes(path.read_bytes()[:-1])
    for audience in (None, "beta"):
        file = io.BytesIO()
        with pytest.raises(FrameRefused):
            asyncio.run(here.points.export(entry.name, file, audience))
        assert file.getvalue() == b""


def test_an_import_that_is_killed_leaves_nothing(
    here: Host, there: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    data = exported(here, entry.name, "beta")
    there.kill_at = "import:copied"
    with pytest.raises(KilledError):
        imported(there, data)
    folder = there.root / "checkpoints" / one[1].uuid
    (folder / ".half.xckp.new").write_bytes(b"what a kill leaves")
    there.restart()
    asyncio.run(there.points.recover())
    assert there.files() == []


def test_a_part_without_what_it_continues_is_not_taken_in(
    here: Host, one: tuple[Process, Function]
) -> None:
    whole = asyncio.run(here.points.create(one[1].uuid, follow=True))
    part = asyncio.run(here.points.create(one[1].uuid, parent=whole.digest))
    data = (here.root / "checkpoints" / f"{part.name}.xckp").read_bytes()
    asyncio.run(here.points.delete(part.name))
    with pytest.raises(FrameRefused) as caught:
        imported(here, data)
    assert caught.value.code == "frame-parent"


# --- a file and a trust document alone ------------------------------------------------------------


def test_a_file_is_verified_with_a_trust_document_alone(
    here: Host, there: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    data = (here.root / "checkpoints" / f"{entry.name}.xckp").read_bytes()
    report = verify_file(io.BytesIO(data), here.keys.envelope, here.clock)
    assert report.verified
    assert report.signers == (str(here.uuid),)
    assert [step.number for step in report.steps] == [step.number for step in STEPS]
    assert set(report.documents) == {Kind.FUNCTION, Kind.STATUS}
    assert verify_file(io.BytesIO(data), there.keys.envelope, here.clock).verified
    bad = bytearray(data)
    bad[-1] ^= 1
    report = verify_file(io.BytesIO(bad), here.keys.envelope, here.clock)
    assert not report.verified
    assert report.documents == {}
    assert report.signers == ()


def test_a_strangers_file_is_refused_by_the_step_about_keys(
    here: Host, tmp_path: Path, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid))
    data = (here.root / "checkpoints" / f"{entry.name}.xckp").read_bytes()
    with host(tmp_path / "other") as other:
        report = verify_file(io.BytesIO(data), other.keys.envelope, here.clock)
    assert report.code == "frame-key-unknown"
    results = [step.result for step in report.steps]
    assert results == ["passed", "frame-key-unknown", *["not reached"] * 5]
    for cut in (0, 3, 16, 100):
        report = verify_file(io.BytesIO(data[:cut]), here.keys.envelope, here.clock)
        assert not report.verified
        assert report.manifest is None


def test_a_trust_document_that_is_none_is_refused(here: Host) -> None:
    for data in (b"", b"x", here.keys.envelope[:-1], here.keys.envelope + b"x"):
        with pytest.raises(DataError) as caught:
            verify_file(io.BytesIO(), data, here.clock)
        assert caught.value.code.startswith("trust-")


def test_frames_of_a_sealed_one_are_shown_where_the_key_is(
    here: Host, one: tuple[Process, Function]
) -> None:
    entry = asyncio.run(here.points.create(one[1].uuid, seal_for=str(here.uuid)))
    assert asyncio.run(here.points.show(entry.name)).frame is not None
    data = (here.root / "checkpoints" / f"{entry.name}.xckp").read_bytes()
    report = verify_file(io.BytesIO(data), here.keys.envelope, here.clock)
    assert report.verified
    assert report.documents == {}
    here.keys.rotate()
    shown = asyncio.run(here.points.show(entry.name))
    assert (shown.report.verified, shown.frame) == (True, None)
