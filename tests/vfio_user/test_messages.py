"""Bodies: what is packed is parsed again; damaged ones are refused and nothing else happens."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.vfio_user import features, messages
from accelvisor.vfio_user.messages import (
    DmaMap,
    DmaUnmap,
    IrqRequest,
    PayloadError,
    RegionWrite,
)
from accelvisor.vfio_user.model import DeviceInfo, IoFd, IrqInfo, RegionInfo
from accelvisor.vfio_user.protocol import FeatureFlag, RegionFlag, UnmapFlag

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(st.builds(DmaMap, u32, u64, u64, u64))
def test_dma_map(m: DmaMap) -> None:
    body = messages.pack_dma_map(m)
    assert len(body) == 32
    assert messages.parse_dma_map(body) == m


@given(u32, u64, u64, st.integers(0, 1), st.integers(1, 2**63))
def test_dma_unmap(argsz: int, address: int, size: int, flags: int, page: int) -> None:
    m = DmaUnmap(argsz, flags, address, size, page if flags else 0, 64 if flags else 0)
    body = messages.pack_dma_unmap(m)
    assert len(body) == (40 if flags else 24)
    assert messages.parse_dma_unmap(body, UnmapFlag.GET_DIRTY_BITMAP) == m


def test_dma_unmap_with_bitmap_needs_its_header() -> None:
    body = messages.DMA_UNMAP.pack(24, UnmapFlag.GET_DIRTY_BITMAP, 0, 4096)
    with pytest.raises(PayloadError):
        messages.parse_dma_unmap(body, UnmapFlag.GET_DIRTY_BITMAP)
    with pytest.raises(PayloadError, match="page size 0"):
        messages.parse_dma_unmap(body + bytes(16), UnmapFlag.GET_DIRTY_BITMAP)


@given(u32, u32, u32)
def test_device_info(flags: int, regions: int, irqs: int) -> None:
    info = DeviceInfo(flags, regions, irqs)
    assert messages.parse_device_info(messages.pack_device_info(info)) == info


@given(u32, u32, u32)
def test_irq_info(index: int, flags: int, count: int) -> None:
    info = IrqInfo(index, flags, count)
    assert messages.parse_irq_info(messages.pack_irq_info(info)) == info


areas = st.lists(st.tuples(u64, u64), max_size=8).map(tuple)


@given(st.integers(0, 100), st.integers(0, 7), u64, areas)
def test_region_info_with_its_capabilities(
    index: int, flags: int, size: int, sparse: tuple[tuple[int, int], ...]
) -> None:
    info = RegionInfo(index, flags, size, None, sparse)
    full = messages.pack_region_info(info, 4096)
    reply = messages.parse_region_info(full)
    assert reply.argsz == len(full)
    assert reply.info.sparse == sparse
    assert (reply.info.index, reply.info.size, reply.offset) == (index, size, 0)
    assert reply.info.flags == (flags | RegionFlag.CAPS if sparse else flags)


def test_truncated_region_info_has_a_valid_cap_offset() -> None:
    # QEMU checks it before it asks again with the room that argsz says.
    info = RegionInfo(2, 7, 0x10000, None, ((0, 0x1000),))
    short = messages.pack_region_info(info, 32)
    assert len(short) == 32
    argsz, flags, _, cap_offset, _, _ = messages.REGION_INFO.unpack(short)
    assert argsz == 64
    assert flags & RegionFlag.CAPS
    assert cap_offset >= 32
    assert messages.parse_region_info(short).info.sparse == ()
    assert len(messages.pack_region_info(info, 64)) == 64


def region_reply(*capabilities: bytes, cap_offset: int = 32) -> bytes:
    chain = b"".join(capabilities)
    return messages.REGION_INFO.pack(32 + len(chain), 15, 2, cap_offset, 4096, 0) + chain


def test_unknown_region_capabilities_are_walked_over() -> None:
    unknown = messages.CAPABILITY.pack(99, 1, 40)
    sparse = messages.CAPABILITY.pack(1, 1, 0) + messages.SPARSE.pack(1, 0)
    reply = region_reply(unknown, sparse + messages.AREA.pack(0, 4096))
    assert messages.parse_region_info(reply).info.sparse == ((0, 4096),)


@pytest.mark.parametrize("link", [8, 32, 39])
def test_capability_chain_that_leads_backwards_is_refused(link: int) -> None:
    first = messages.CAPABILITY.pack(99, 1, 40)
    second = messages.CAPABILITY.pack(99, 1, link)
    with pytest.raises(PayloadError, match="backwards"):
        messages.parse_region_info(region_reply(first, second))


def test_capability_chain_that_leads_out_is_refused() -> None:
    with pytest.raises(PayloadError, match="out of the reply"):
        messages.parse_region_info(region_reply(messages.CAPABILITY.pack(99, 1, 1000)))


def test_sparse_area_count_is_believed_only_as_far_as_the_bytes_go() -> None:
    for count in (1, 1000, 2**32 - 1):
        capability = messages.CAPABILITY.pack(1, 1, 0) + messages.SPARSE.pack(count, 0)
        with pytest.raises(PayloadError):
            messages.parse_region_info(region_reply(capability))


@given(u32, u32, u32, u32, st.binary(max_size=64))
def test_set_irqs(flags: int, index: int, start: int, count: int, data: bytes) -> None:
    request = IrqRequest(flags, index, start, count, data)
    assert messages.parse_set_irqs(messages.pack_set_irqs(request)) == request


@given(u64, u32, u32, st.binary(max_size=64))
def test_access(offset: int, region: int, count: int, data: bytes) -> None:
    body = messages.pack_access(offset, region, count, data)
    got = messages.parse_access(body, "REGION_WRITE")
    assert (got[0], got[1], got[2], bytes(got[3])) == (offset, region, count, data)


@given(st.lists(st.builds(RegionWrite, u64, u32, st.binary(max_size=8)), max_size=20))
def test_write_multi(writes: list[RegionWrite]) -> None:
    assert messages.parse_write_multi(messages.pack_write_multi(writes)) == writes


def test_write_multi_that_lies_about_its_number_is_refused() -> None:
    body = messages.pack_write_multi([RegionWrite(0, 0, b"1234")])
    for count in (0, 2, 2**63, 2**64 - 1):
        with pytest.raises(PayloadError):
            messages.parse_write_multi(struct.pack("<Q", count) + body[8:])


def test_write_multi_of_more_than_8_bytes_is_refused() -> None:
    with pytest.raises(PayloadError):
        messages.pack_write_multi([RegionWrite(0, 0, bytes(9))])
    with pytest.raises(PayloadError):
        messages.parse_write_multi(struct.pack("<QQII8s", 1, 0, 0, 9, bytes(8)))


def test_io_fds_share_descriptors() -> None:
    entries = [IoFd(0, 4, 11), IoFd(4, 4, 12, 1, 99), IoFd(8, 0, 11, 0, 5, True)]
    body, fds = messages.pack_io_fds(2, entries, 4096)
    assert fds == (11, 12)
    assert messages.parse_io_fds(body, fds) == tuple(entries)
    short, none = messages.pack_io_fds(2, entries, 16)
    assert (len(short), none) == (16, ())
    assert messages.parse_io_fds(short, ()) == ()


def test_io_fds_that_name_a_missing_descriptor_are_refused() -> None:
    body, _ = messages.pack_io_fds(2, [IoFd(0, 4, 11)], 4096)
    with pytest.raises(PayloadError, match="names descriptor 0 of 0"):
        messages.parse_io_fds(body, ())


@given(u32, st.sampled_from([1, 2, 4, 5, 6, 7]), st.integers(0, 2**16 - 1), st.binary(max_size=50))
def test_feature(argsz: int, methods: int, feature: int, data: bytes) -> None:
    flags = methods << 16
    body = features.pack_feature(flags, feature, data, argsz=argsz)
    assert features.parse_feature(body) == (argsz, flags, feature, data)


@pytest.mark.parametrize("flags", [0, FeatureFlag.GET | FeatureFlag.SET, 1 << 19 | 1 << 16])
def test_feature_flags_that_mean_nothing_are_refused(flags: int) -> None:
    with pytest.raises(PayloadError):
        features.parse_feature(features.pack_feature(flags, 1))


@pytest.mark.parametrize(
    ("address", "length", "page"),
    [(0, 0, 4096), (0, 4096, 0), (0, 4096, 4095), (2**64 - 4096, 8192, 4096)],
)
def test_dirty_report_out_of_range_is_refused(address: int, length: int, page: int) -> None:
    with pytest.raises(PayloadError):
        features.parse_report(features.REPORT.pack(address, length, page))


@pytest.mark.parametrize(
    ("length", "page", "expected"),
    [(4096, 4096, 8), (64 * 4096, 4096, 8), (64 * 4096 + 1, 4096, 16), (1, 4096, 8)],
)
def test_dirty_bitmap_is_whole_words(length: int, page: int, expected: int) -> None:
    assert features.Report(0, length, page).bitmap_bytes == expected


def test_dma_logging_ranges_are_bounded() -> None:
    assert features.parse_logging(features.pack_logging(4096, [(0, 1)])) == (4096, [(0, 1)])
    for count in (1, features.MAX_RANGES + 1, 2**32 - 1):
        with pytest.raises(PayloadError):
            features.parse_logging(features.LOGGING.pack(4096, count, 0))
    with pytest.raises(PayloadError):
        features.parse_logging(features.pack_logging(4096, [(2**64 - 1, 2)]))


PARSERS = [
    messages.parse_dma_map, lambda b: messages.parse_dma_unmap(b, 1), messages.parse_device_info,
    messages.parse_region_info, messages.parse_irq_info, messages.parse_set_irqs,
    messages.parse_write_multi, lambda b: messages.parse_io_fds(b, (1, 2)),
    lambda b: messages.parse_access(b, "x"), lambda b: messages.parse_dma_access(b, "x"),
    features.parse_feature, features.parse_report, features.parse_logging, features.parse_mig_data,
]  # fmt: skip


@given(st.sampled_from(PARSERS), st.binary(max_size=200))
def test_any_body_is_parsed_or_refused(parser: object, body: bytes) -> None:
    with suppress(PayloadError):
        parser(body)  # type: ignore[operator]
