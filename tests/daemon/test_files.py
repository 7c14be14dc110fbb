"""The function's directory is the function's: what it plants there must not reach anything else."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from accelvisor.daemon import files
from accelvisor.daemon.function_link import call
from accelvisor.daemon.paths import FunctionPaths, Paths
from accelvisor.errors import SystemFailure, UnavailableError

from .harness import Harness


def places(root: Path) -> FunctionPaths:
    return Paths(root / "run", root / "state", root / "toml").function("mine")


async def restarted(harness: Harness) -> bool:
    events = (await harness.call("ListEvents"))["events"]
    return any("restarted: its process ended" in event["message"] for event in events)


def test_a_planted_link_does_not_overwrite_the_store(harness: Harness) -> None:
    """A worker plants links to the database under every name that is or was written, and ends its
    holder, so that the daemon starts a new one."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            directory = harness.paths.function(made["uuid"]).directory
            before = harness.paths.database.read_bytes()[:16]
            for name in ("spec.new", "spec.json", "process", "log", f"{made['uuid']}.new"):
                (directory / name).symlink_to(harness.paths.database)
            harness.kill(made["uuid"])
            async with asyncio.timeout(20):
                while not await restarted(harness):
                    await asyncio.sleep(0.01)
            assert harness.paths.database.read_bytes()[:16] == before == b"SQLite format 3\0"
            await harness.create("another")
            await harness.call("DeleteFunction", function="mine")
            assert not directory.exists()
        async with harness.daemon():
            assert await harness.state("another") == "ready"

    asyncio.run(scenario())


def test_a_socket_that_is_a_link_is_not_connected_to(short_path: Path) -> None:
    """control.sock -> ../OTHER/control.sock would send an operator's reset to another tenant."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short_path / "other.sock"))
        other.listen()
        other.setblocking(False)
        (short_path / "control.sock").symlink_to(short_path / "other.sock")
        with pytest.raises(UnavailableError) as caught:
            asyncio.run(call(short_path / "control.sock", "reset"))
        assert caught.value.code == "function-unreachable"
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("kind", ["file", "directory", "fifo"])
def test_what_is_no_socket_is_not_opened(short_path: Path, kind: str) -> None:
    path = short_path / "holder.sock"
    {"file": Path.touch, "directory": Path.mkdir, "fifo": os.mkfifo}[kind](path)
    with pytest.raises(UnavailableError, match="not a socket"):
        asyncio.run(call(path, "status"))


def test_the_function_reads_its_specification_but_does_not_own_its_place(tmp_path: Path) -> None:
    found = places(tmp_path)
    files.write(found, {"uuid": "mine"})
    assert found.spec.parent != found.directory
    assert found.directory not in found.spec.parents
    assert found.spec.stat().st_mode & 0o777 == 0o640 & ~os.umask(os.umask(0))
    assert found.directory.stat().st_mode & 0o777 == 0o771


def test_leftovers_of_an_interrupted_write_are_replaced(tmp_path: Path) -> None:
    found = places(tmp_path)
    files.write(found, {"uuid": "mine"})
    found.spec.with_suffix(".new").write_text("half")
    files.write(found, {"uuid": "yours"})
    assert "yours" in found.spec.read_text()
    assert sorted(os.listdir(found.spec.parent)) == ["mine.json"]


def test_sweeping_takes_links_but_not_what_they_name(tmp_path: Path) -> None:
    found = places(tmp_path)
    files.write(found, {})
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (found.directory / "link").symlink_to(precious)
    (found.directory / "empty").mkdir()
    assert files.sweep(found)
    assert (precious / "file").exists()
    assert not found.directory.exists()
    assert files.sweep(found)  # again: nothing to do


def test_a_deep_tree_does_not_make_a_function_undeletable(harness: Harness) -> None:
    """1500 levels end a recursive removal with a RecursionError."""

    async def scenario() -> None:
        async with harness.daemon():
            made = await harness.create("mine")
            fd = os.open(harness.paths.function(made["uuid"]).directory, os.O_RDONLY)
            for _ in range(1500):
                os.mkdir("x", dir_fd=fd)
                deeper = os.open("x", os.O_RDONLY, dir_fd=fd)
                os.close(fd)
                fd = deeper
            os.close(fd)
            await harness.call("DeleteFunction", function="mine")
            assert (await harness.call("ListFunctions"))["functions"] == []
            card = (await harness.call("GetCard", card="card0"))["card"]
            assert card["cores_free"] == card["cores"]
        async with harness.daemon():  # and the next start does not stumble over it
            await harness.create("mine")
        os.system(f"rm -rf {harness.paths.functions / made['uuid']}")

    asyncio.run(scenario())


def test_what_the_daemon_may_not_open_is_left(tmp_path: Path) -> None:
    found = places(tmp_path)
    files.write(found, {})
    (found.directory / "x").mkdir()
    (found.directory / "x" / "y").touch()
    assert not files.sweep(found)
    assert not found.spec.exists()


def test_a_directory_in_place_of_the_specification_is_named(tmp_path: Path) -> None:
    found = places(tmp_path)
    found.spec.mkdir(parents=True)
    with pytest.raises(SystemFailure) as caught:
        files.write(found, {})
    assert caught.value.code == "spec-write"
    with pytest.raises(SystemFailure) as caught:
        files.sweep(found)
    assert caught.value.code == "sweep"
