from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import AccelvisorError, StateError, SystemFailure
from accelvisor.function.pci import CONFIG_BYTES, _initial, _writable
from accelvisor.hypervisor import context, xml
from tests.hypervisor.samples import UUID

PORT = xml.port_id(UUID)
WINDOW = 16 << 20


def of_function(**changes: Any) -> bytes:
    """A function's configuration space as a guest left it."""
    values = {"bar0": 0xFDE0_0000, "bar2": 0xFE_0000_0000, "command": 0x0406, "enable": 1}
    values |= changes
    config = _initial()
    struct.pack_into("<H", config, 0x04, values["command"])
    struct.pack_into("<I", config, 0x10, values["bar0"])
    struct.pack_into("<Q", config, 0x18, values["bar2"] | 0xC)
    config[0x3C] = 11
    struct.pack_into("<HIIH", config, 0x82, 0x80 | values["enable"], 0xFEE0_0438, 0x12, 0x4161)
    return bytes(config)


class Machine:
    """A QEMU that waits: a root port at slot 4 with a function behind it, and the ports of PCI.

    Written from the specifications, not from what it is to test: an access reaches the bus whose
    range has its number, as a bridge forwards it; bits that no guest can change keep their values.
    """

    def __init__(self, *, secondary: int = 0, latch: int = 0x8000_2400, stuck: int = 0) -> None:
        self.latch = latch
        self.port = bytearray(256)
        self.port[0x18:0x1B] = bytes([0, secondary, secondary])
        self.port[0x1B] = 0x40
        self.function = _initial()
        self.mask = _writable(WINDOW)
        for at in range(stuck, stuck + 4 if stuck else 0):
            self.mask[at] = 0
        self.lines: list[str] = []
        #: (command register, BAR0) after each access to the function.
        self.seen: list[tuple[int, int]] = []
        self.fail_after = 1 << 30

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        if command == "qom-get":
            assert arguments == {
                "path": f"/machine/peripheral/accel-{UUID}", "property": "parent_bus",
            }  # fmt: skip
            return f"/machine/peripheral/{PORT}/{PORT}"
        assert command == "query-pci"
        bus = {"number": 0, "secondary": self.port[0x19], "subordinate": self.port[0x1A]}
        port = {"bus": 0, "slot": 4, "function": 0, "qdev_id": PORT, "pci_bridge": {"bus": bus}}
        return [{"bus": 0, "devices": [port]}]

    async def human(self, line: str) -> str:
        self.lines.append(line)
        if len(self.lines) > self.fail_after:
            raise SystemFailure("QEMU is gone")
        if found := re.fullmatch(r"o /([bhw]) (0x[0-9a-f]+) (0x[0-9a-f]+)", line):
            self._write(int(found[2], 16), "bhw".index(found[1]), int(found[3], 16))
            return ""
        found = re.fullmatch(r"i /([bhw]) (0x[0-9a-f]+)", line)
        assert found, line
        size = 1 << "bhw".index(found[1])
        value = self._read(int(found[2], 16), size)
        return f"port{'bwl'['bhw'.index(found[1])]}[{found[2]}] = {value:#0{2 + 2 * size}x}\r\n"

    def _target(self) -> tuple[bytearray, int] | None:
        bus, devfn = self.latch >> 16 & 0xFF, self.latch >> 8 & 0xFF
        if not self.latch >> 31:
            return None
        if (bus, devfn) == (0, 4 << 3):
            return self.port, self.latch & 0xFC
        if bus and self.port[0x19] <= bus <= self.port[0x1A] and bus == self.port[0x19]:
            return (self.function, self.latch & 0xFC) if devfn == 0 else None
        return None

    def _write(self, port: int, order: int, value: int) -> None:
        size = 1 << order
        assert value < 1 << 8 * size
        if port == 0xCF8:
            assert size == 4
            self.latch = value
            return
        target = self._target()
        assert target is not None, "a write that reaches no device"
        cells, register = target
        at = register + port - 0xCFC
        assert at % size == 0
        for position, byte in enumerate(value.to_bytes(size, "little"), at):
            bits = 0xFF if cells is self.port else self.mask[position]
            cells[position] = cells[position] & ~bits & 0xFF | byte & bits
        if cells is self.function:
            command, bar = struct.unpack_from("<H10xI", cells, 4)
            self.seen.append((command, bar))

    def _read(self, port: int, size: int) -> int:
        if port == 0xCF8:
            return self.latch
        target = self._target()
        if target is None:
            return (1 << 8 * size) - 1
        cells, register = target
        at = register + port - 0xCFC
        return int.from_bytes(cells[at : at + size], "little")

    def restore(self, config: bytes) -> None:
        asyncio.run(context.restore(self, UUID, config))


@pytest.mark.parametrize("secondary", [0, 6])
def test_the_function_gets_its_context_and_nothing_else_changes(secondary: int) -> None:
    """Before the port's numbers came, and after."""
    machine = Machine(secondary=secondary)
    before = bytes(machine.port)
    machine.restore(of_function())
    assert bytes(machine.function) == of_function()
    assert bytes(machine.port) == before
    assert machine.latch == 0x8000_2400


def test_another_context_replaces_the_first_one() -> None:
    machine = Machine()
    machine.restore(of_function())
    later = of_function(bar0=0xFC00_0000, bar2=0x80_0000_0000, command=0, enable=0)
    machine.restore(later)
    assert bytes(machine.function) == later


def test_no_bar_is_decoded_at_half_an_address() -> None:
    machine = Machine()
    machine.restore(of_function())
    machine.seen.clear()
    machine.restore(of_function(bar0=0xFC00_0000))
    assert {bar for command, bar in machine.seen if command & 2} == {0xFC00_0000}


def test_what_the_device_does_not_keep_is_an_error_and_the_port_is_given_back() -> None:
    machine = Machine(stuck=0x84)
    with pytest.raises(SystemFailure) as caught:
        machine.restore(of_function())
    assert caught.value.code == "context-restore"
    assert "0x84" in caught.value.message
    assert (machine.port[0x19], machine.latch) == (0, 0x8000_2400)


@given(st.integers(0, 60))
def test_a_monitor_that_fails_at_any_step_is_that_error(after: int) -> None:
    machine = Machine()
    machine.fail_after = after
    try:
        machine.restore(of_function())
    except AccelvisorError as error:
        said = error.message
    else:
        said = ""
    assert said in ("QEMU is gone", "")
    assert bool(said) is (len(machine.lines) > after)


@pytest.mark.parametrize("answer", ["unknown command: 'i'\r\n", "", "port = x"])
def test_a_monitor_that_speaks_otherwise_is_understood_by_nobody(answer: str) -> None:
    machine = Machine()

    async def human(_: str) -> str:
        return answer

    machine.human = human  # type: ignore[method-assign]
    with pytest.raises(SystemFailure) as caught:
        machine.restore(of_function())
    assert caught.value.code == "context-restore"


@pytest.mark.parametrize(
    "config",
    [
        b"",
        bytes(256),
        bytes(CONFIG_BYTES),
        b"\xff" * CONFIG_BYTES,
        of_function()[:0x34] + b"\xa0" + of_function()[0x35:],  # MSI is before that
    ],
)
def test_what_is_no_functions_configuration_space_is_refused(config: bytes) -> None:
    with pytest.raises(StateError) as caught:
        context.plan(config)
    assert caught.value.code == "context-config"


@given(st.binary(min_size=256, max_size=256), st.sampled_from([0x40, 0x80, 0xEC, 0xF0, 0xFC]))
def test_capabilities_of_any_shape_give_writes_that_the_ports_reach(noise: bytes, at: int) -> None:
    config = bytearray(noise + bytes(CONFIG_BYTES - 256))
    config[0x34], config[at] = at, 5
    try:
        steps = context.plan(bytes(config))
    except StateError:
        return
    assert all(step.register + step.width <= 256 for step in steps)
    assert all(step.register % step.width == 0 for step in steps)


# --- places --------------------------------------------------------------------------------------


def bridge(identifier: str, slot: int, secondary: int, subordinate: int) -> dict[str, Any]:
    bus = {"number": 0, "secondary": secondary, "subordinate": subordinate}
    there = {"bus": 0, "slot": slot, "function": 0, "qdev_id": identifier}
    return {**there, "pci_bridge": {"bus": bus}}


def test_the_number_lent_is_no_other_bridges() -> None:
    buses = [{"bus": 0, "devices": [bridge("a", 1, 1, 0xFE), bridge(PORT, 2, 0, 0)]}]
    assert context.Place.find(buses, PORT) == context.Place(2, 0, 0xFF)
    buses.append({"bus": 0xFF, "devices": []})
    with pytest.raises(AccelvisorError) as caught:
        context.Place.find(buses, PORT)
    assert caught.value.code == "context-port"


@pytest.mark.parametrize("port", ["", "pci.1", xml.spare_id(0)])
def test_a_port_that_is_not_on_the_first_bus_is_not_found(port: str) -> None:
    with pytest.raises(AccelvisorError) as caught:
        context.Place.find([{"bus": 0, "devices": [bridge(PORT, 2, 0, 0)]}, {"bus": 3}], port)
    assert caught.value.code == "context-port"


# --- the source's BARs ---------------------------------------------------------------------------


def buses(*regions: dict[str, Any]) -> list[Any]:
    device = {"bus": 6, "slot": 0, "function": 0, "qdev_id": f"accel-{UUID}", "regions": regions}
    port = bridge(PORT, 4, 6, 6)
    port["pci_bridge"]["devices"] = [device]
    return [{"bus": 0, "devices": [port]}]


def region(bar: int, address: int, *, wide: bool = False) -> dict[str, Any]:
    return {"bar": bar, "type": "memory", "address": address, "mem_type_64": wide, "prefetch": wide}


def test_bars_that_a_function_level_reset_cleared_are_qemus() -> None:
    cleared = of_function(bar0=0, bar2=0)
    there = buses(region(0, 0xFDE0_0000), region(2, 0xFE_0000_0000, wide=True))
    assert context.with_bars(cleared, there, UUID) == of_function()


@pytest.mark.parametrize("reply", [[], buses(), buses(region(0, -1), region(7, 4096))])
def test_bars_that_qemu_has_nowhere_stay_as_the_function_has_them(reply: list[Any]) -> None:
    assert context.with_bars(of_function(), reply, UUID) == of_function()
