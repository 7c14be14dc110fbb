"""Transcripts: format, recording proxy, replay; and what QEMU 11.1.3 really says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.messages import parse_dma_map, parse_set_irqs
from accelvisor.vfio_user.negotiate import parse_version
from accelvisor.vfio_user.protocol import Command, PciIrq
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.transcript import (
    Connected,
    Ended,
    Record,
    Said,
    commands,
    make_fd,
    marker,
    read,
    replay,
    write_line,
)
from accelvisor.vfio_user.wire import Message, encode_command, encode_error, encode_reply

from .conftest import Running, until
from .sample import SampleDevice

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "vfio_user"
GOLDEN = sorted(FIXTURES.glob("*.jsonl"))

commands_or_numbers = st.one_of(st.sampled_from([int(c) for c in Command]), st.integers(0, 65535))
said = st.builds(
    Said,
    st.sampled_from(["client", "server"]),
    st.one_of(
        st.builds(encode_command, st.integers(0, 65535), commands_or_numbers, st.binary()),
        st.builds(encode_reply, st.integers(0, 65535), commands_or_numbers, st.binary()),
        st.builds(encode_error, st.integers(0, 65535), commands_or_numbers, st.integers(0, 200)),
        st.just(encode_command(1, Command.REGION_WRITE, b"\0x\0", no_reply=True)),
    ),
    st.lists(st.sampled_from(["eventfd", "memfd:4096", "file"]), max_size=3).map(tuple),
)


@given(said)
def test_lines_are_read_as_they_were_written(record: Said) -> None:
    assert list(read(["# a comment", "", write_line(record)])) == [record]


def test_connections_and_ends() -> None:
    records: list[Record] = [Connected(1), Ended("client"), Connected(2), Ended("server")]
    assert list(read([write_line(r) for r in records])) == records


@pytest.mark.parametrize(
    "line",
    [
        "{", "{}", "[]", '{"from":"someone"}', '{"from":"client","command":"DANCE","bytes":16}',
        '{"from":"client","command":"VERSION","bytes":15}', '{"unknown":1}',
        '{"from":"client","command":"VERSION","bytes":16,"body":"00"}',
        '{"from":"client","command":"VERSION","bytes":20,"body":"xx"}',
    ],
)  # fmt: skip
def test_damaged_line_is_named(line: str) -> None:
    with pytest.raises(ProtocolError, match="line 2") as error:
        list(read(["", line]))
    assert error.value.code == "transcript"


@pytest.mark.parametrize("name", ["eventfd", "memfd:8192", "file"])
def test_markers_make_descriptors_of_their_kind(name: str) -> None:
    fd = make_fd(name)
    assert marker(fd) == name
    os.close(fd)


@pytest.mark.parametrize("name", ["", "memfd", "memfd:x", "memfd:-1", f"memfd:{1 << 41}", "tty"])
def test_unknown_marker_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        make_fd(name)


# --- QEMU ---------------------------------------------------------------------------------------


def golden(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as lines:
        return list(read(lines))


def test_there_are_golden_transcripts() -> None:
    assert [p.stem for p in GOLDEN] == ["boot", "hotplug", "iommu", "reset"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_every_answer_to_qemu_is_the_recorded_one(path: Path, device: SampleDevice) -> None:
    records = golden(path)
    # The window is shared memory: what the guest wrote there went past the protocol.
    assert replay(records, lambda: ServerSession(device)) == []
    assert len(device.maps) == 0
    assert not device.eventfds


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_replay_notices_a_device_that_answers_otherwise(path: Path, device: SampleDevice) -> None:
    device.config[8] ^= 0xFF  # the revision
    differences = replay(golden(path), lambda: ServerSession(device))
    assert differences
    assert "REGION_READ" in differences[0]


def said_by_client(path: Path, command: Command) -> Iterator[Message]:
    for record in golden(path):
        if isinstance(record, Said) and record.side == "client":
            message = Message(record.raw)
            if message.command == command and not message.is_reply:
                yield message


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_qemu_still_proposes_what_we_know(path: Path) -> None:
    for message in said_by_client(path, Command.VERSION):
        major, minor, capabilities = parse_version(message.body)
        assert (major, minor) == (0, 0)
        assert capabilities.named == {
            "max_msg_fds": 16, "max_data_xfer_size": 1 << 20, "max_dma_maps": 65535,
            "pgsizes": 4096, "write_multiple": True,
        }  # fmt: skip


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_qemu_realizes_a_device_in_the_known_order(path: Path) -> None:
    counts = commands(golden(path))
    assert set(counts) <= {
        "VERSION", "DMA_MAP", "DMA_UNMAP", "DEVICE_GET_INFO", "DEVICE_GET_REGION_INFO",
        "DEVICE_GET_IRQ_INFO", "DEVICE_SET_IRQS", "REGION_READ", "REGION_WRITE", "DEVICE_RESET",
        "DMA_READ", "DMA_WRITE",
    }  # fmt: skip
    assert counts["DEVICE_GET_REGION_INFO"] == 7 * counts["VERSION"]
    assert counts["DEVICE_RESET"] >= counts["VERSION"]


def test_qemu_maps_ram_with_a_descriptor_and_the_window_without() -> None:
    maps = [
        (parse_dma_map(Message(r.raw).body), r.fds)
        for r in golden(FIXTURES / "boot.jsonl")
        if isinstance(r, Said) and r.side == "client" and Message(r.raw).command == Command.DMA_MAP
    ]
    assert any(fds == ("memfd:268435456",) for _, fds in maps)
    assert any(m.size == 0x10000 and not fds for m, fds in maps)


def test_qemu_resets_the_device_with_the_machine(device: SampleDevice) -> None:
    replay(golden(FIXTURES / "reset.jsonl"), lambda: ServerSession(device))
    assert device.resets >= 2


def test_behind_an_iommu_qemu_floods_unmaps_and_sets_the_msi() -> None:
    path = FIXTURES / "iommu.jsonl"
    assert sum(1 for _ in said_by_client(path, Command.DMA_UNMAP)) > 50
    requests = [parse_set_irqs(m.body) for m in said_by_client(path, Command.DEVICE_SET_IRQS)]
    assert [(r.index, r.flags, r.count) for r in requests] == [
        (PciIrq.MSI, 0x24, 1),
        (PciIrq.MSI, 0x21, 0),
    ]


def test_qemu_answers_dma_messages() -> None:
    records = golden(FIXTURES / "iommu.jsonl")
    asked = [
        Message(r.raw).command
        for r in records
        if isinstance(r, Said) and r.side == "server" and not Message(r.raw).is_reply
    ]
    assert asked == [Command.DMA_READ, Command.DMA_WRITE, Command.DMA_WRITE]


# --- the recording proxy ------------------------------------------------------------------------


def start_recorder(listen: Path, connect: Path, out: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "accelvisor.vfio_user.record", "--listen", str(listen)]
    process = subprocess.Popen([*words, "--connect", str(connect), "--out", str(out)])
    until(listen.exists, "the recorder listens", 30)
    return process


def _ends_recorded(out: Path, number: int) -> bool:
    return out.read_text().count('"end":"client"') == number


def test_recorded_session_replays(running: Running, device: SampleDevice, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    recorder = start_recorder(tmp_path / "proxy", running.path, out)
    memory = os.memfd_create("ram")
    os.ftruncate(memory, 0x1000)
    for number in (1, 2):
        with Client(tmp_path / "proxy") as client:
            client.dma_map(0, 0x1000, fd=memory)
            os.close(client.irq_eventfd(PciIrq.MSI))
            client.write32(0, 0x40, number)
            assert client.read32(0, 0x40) == number
            window = client.map_region(2)
            window.close()
            client.reset()
        done = partial(_ends_recorded, out, number)
        until(done, "the end was recorded")
    os.close(memory)
    recorder.send_signal(signal.SIGTERM)
    assert recorder.wait(10) == 0
    assert not (tmp_path / "proxy").exists()
    records = golden(out)
    assert [r for r in records if not isinstance(r, Said)] == [
        Connected(1), Ended("client"), Connected(2), Ended("client"),
    ]  # fmt: skip
    fds = [r.fds for r in records if isinstance(r, Said) and r.fds]
    assert fds == 2 * [("memfd:4096",), ("eventfd",), ("memfd:65536",)]
    assert replay(records, lambda: ServerSession(device)) == []


def test_recorder_without_a_server_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "accelvisor.vfio_user.record", "--listen", str(tmp_path / "a")]
    process = subprocess.Popen(
        [*words, "--connect", str(tmp_path / "b"), "--out", str(out)], stderr=subprocess.PIPE
    )
    until((tmp_path / "a").exists, "the recorder listens", 30)
    with pytest.raises(Exception, match=r"closed|reset|went"):
        Client(tmp_path / "a")
    _, error = process.communicate(timeout=10)
    assert process.returncode == 1
    assert b"start the server first" in error
