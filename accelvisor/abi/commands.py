"""Submission entries (64 bytes) and completion entries (32 bytes): layouts and constructors.

A submission entry is ``opcode u16 | flags u16 | cookie u32 | 56 bytes of operands``. The device
copies an entry out of the window once, then validates the copy, so a guest that changes it
meanwhile gains nothing. Encoders are for the guest and trust their caller's types; decoders are for
the device and never raise on any 64 bytes.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from accelvisor.abi.dtypes import DType


class Opcode(IntEnum):
    NOP = 0x00
    CONTEXT_OPEN = 0x01
    CONTEXT_CLOSE = 0x02
    TENSOR_CREATE = 0x10
    TENSOR_DESTROY = 0x11
    PROGRAM_LOAD = 0x12
    PROGRAM_UNLOAD = 0x13
    GRAPH_LOAD = 0x14
    GRAPH_UNLOAD = 0x15
    COPY_IN = 0x20
    COPY_OUT = 0x21
    LAUNCH = 0x30
    GRAPH_LAUNCH = 0x31
    FENCE = 0x40
    QUERY = 0x50
    LINK_SWITCH = 0x60


class Flag(IntFlag):
    INTERRUPT = 1 << 0  # raise Interrupt.COMPLETION when this command completes
    # Without one of the following a command is *ordered*: it begins when all earlier ones of its
    # queue are complete, and no later one begins before it is.
    PLAIN = 1 << 1  # depends on nothing
    SYNC = 1 << 2  # as PLAIN, and later commands may depend on it
    CONDITIONAL = 1 << 3  # depends on one SYNC; with SYNC others may depend on it in turn


#: The kinds of commands that are not ordered, as flags.
COMMAND_KINDS = (Flag.PLAIN, Flag.SYNC, Flag.CONDITIONAL, Flag.SYNC | Flag.CONDITIONAL)


class Space(IntEnum):
    """Which address space an address operand lies in."""

    GUEST = 0  # guest RAM as the device sees it (IOVA; guest-physical without an IOMMU)
    WINDOW = 1  # byte offset into BAR2, at or above STAGING_OFFSET


class Transfer(IntFlag):
    """How a memory operand of (space, address, length) is to be read."""

    SCATTER = 1 << 0  # ``address`` is a list of ``count`` SEGMENT records in ``space``


class Query(IntEnum):
    INFO = 0  # JSON: identity, resources, state
    INSTRUCTIONS = 1  # JSON: the instruction set (the declarations of architecture.md section 9)
    STATISTICS = 2  # JSON: counters
    FAULT = 3  # JSON: the context's last refusal or fault, with text
    OBJECTS = 4  # JSON: the context's tensors and programs
    TRACE = 5  # JSON: which of the context's programs ran on which queue, and when
    FABRIC = 6  # JSON: the function's chips and links


class Header(NamedTuple):
    opcode: int
    flags: int
    cookie: int


class Completion(NamedTuple):
    cookie: int
    status: int  # CommandStatus
    opcode: int
    value: int  # a handle, a byte count or an element, by opcode
    cycles: int  # model clock cycles that the command took


class Memory(NamedTuple):
    """A memory operand: one span, or with Transfer.SCATTER a list of segments."""

    space: int
    transfer: int
    address: int
    length: int  # bytes in all
    count: int  # type: ignore[assignment]  # segments; 0 without SCATTER (hides tuple.count)


class Binding(NamedTuple):
    """What a program's slot is bound to: a tensor, from a byte offset on."""

    handle: int
    offset: int


HEADER = struct.Struct("<HHI")
COMPLETION = struct.Struct("<IHHQQQ")  # cookie, status, opcode, value, cycles, reserved
SEGMENT = struct.Struct("<QQ")  # address, bytes
BINDING = struct.Struct("<QQ")  # handle, byte offset
MEMORY = struct.Struct("<BBHIQQ")  # space, transfer, -, count, address, length
OPEN = struct.Struct("<I48s")  # pid, process name (UTF-8, zero padded)
CREATE = struct.Struct("<BBH8I")  # dtype, rank, -, dims
HANDLE = struct.Struct("<Q")
COPY = struct.Struct("<QQ24s")  # handle, byte offset in the tensor, MEMORY
LOAD = struct.Struct("<24s")  # MEMORY of the program's bytes
LAUNCH = struct.Struct("<QII24s")  # program, repeat, bindings, MEMORY of a BINDING list
QUERY = struct.Struct("<HHI24s")  # what, -, -, MEMORY to write the answer to
GRAPH_LAUNCH = struct.Struct("<QI")  # graph, repeat
LINK = struct.Struct("<IB")  # link (ALL_LINKS: every one), 1 up or 0 down
ALL_LINKS = 0xFFFF_FFFF
#: The last 16 bytes of an entry that is not ordered: chip (ANY_CHIP: whichever is free), the id
#: that a SYNC has, the id that a CONDITIONAL depends on. Zero where an entry is ordered.
SCHEDULE = struct.Struct("<BxHIII")  # chip, -, id, depends, -
SCHEDULE_AT = 48
ANY_CHIP = 0xFF


def _entry(opcode: Opcode, cookie: int, operands: bytes, flags: int) -> bytes:
    return (HEADER.pack(opcode, flags, cookie) + operands).ljust(64, b"\0")


def memory(m: Memory) -> bytes:
    return MEMORY.pack(m.space, m.transfer, 0, m.count, m.address, m.length)


def parse_memory(raw: bytes) -> Memory:
    space, transfer, _, count, address, length = MEMORY.unpack(raw)
    return Memory(space, transfer, address, length, count)


def nop(cookie: int, flags: int = 0) -> bytes:
    return _entry(Opcode.NOP, cookie, b"", flags)


def context_open(cookie: int, pid: int, name: str, flags: int = 0) -> bytes:
    encoded = name.encode()[:48]
    return _entry(Opcode.CONTEXT_OPEN, cookie, OPEN.pack(pid, encoded), flags)


def context_close(cookie: int, flags: int = 0) -> bytes:
    return _entry(Opcode.CONTEXT_CLOSE, cookie, b"", flags)


def tensor_create(cookie: int, dtype: DType, shape: tuple[int, ...], flags: int = 0) -> bytes:
    dims = shape + (0,) * (8 - len(shape))
    return _entry(Opcode.TENSOR_CREATE, cookie, CREATE.pack(dtype, len(shape), 0, *dims), flags)


def tensor_destroy(cookie: int, handle: int, flags: int = 0) -> bytes:
    return _entry(Opcode.TENSOR_DESTROY, cookie, HANDLE.pack(handle), flags)


def program_load(cookie: int, source: Memory, flags: int = 0) -> bytes:
    return _entry(Opcode.PROGRAM_LOAD, cookie, LOAD.pack(memory(source)), flags)


def program_unload(cookie: int, handle: int, flags: int = 0) -> bytes:
    return _entry(Opcode.PROGRAM_UNLOAD, cookie, HANDLE.pack(handle), flags)


def copy_in(cookie: int, handle: int, offset: int, source: Memory, flags: int = 0) -> bytes:
    """Guest RAM or window -> tensor. ``offset`` is in bytes from the tensor's start."""
    return _entry(Opcode.COPY_IN, cookie, COPY.pack(handle, offset, memory(source)), flags)


def copy_out(cookie: int, handle: int, offset: int, target: Memory, flags: int = 0) -> bytes:
    """Tensor -> guest RAM or window."""
    return _entry(Opcode.COPY_OUT, cookie, COPY.pack(handle, offset, memory(target)), flags)


def launch(
    cookie: int, program: int, bindings: int, source: Memory, repeat: int = 1, flags: int = 0
) -> bytes:
    """Run a program ``repeat`` times. ``source`` holds ``bindings`` BINDING records, one for each
    argument slot of the program in order.
    """
    operands = LAUNCH.pack(program, repeat, bindings, memory(source))
    return _entry(Opcode.LAUNCH, cookie, operands, flags)


def graph_load(cookie: int, source: Memory, flags: int = 0) -> bytes:
    """Upload a graph (graphs.py); the completion's value is its handle."""
    return _entry(Opcode.GRAPH_LOAD, cookie, LOAD.pack(memory(source)), flags)


def graph_unload(cookie: int, handle: int, flags: int = 0) -> bytes:
    return _entry(Opcode.GRAPH_UNLOAD, cookie, HANDLE.pack(handle), flags)


def graph_launch(cookie: int, graph: int, repeat: int = 1, flags: int = 0) -> bytes:
    """Run a graph ``repeat`` times, one after the other."""
    return _entry(Opcode.GRAPH_LAUNCH, cookie, GRAPH_LAUNCH.pack(graph, repeat), flags)


def scheduled(entry: bytes, flags: Flag, chip: int = ANY_CHIP, own: int = 0, on: int = 0) -> bytes:
    """``entry`` as a command that is not ordered.

    Args:
        flags: PLAIN, SYNC, CONDITIONAL, or SYNC and CONDITIONAL.
        own: of a SYNC: the id by which others name it, from 1 on; not one that is still running.
        on: of a CONDITIONAL: the id of what it depends on.
    """
    opcode, before, cookie = HEADER.unpack_from(entry)
    head = HEADER.pack(opcode, before | flags, cookie)
    return head + entry[HEADER.size : SCHEDULE_AT] + SCHEDULE.pack(chip, 0, own, on, 0)


def link_switch(cookie: int, link: int, on: bool, flags: int = 0) -> bytes:
    """Bring a link of the function up or down. Completes when it is; a link that transfers use
    goes down when they have ended.
    """
    return _entry(Opcode.LINK_SWITCH, cookie, LINK.pack(link, on), flags)


def fence(cookie: int, flags: int = 0) -> bytes:
    """Completes when every earlier command of the queue has completed."""
    return _entry(Opcode.FENCE, cookie, b"", flags)


def query(cookie: int, what: Query, target: Memory, flags: int = 0) -> bytes:
    """The completion's value is the answer's length in bytes, also when it did not fit."""
    return _entry(Opcode.QUERY, cookie, QUERY.pack(what, 0, 0, memory(target)), flags)


def parse_completion(raw: bytes) -> Completion:
    cookie, status, opcode, value, cycles, _ = COMPLETION.unpack(raw)
    return Completion(cookie, status, opcode, value, cycles)


def pack_completion(c: Completion) -> bytes:
    return COMPLETION.pack(c.cookie, c.status, c.opcode, c.value, c.cycles, 0)
