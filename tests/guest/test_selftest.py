"""The self-test passes on a good device and names what is wrong with a bad one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accelvisor.abi.registers import Reg
from accelvisor.guest import bench, selftest
from accelvisor.guest.expected import EXPECTED
from accelvisor.guest.function import Function
from accelvisor.kernels.registry import BY_NAME

from .fake_device import FakeDevice, _row

Open = Callable[..., Function]


def good(**changes: Any) -> FakeDevice:
    return FakeDevice(real_kernels=True, window_bytes=1 << 20, entries=64, **changes)


def states(fn: Function) -> dict[str, tuple[str, str]]:
    return {o.name: (o.state, o.detail) for o in selftest.run(fn)}


def test_a_good_device_passes_everything(open_function: Open) -> None:
    found = states(open_function(good()))
    assert {state for state, _ in found.values()} == {"ok"}


def test_without_interrupts_and_dma_those_checks_are_absent_not_passed(
    open_function: Open,
) -> None:
    found = states(open_function(good(interrupts=False, dma_refused=True)))
    absent = {name for name, (state, _) in found.items() if state == "absent"}
    assert absent == {
        "interrupts", "copies by DMA", "copies of pinned memory", "scatter lists",
    }  # fmt: skip


def test_a_lost_interrupt_is_found(open_function: Open) -> None:
    assert states(open_function(good(lose_interrupts=True)))["interrupts"][0] == "failed"


def test_a_stuck_register_bit_is_found(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    read = device.read32
    device.read32 = lambda at: read(at) & ~4 if at == Reg.SCRATCH else read(at)  # type: ignore[method-assign]
    state, detail = states(fn)["scratch register"]
    assert (state, "read 0xfffffffb" in detail) == ("failed", True)


def test_a_wrong_byte_of_a_copy_is_found_with_its_place(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    put = device._put

    def wrong(memory: Any, data: bytes) -> None:
        if memory.length == 4097:
            data = data[:4096] + bytes([data[4096] ^ 1])
        put(memory, data)

    device._put = wrong  # type: ignore[method-assign]
    found = states(fn)
    for name in ("copies by window", "copies by DMA"):
        assert found[name][0] == "failed"
        assert "4097 bytes: byte 4096" in found[name][1]


def test_writing_beside_a_scatter_list_is_found(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    spans = device._spans

    def sloppy(memory: Any) -> list[tuple[int, int]]:
        found = spans(memory)
        if memory.count == 5:
            address, size = found[0]
            beside = device._find(0, address, size + 1)
            beside[size] = (beside[size] + 1) & 0xFF
        return found

    device._spans = sloppy  # type: ignore[method-assign]
    assert states(fn)["scatter lists"][0] == "failed"


def test_a_wrong_instruction_is_named_and_the_others_are_still_tried(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    interpret = device._interpret

    def wrong(program: Any, bound: Any, repeat: int) -> tuple[int, int]:
        result = interpret(program, bound, repeat)
        if program.operations[0].opcode == BY_NAME["tanh"].opcode:
            data = device.tensors[bound[-1][0]][2]
            value = struct.unpack_from("<f", data, 8)[0]
            struct.pack_into("<f", data, 8, value * 1.0001)
        return result

    device._interpret = wrong  # type: ignore[method-assign]
    state, detail = states(fn)["instructions"]
    assert state == "failed"
    assert detail.startswith("tanh: differs by up to")
    assert ";" not in detail


def test_a_device_that_takes_any_program_is_found(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    load = device._program_load
    device._program_load = lambda queue, raw: (0, load(queue, raw)[1] or 1)  # type: ignore[method-assign]
    assert states(fn)["a bad program"][0] == "failed"


def test_a_device_that_ignores_bad_addresses_is_found(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    device._get = lambda memory: b"x" * memory.length  # type: ignore[method-assign]
    assert states(fn)["a bad address"][0] == "failed"


def test_instructions_without_a_formula_are_executed(
    open_function: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(window_bytes=1 << 20)
    table = device._table()
    more = [_row("twist", 5, [("x", "*s")], "*s"), _row("stretch", 5, [("x", "n (n+1)")], "n")]
    monkeypatch.setattr(device, "_table", lambda: [*table, *more])
    fn = open_function(device)
    monkeypatch.delitem(EXPECTED, "sgd")  # the fake's own has other attributes
    state, detail = states(fn)["instructions"]
    assert state == "ok"
    assert "twist" in detail
    assert "stretch (not tried" in detail


def test_every_instruction_of_the_device_has_a_formula() -> None:
    assert set(BY_NAME) - set(EXPECTED) == set()


def test_the_formulas_notice_a_difference() -> None:
    for name, case in EXPECTED.items():
        wanted = case.compute(*case.arrays(1), **case.attributes)
        first = np.asarray(wanted[0] if isinstance(wanted, tuple) else wanted)
        off = first.copy()
        flat = off.reshape(-1)
        flat[0] = not flat[0] if off.dtype == np.bool_ else flat[0] * 1.01 + 1
        assert case.agrees(first, first), name
        assert not case.agrees(off, first), name


def test_figures_are_medians_between_their_quartiles(open_function: Open) -> None:
    device = good()
    fn = open_function(device)
    figures = {f.name: f for f in bench.run(fn, quick=True)}
    assert {"register read", "command round trip", "no-op commands, 32 in flight"} <= set(figures)
    assert any(name.startswith("DMA in") for name in figures)
    assert any(name.startswith("matmul") for name in figures)
    for figure in figures.values():
        assert 0 < figure.low <= figure.value <= figure.high
        assert figure.to_dict()["unit"] == figure.unit
