"""The server's session: every command, every limit, no leak, no crash on any body."""

from __future__ import annotations

import errno
import logging
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user import features, messages
from accelvisor.vfio_user.messages import RegionWrite
from accelvisor.vfio_user.model import IoFd, Refusal
from accelvisor.vfio_user.negotiate import Agreement, Capabilities, Phase, pack_version
from accelvisor.vfio_user.protocol import (
    Command,
    PciRegion,
    RegionFlag,
)
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.wire import Message, encode_command, encode_reply
from tests.descriptors import listed, open_fds

from .asking import EVENTFD, ask, irqs, mapping, memfd, read, refused
from .sample import BAR0_BYTES, WINDOW_BYTES, SampleDevice

# --- negotiation --------------------------------------------------------------------------------


def test_first_message_must_be_version(device: SampleDevice) -> None:
    session = ServerSession(device)
    reply = session.handle(Message(encode_command(1, Command.DEVICE_RESET)))
    assert reply is not None
    assert reply.close
    assert Message(reply.data).errno == errno.EINVAL
    assert device.resets == 0
    assert session.phase is Phase.REFUSED


def test_version_opens_the_connection(device: SampleDevice) -> None:
    session = ServerSession(device)
    ask(session, Command.VERSION, pack_version(0, 0, Capabilities()))
    assert session.agreement is not None
    ask(session, Command.DEVICE_RESET)
    assert device.resets == 1


def test_refused_version_closes_and_nothing_is_answered_after(device: SampleDevice) -> None:
    session = ServerSession(device)
    for command, body in ((Command.VERSION, b"\1\0\0\0"), (Command.VERSION, b"\0\0\0\0")):
        reply = session.handle(Message(encode_command(1, command, body)))
        assert reply is not None
        assert reply.close
        assert Message(reply.data).errno == errno.EINVAL


def test_second_version_is_refused_and_changes_nothing(session: ServerSession) -> None:
    agreed = session.agreement
    assert refused(session, Command.VERSION, pack_version(0, 0, Capabilities(max_msg_fds=1)))
    assert session.agreement is agreed
    assert not ask(session, Command.DEVICE_RESET).errno


def test_agreement_of_an_earlier_worker_is_enough(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement())
    assert not ask(session, Command.DEVICE_GET_INFO, bytes(16)).errno


def test_reply_without_a_request_ends_the_connection(session: ServerSession) -> None:
    with pytest.raises(ProtocolError):
        session.handle(Message(encode_reply(1, Command.DMA_READ)))


# --- information --------------------------------------------------------------------------------


def test_device_info(session: ServerSession) -> None:
    info = messages.parse_device_info(ask(session, Command.DEVICE_GET_INFO, bytes(16)).body)
    assert (info.flags, info.regions, info.irqs) == (3, 9, 5)


def test_region_info_brings_the_window_s_descriptor(
    session: ServerSession, device: SampleDevice
) -> None:
    body = messages.REGION_INFO.pack(32, 0, PciRegion.BAR2, 0, 0, 0)
    reply = ask(session, Command.DEVICE_GET_REGION_INFO, body)
    assert list(reply.fds) == [device.window_fd]
    info = messages.parse_region_info(reply.body).info
    assert info.size == WINDOW_BYTES
    assert info.flags & RegionFlag.MMAP


def test_client_that_takes_no_descriptors_gets_no_mappable_region(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement(peer_max_fds=0))
    body = messages.REGION_INFO.pack(32, 0, PciRegion.BAR2, 0, 0, 0)
    reply = ask(session, Command.DEVICE_GET_REGION_INFO, body)
    assert not reply.fds
    assert not messages.parse_region_info(reply.body).info.flags & RegionFlag.MMAP


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (Command.DEVICE_GET_INFO, bytes(15)),
        (Command.DEVICE_GET_REGION_INFO, bytes(31)),
        (Command.DEVICE_GET_REGION_INFO, messages.REGION_INFO.pack(31, 0, 0, 0, 0, 0)),
        (Command.DEVICE_GET_REGION_INFO, messages.REGION_INFO.pack(32, 0, 9, 0, 0, 0)),
        (Command.DEVICE_GET_REGION_INFO, messages.REGION_INFO.pack(32, 0, 2**32 - 1, 0, 0, 0)),
        (Command.DEVICE_GET_IRQ_INFO, messages.IRQ_INFO.pack(16, 0, 5, 0)),
        (Command.DEVICE_GET_REGION_IO_FDS, messages.IO_FDS.pack(16, 0, 9, 0)),
        (Command.DEVICE_GET_REGION_IO_FDS, messages.IO_FDS.pack(15, 0, 0, 0)),
        (Command.DEVICE_GET_REGION_IO_FDS, messages.IO_FDS.pack(16, 1, 0, 0)),
    ],
)
def test_wrong_question_gets_einval(session: ServerSession, command: int, body: bytes) -> None:
    assert refused(session, command, body) == errno.EINVAL


@pytest.mark.parametrize("command", [0, 11, 12, 14, 19, 999, 65535])
def test_unknown_command_is_refused_and_the_connection_goes_on(
    session: ServerSession, command: int
) -> None:
    assert refused(session, command, bytes(64)) == errno.EOPNOTSUPP
    assert not ask(session, Command.DEVICE_RESET).errno


def test_region_io_fds_of_a_device_without_any(session: ServerSession) -> None:
    reply = ask(
        session, Command.DEVICE_GET_REGION_IO_FDS, messages.IO_FDS.pack(4096, 0, PciRegion.BAR0, 0)
    )
    assert messages.IO_FDS.unpack(reply.body) == (16, 0, PciRegion.BAR0, 0)


def test_region_io_fds_of_a_device_with_some(device: SampleDevice) -> None:
    class WithIoFds(SampleDevice):
        def region_io_fds(self, index: int) -> list[IoFd]:
            return [IoFd(0x100, 4, self.window_fd)] if index == 0 else []

    model = WithIoFds()
    session = ServerSession(model, agreement=Agreement(peer_max_fds=16))
    body = messages.IO_FDS.pack(4096, 0, 0, 0)
    reply = ask(session, Command.DEVICE_GET_REGION_IO_FDS, body)
    assert messages.parse_io_fds(reply.body, reply.fds) == (IoFd(0x100, 4, model.window_fd),)
    poor = ServerSession(model, agreement=Agreement(peer_max_fds=0))
    assert refused(poor, Command.DEVICE_GET_REGION_IO_FDS, body) == errno.ENOSPC
    model.close()


# --- regions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8, 100, BAR0_BYTES])
def test_what_is_written_is_read(session: ServerSession, size: int) -> None:
    data = os.urandom(size)
    at = 0x1000 if size < BAR0_BYTES else 0
    ask(session, Command.REGION_WRITE, messages.pack_access(at, 0, size, data))
    reply = ask(session, Command.REGION_READ, read(0, at, size))
    assert bytes(reply.body) == messages.pack_access(at, 0, size, data)


@pytest.mark.parametrize(
    ("region", "offset", "count"),
    [
        (0, BAR0_BYTES, 1), (0, BAR0_BYTES - 3, 4), (0, 2**64 - 1, 4), (0, 2**64 - 4, 4),
        (0, 0, BAR0_BYTES + 1), (1, 0, 4), (9, 0, 4), (2**32 - 1, 0, 4), (6, 0, 4),
        (0, 0, 2**32 - 1),
    ],
)  # fmt: skip
def test_access_outside_a_region_never_reaches_the_device(
    session: ServerSession, device: SampleDevice, region: int, offset: int, count: int
) -> None:
    calls: list[object] = []
    device.region_read = lambda *a: calls.append(a) or b""  # type: ignore[method-assign,func-returns-value]
    device.region_write = lambda *a: calls.append(a)  # type: ignore[method-assign]
    assert refused(session, Command.REGION_READ, read(region, offset, count)) == errno.EINVAL
    if count <= BAR0_BYTES + 1:
        body = messages.pack_access(offset, region, count, bytes(count))
        assert refused(session, Command.REGION_WRITE, body) == errno.EINVAL
        one = RegionWrite(offset, region, bytes(min(count, 8)))
        if count <= 8:
            multi = messages.pack_write_multi([one])
            assert refused(session, Command.REGION_WRITE_MULTI, multi) == errno.EINVAL
    assert not calls


def test_write_whose_count_is_not_its_data_is_refused(session: ServerSession) -> None:
    for count, data in ((4, b"123"), (3, b"1234"), (0, b"1"), (4, b"")):
        body = messages.pack_access(0, 0, count, data)
        assert refused(session, Command.REGION_WRITE, body) == errno.EINVAL


def test_negotiated_transfer_size_bounds_accesses(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement(own_max_transfer=64))
    assert not ask(session, Command.REGION_READ, read(0, 0, 64)).errno
    assert refused(session, Command.REGION_READ, read(0, 0, 65)) == errno.EINVAL
    body = messages.pack_access(0, 0, 65, bytes(65))
    assert refused(session, Command.REGION_WRITE, body) == errno.EINVAL
    assert refused(session, Command.MIG_DATA_READ, features.pack_mig_data(size=65)) == errno.EINVAL


def test_read_of_nothing_succeeds(session: ServerSession) -> None:
    assert bytes(ask(session, Command.REGION_READ, read(0, 4, 0)).body) == read(0, 4, 0)


def test_posted_write_is_done_and_not_answered(
    session: ServerSession, device: SampleDevice
) -> None:
    body = messages.pack_access(0x40, 0, 4, b"post")
    message = Message(encode_command(1, Command.REGION_WRITE, body, no_reply=True))
    assert session.handle(message) is None
    assert device.bar0[0x40:0x44] == b"post"
    wrong = encode_command(1, Command.REGION_WRITE, read(99, 0, 4), no_reply=True)
    assert session.handle(Message(wrong)) is None


def test_write_multi(session: ServerSession, device: SampleDevice) -> None:
    writes = [RegionWrite(0x40, 0, b"ab"), RegionWrite(8, 2, b"window!!")]
    reply = ask(session, Command.REGION_WRITE_MULTI, messages.pack_write_multi(writes))
    assert bytes(reply.body) == messages.MULTI.pack(2)
    assert device.bar0[0x40:0x42] == b"ab"
    assert device.window[8:16] == b"window!!"


def test_write_multi_with_one_bad_write_does_none(
    session: ServerSession, device: SampleDevice
) -> None:
    writes = [RegionWrite(0x40, 0, b"ab"), RegionWrite(BAR0_BYTES, 0, b"x")]
    body = messages.pack_write_multi(writes)
    assert refused(session, Command.REGION_WRITE_MULTI, body) == errno.EINVAL
    assert device.bar0[0x40:0x42] == b"\0\0"


def test_write_multi_must_have_been_negotiated(device: SampleDevice) -> None:
    session = ServerSession(device, agreement=Agreement(write_multiple=False))
    body = messages.pack_write_multi([RegionWrite(0x40, 0, b"ab")])
    assert refused(session, Command.REGION_WRITE_MULTI, body) == errno.EOPNOTSUPP


# --- trouble in the model -----------------------------------------------------------------------


def test_refusal_of_the_model_becomes_its_errno(
    session: ServerSession, device: SampleDevice
) -> None:
    def refuse(*_: object) -> bytes:
        raise Refusal(errno.EXDEV, "not today")

    device.region_read = refuse  # type: ignore[assignment]
    assert refused(session, Command.REGION_READ, read(0, 0, 4)) == errno.EXDEV


def test_bug_in_the_model_is_logged_and_answered_with_eio(
    session: ServerSession, device: SampleDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise ZeroDivisionError("a bug")

    device.region_read = fail  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        assert refused(session, Command.REGION_READ, read(0, 0, 4)) == errno.EIO
    assert "a bug" in caplog.text
    device.region_read = lambda i, o, c: b"toolong"  # type: ignore[assignment]
    assert refused(session, Command.REGION_READ, read(0, 0, 4)) == errno.EIO


# --- the client's end ---------------------------------------------------------------------------


def test_release_drops_maps_and_interrupts_and_keeps_state(
    session: ServerSession, device: SampleDevice
) -> None:
    before = open_fds()
    ask(session, Command.DMA_MAP, mapping(), [memfd()])
    ask(session, Command.DEVICE_SET_IRQS, irqs(EVENTFD, 0, 1), [os.eventfd(0)])
    device.bar0[0:4] = b"kept"
    session.release()
    assert not device.eventfds
    assert len(device.maps) == 0
    assert device.bar0[0:4] == b"kept"
    assert open_fds() == before


def test_release_goes_on_when_the_model_fails(
    session: ServerSession, device: SampleDevice, caplog: pytest.LogCaptureFixture
) -> None:
    ask(session, Command.DEVICE_SET_IRQS, irqs(EVENTFD, 0, 1), [os.eventfd(0)])

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    unmap, device.dma_unmap = device.dma_unmap, fail  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR):
        session.release()
    device.dma_unmap = unmap  # type: ignore[method-assign]
    assert not device.eventfds
    assert "a bug" in caplog.text


# --- anything -----------------------------------------------------------------------------------

commands = st.one_of(st.sampled_from([int(c) for c in Command]), st.integers(0, 65535))
words = st.lists(
    st.one_of(
        st.sampled_from([0, 1, 2, 7, 16, 32, 0x1000, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1)
    ),
    max_size=12,
).map(lambda w: struct.pack(f"<{len(w)}I", *w))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(commands, words, st.booleans(), st.integers(0, 2)), max_size=10))
def test_any_request_is_answered_and_no_descriptor_leaks(
    session: ServerSession, device: SampleDevice, requests: list[tuple[int, bytes, bool, int]]
) -> None:
    logging.disable(logging.CRITICAL)
    before = listed()
    try:
        for command, body, no_reply, fds in requests:
            raw = encode_command(1, command, body, no_reply=no_reply)
            reply = session.handle(Message(raw, [os.eventfd(0) for _ in range(fds)]))
            assert no_reply or command == Command.VERSION or reply is not None
            if reply is not None:
                assert not reply.close
                assert Message(reply.data).errno != errno.EIO, "the model failed"
        session.release()
        assert listed() <= before
        if device.dirty.active:
            device.dirty.stop()
    finally:
        logging.disable(logging.NOTSET)


