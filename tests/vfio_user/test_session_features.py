"""The session: reset, device features, migration data."""

from __future__ import annotations

import errno
import struct

import pytest

from accelvisor.vfio_user import features
from accelvisor.vfio_user.negotiate import Agreement
from accelvisor.vfio_user.protocol import (
    Command,
    Feature,
    FeatureFlag,
    MigState,
)
from accelvisor.vfio_user.session import ServerSession

from .asking import ask, feature, refused
from .sample import SampleDevice

# --- reset, features, migration -----------------------------------------------------------------


def test_reset_is_refused_by_a_device_without_one(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement())
    bare = session.device.info.__class__(2, 9, 5)
    session.device = session.device.__class__(bare, session.device.regions, session.device.irqs)
    assert refused(session, Command.DEVICE_RESET) == errno.EOPNOTSUPP


def test_migration_feature_and_state(session: ServerSession) -> None:
    reply = feature(session, FeatureFlag.GET, Feature.MIGRATION)
    assert reply == features.FEATURE.pack(16, 1 << 16 | 1) + features.MIGRATION.pack(7)
    wanted = features.DEVICE_STATE.pack(MigState.STOP, 0xFFFFFFFF)
    feature(session, FeatureFlag.SET, Feature.MIG_DEVICE_STATE, wanted)
    state = feature(session, FeatureFlag.GET, Feature.MIG_DEVICE_STATE)
    assert features.DEVICE_STATE.unpack_from(state, 8)[0] == MigState.STOP


@pytest.mark.parametrize(
    ("flags", "number", "data", "expected"),
    [
        (FeatureFlag.GET, 99, b"", errno.ENOTTY),
        (FeatureFlag.SET, Feature.MIGRATION, bytes(8), errno.ENOTTY),
        (FeatureFlag.PROBE | FeatureFlag.SET, Feature.MIGRATION, b"", errno.ENOTTY),
        (FeatureFlag.PROBE, 99, b"", errno.ENOTTY),
        (FeatureFlag.SET, Feature.MIG_DEVICE_STATE, bytes(7), errno.EINVAL),
        (FeatureFlag.SET, Feature.MIG_DEVICE_STATE, struct.pack("<II", 8, 0), errno.EINVAL),
        (FeatureFlag.SET, Feature.MIG_DEVICE_STATE, struct.pack("<II", 0, 0), errno.EINVAL),
        (FeatureFlag.SET, Feature.DMA_LOGGING_START, bytes(3), errno.EINVAL),
        (FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, bytes(24), errno.EINVAL),
        (FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, struct.pack("<QQQ", 0, 4096, 4096), 22),
        (0, Feature.MIGRATION, b"", errno.EINVAL),
    ],
)
def test_impossible_feature_is_refused(
    session: ServerSession, flags: int, number: int, data: bytes, expected: int
) -> None:
    body = features.pack_feature(flags, number, data, argsz=4096)
    assert refused(session, Command.DEVICE_FEATURE, body) == expected


@pytest.mark.parametrize("number", [1, 2, 6, 7, 8])
def test_probe_of_every_feature(session: ServerSession, number: int) -> None:
    reply = feature(session, FeatureFlag.PROBE, number)
    assert reply == features.FEATURE.pack(4096, FeatureFlag.PROBE | number)


def test_feature_that_does_not_fit_says_what_it_needs(session: ServerSession) -> None:
    body = features.pack_feature(FeatureFlag.GET, Feature.MIGRATION, argsz=8)
    reply = ask(session, Command.DEVICE_FEATURE, body)
    assert features.FEATURE.unpack(reply.body)[0] == 16


def test_dirty_log_by_feature(session: ServerSession, device: SampleDevice) -> None:
    start = features.pack_logging(4096, [(0, 1 << 20)])
    reply = feature(session, FeatureFlag.SET, Feature.DMA_LOGGING_START, start)
    assert reply[8:] == start
    device.dirty.mark(0x5000, 1)
    report = features.REPORT.pack(0, 1 << 20, 4096)
    short = features.pack_feature(FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, report)
    answer = ask(session, Command.DEVICE_FEATURE, short)
    assert features.FEATURE.unpack_from(answer.body)[0] == 8 + 24 + 32
    assert len(answer.body) == 32, "no bitmap, and nothing was cleared"
    got = feature(session, FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, report)
    assert got[8:32] == report
    assert got[32:] == b"\x20" + bytes(31)
    again = feature(session, FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, report)
    assert not any(again[32:])
    feature(session, FeatureFlag.SET, Feature.DMA_LOGGING_STOP)


def test_report_of_more_than_a_message_carries_is_refused(session: ServerSession) -> None:
    data = features.REPORT.pack(0, 1 << 60, 4096)
    body = features.pack_feature(FeatureFlag.GET, Feature.DMA_LOGGING_REPORT, data, argsz=2**31)
    assert refused(session, Command.DEVICE_FEATURE, body) == errno.EINVAL


def test_page_size_that_the_device_changed_is_in_the_reply(session: ServerSession) -> None:
    start = features.pack_logging(1, [])
    reply = feature(session, FeatureFlag.SET, Feature.DMA_LOGGING_START, start)
    assert features.parse_logging(reply[8:])[0] == 4096


def test_migration_data_only_in_its_states(session: ServerSession) -> None:
    request = features.pack_mig_data(size=16)
    assert refused(session, Command.MIG_DATA_READ, request) == errno.EINVAL
    assert refused(session, Command.MIG_DATA_WRITE, features.pack_mig_data(b"x")) == errno.EINVAL


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (Command.MIG_DATA_READ, features.MIG_DATA.pack(8, 16)),
        (Command.MIG_DATA_READ, features.MIG_DATA.pack(2**31, 2**31 - 8)),
        (Command.MIG_DATA_READ, b"\0"),
        (Command.MIG_DATA_WRITE, features.MIG_DATA.pack(12, 4) + b"123"),
        (Command.MIG_DATA_WRITE, features.MIG_DATA.pack(12, 4) + b"12345"),
    ],
)
def test_migration_data_that_lies_is_refused(
    session: ServerSession, device: SampleDevice, command: int, body: bytes
) -> None:
    device.machine.request(MigState.RESUMING if command == 18 else MigState.STOP_COPY)
    assert refused(session, command, body) == errno.EINVAL
