"""The physical function as Linux finds, sizes, enables and disables it, and as lspci decodes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from accelvisor.abi.registers import BAR0_BYTES, DEVICE_ID, VENDOR_ID
from accelvisor.isolation.sriov import Change, PhysicalFunction
from accelvisor.limits import MIB

from .linux_iov import KernelError, Linux

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sriov"
LOW, HIGH = 0xFE00_0000, 0x38_0000_0000
TOTALS = [1, 2, 7, 8, 16, 256]


def started(pf: PhysicalFunction, *, ari_port: bool = True, page_shift: int = 12) -> Linux:
    linux = Linux(pf, ari_port=ari_port, page_shift=page_shift)
    linux.init()
    linux.assign(LOW, HIGH)
    return linux


@pytest.mark.parametrize("page_shift", [12, 14, 16])
@pytest.mark.parametrize("total", TOTALS)
def test_linux_finds_two_bars_and_a_page_size(total: int, page_shift: int) -> None:
    linux = started(PhysicalFunction(total, 4 * MIB), page_shift=page_shift)
    registers, window = linux.resources
    assert (registers.index, registers.wide, registers.prefetchable) == (0, False, False)
    assert (window.index, window.wide, window.prefetchable) == (2, True, True)
    assert (registers.each, registers.total) == (BAR0_BYTES, BAR0_BYTES * total)
    assert (window.each, window.total) == (4 * MIB, 4 * MIB * total)
    assert linux.page_size == {12: 0x1, 14: 0x10, 16: 0x10}[page_shift]


@pytest.mark.parametrize("ari_port", [True, False])
@pytest.mark.parametrize("total", TOTALS)
def test_each_number_of_vfs_gets_its_own_ids_and_memory(total: int, ari_port: bool) -> None:
    pf = PhysicalFunction(total, 4096)
    linux = started(pf, ari_port=ari_port)
    for number in {1, 2, total // 2, total - 1, total} - {0}:
        if number > total:
            continue
        found = linux.enable(number)
        assert (pf.enabled, pf.number) == (True, number)
        ids = [item.routing_id for item in found]
        assert ids == [pf.virtual_function_id(index + 1) for index in range(number)]
        assert len({*ids, pf.routing_id}) == number + 1
        if not ari_port:
            # On the captured bus there is only device 0.
            assert all(item >> 8 != 1 or item & 0xFF < 8 for item in ids)
        assert {(item.vendor, item.device) for item in found} == {(VENDOR_ID, DEVICE_ID)}
        for index, item in enumerate(found, 1):
            assert item.bars == [aperture.of(index) for aperture in pf.apertures()]
        areas = sorted((bar.start, bar.stop) for item in found for bar in item.bars)
        assert all(before[1] <= after[0] for before, after in pairwise(areas))
        assert not any(start % 4096 for start, _ in areas)
        linux.disable()
        assert (pf.enabled, pf.number) == (False, 0)


@pytest.mark.parametrize(("total", "ari_port", "last_bus"), [(16, True, 1), (7, False, 1)])
def test_vfs_that_fit_need_no_second_bus(total: int, ari_port: bool, last_bus: int) -> None:
    linux = Linux(PhysicalFunction(total, 4096), ari_port=ari_port, last_bus=last_bus)
    linux.init()
    linux.assign(LOW, HIGH)
    assert linux.max_bus == 1
    assert {item.routing_id >> 8 for item in linux.enable(total)} == {1}


def test_linux_refuses_vfs_on_a_bus_that_its_port_does_not_have() -> None:
    """Before it sets NumVFs, so the offset must not depend on that."""
    pf = PhysicalFunction(16, 4096)
    linux = Linux(pf, ari_port=False, last_bus=1)
    linux.init()
    linux.assign(LOW, HIGH)
    assert linux.max_bus == 2
    with pytest.raises(KernelError, match="-ENOMEM"):
        linux.enable(16)
    assert not pf.enabled


def test_a_kernel_that_finds_vfs_enabled_clears_them_first() -> None:
    pf = PhysicalFunction(8, 4096)
    started(pf).enable(5)
    again = started(pf)
    assert not pf.enabled
    assert len(again.enable(8)) == 8


def test_after_a_reset_linux_puts_everything_back() -> None:
    pf = PhysicalFunction(16, MIB)
    linux = started(pf)
    before = linux.enable(16)
    # The PF's own command and BARs are saved and restored elsewhere.
    config = pf.read(0x100, 0xF00)
    change = pf.write(0xA8, (0x8000).to_bytes(2, "little"))
    assert change == Change.RESET | Change.DISABLED | Change.NUMBER | Change.MEMORY
    assert not pf.enabled
    linux.restore()
    assert pf.read(0x100, 0xF00) == config
    assert [pf.virtual_function_id(index) for index in range(1, 17)] == [
        item.routing_id for item in before
    ]


# --- lspci ---------------------------------------------------------------------------------------


def enabled() -> PhysicalFunction:
    pf = PhysicalFunction(16, 64 * MIB)
    started(pf).enable(4)
    return pf


def far() -> PhysicalFunction:
    """Without ARI, with large pages: 16 VFs on the next bus."""
    pf = PhysicalFunction(16, 64 * MIB)
    started(pf, ari_port=False, page_shift=16).enable(16)
    return pf


CASES = {"fresh": lambda: PhysicalFunction(8, MIB), "enabled": enabled, "far": far}


@pytest.mark.parametrize("name", CASES)
def test_the_dump_is_the_committed_one(name: str) -> None:
    assert CASES[name]().hexdump() == (FIXTURES / f"{name}.config.txt").read_text()


def essence(text: str) -> list[str]:
    """The device and its extended capabilities, in words that all versions of lspci share."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if "Capabilities: [100" in line)
    extended = [re.sub(r"(10BitTagReq-) .*", r"\1", line) for line in lines[first:] if line]
    return [lines[0], *extended]


@pytest.mark.parametrize("name", CASES)
def test_lspci_decodes_the_dump_as_committed(name: str) -> None:
    lspci = shutil.which("lspci") or shutil.which("lspci", path="/usr/bin:/usr/sbin")
    if lspci is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no lspci: apt-get install pciutils", pytrace=False)
        pytest.skip("there is no lspci: apt-get install pciutils")
    done = subprocess.run(
        [lspci, "-F", str(FIXTURES / f"{name}.config.txt"), "-n", "-vv"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert essence(done.stdout) == essence((FIXTURES / f"{name}.lspci.txt").read_text())


def test_what_lspci_decoded_is_what_was_set() -> None:
    """The committed decoding itself, by numbers: it must not be a golden file of nonsense."""
    text = (FIXTURES / "far.lspci.txt").read_text()
    for line in (
        "IOVCtl:	Enable+ Migration- Interrupt- MSE+ ARIHierarchy- 10BitTagReq-",
        "Initial VFs: 16, Total VFs: 16, Number of VFs: 16, Function Dependency Link: 00",
        "VF offset: 256, stride: 1, Device ID: 0001",
        "Supported Page Size: 00000553, System Page Size: 00000010",
        "Region 0: Memory at fe000000 (32-bit, non-prefetchable)",
        "Region 2: Memory at 0000003800000000 (64-bit, prefetchable)",
        "VF Migration: offset: 00000000, BIR: 0",
    ):
        assert line in text
    assert "VF offset: 1, stride: 1, Device ID: 0001" in (
        (FIXTURES / "enabled.lspci.txt").read_text()
    )
