"""Instructions that exchange packed and dense messages between chips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelvisor.abi.shapes import bind_shapes
from accelvisor.collectives import zvc
from accelvisor.collectives.kinds import BY_NAME as KINDS
from accelvisor.collectives.kinds import Op
from accelvisor.errors import NumericError, ProgramError
from accelvisor.kernels import exchange
from accelvisor.kernels.declare import Array, Instruction, Queue
from accelvisor.kernels.registry import BY_NAME


def run(instruction: Instruction, arrays: list[Array], **attributes: int) -> None:
    values = tuple(attributes.get(a.name, a.default) for a in instruction.attributes)
    bind_shapes(instruction.declaration, [a.shape for a in arrays], attributes)
    for tile in range(instruction.tiles([a.shape for a in arrays], values)):
        instruction.run_tile(arrays, values, tile)


def packed_of(x: Array, **attributes: int) -> Array:
    block = attributes.get("block", exchange.BLOCK)
    packed = np.full(exchange.packed_elements(x.size, block), 7, x.dtype)
    run(BY_NAME["zvc_pack"], [x, packed], **attributes)
    return packed


def sparse(n: int, dtype: str = "float32", part: float = 0.1, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    x = (random.standard_normal(n) * 50).astype(dtype)
    x[random.random(n) >= part] = 0
    return x


def test_all_of_them_run_on_the_transfer_queue_and_name_their_link() -> None:
    for instruction in exchange.INSTRUCTIONS:
        assert instruction.queue is Queue.TRANSFER
        assert [a.name for a in instruction.attributes[:2]] == ["source", "target"]
        assert all(a.default == a.minimum == -1 for a in instruction.attributes[:2])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int64", "uint16"])
def test_a_packed_ring_ends_with_the_bits_of_a_dense_one(op: Op, dtype: str) -> None:
    n, block = 1000, 300
    chips = [sparse(n, dtype, seed=i) for i in range(4)]
    chips[1][0], chips[2][0] = 3, -3 if dtype[0] != "u" else 3
    for bfloat16 in (0, 1) if dtype == "uint16" else (0,):
        dense, packed = chips[0], packed_of(chips[0], block=block, bfloat16=bfloat16)
        for own in chips[1:]:
            result, message = np.empty_like(own), np.full_like(packed, 9)
            run(BY_NAME["ring_hop"], [dense, own, result], op=op, bfloat16=bfloat16)
            run(
                BY_NAME["zvc_hop"], [packed, own, message], op=op, block=block, bfloat16=bfloat16
            )
            dense, packed = result, message
        out = np.full(n, 5, dtype)
        run(BY_NAME["zvc_unpack"], [packed, out], block=block, bfloat16=bfloat16)
        assert out.tobytes() == dense.tobytes()
        # Canonical, so packing the dense result is the same message.
        again = packed_of(dense, block=block, bfloat16=bfloat16)
        assert again.tobytes() == packed.tobytes()


def test_what_a_link_carries_is_the_formula() -> None:
    x = sparse(3 * exchange.BLOCK + 5)
    packed = packed_of(x)
    wanted = sum(
        zvc.packed_bytes(part.size, int(np.count_nonzero(part)), 4)
        for part in np.split(x, [exchange.BLOCK, 2 * exchange.BLOCK, 3 * exchange.BLOCK])
    )
    assert exchange.link_bytes(packed, x.size) == wanted < x.nbytes / 6


def test_a_packed_tensor_of_the_wrong_size_is_refused_before_it_runs() -> None:
    x = sparse(100)
    with pytest.raises(ProgramError):
        run(BY_NAME["zvc_unpack"], [np.zeros(115, "f4"), x])


def _damaged() -> list[tuple[str, Any]]:
    head = zvc.HEADER
    return [
        ("zeros", lambda b: b.fill(0)),
        ("ones", lambda b: b.fill(255)),
        ("more values than elements", lambda b: head.pack_into(b, 0, 1, 1, 0, 200, 2**32 - 1, 0)),
        ("a huge raw block", lambda b: head.pack_into(b, 0, 1, 1, 1, 2**32 - 1, 2**32 - 1, 0)),
        ("another dtype", lambda b: b.__setitem__(1, 2)),
        ("a bit of the mask", lambda b: b.__setitem__(16, b[16] ^ 1)),
        ("a bit of a value", lambda b: b.__setitem__(48, b[48] ^ 1)),
    ]


@pytest.mark.parametrize("twin", ["fast", "reference"])
@pytest.mark.parametrize("damage", _damaged(), ids=lambda d: d[0])
def test_a_block_that_is_not_packed_is_a_fault(damage: tuple[str, Any], twin: str) -> None:
    twins: dict[str, Any] = {
        "fast": lambda i, arrays, values: i.run_tile(arrays, values, 0),
        "reference": lambda i, arrays, values: i.run_reference(arrays, values),
    }
    x = sparse(200, part=0.5)
    good = packed_of(x, block=200)
    for name, outputs in (("zvc_unpack", [x.copy()]), ("zvc_hop", [x, good.copy()])):
        bad = good.copy()
        damage[1](bad.view(np.uint8))
        arrays = [bad, *outputs]
        values = (-1, -1, 0, 200) if name == "zvc_unpack" else (-1, -1, 0, 0, 200)
        with pytest.raises(NumericError, match="block 0"):
            twins[twin](BY_NAME[name], arrays, values)


def test_a_right_checksum_over_a_mask_with_too_many_bits_is_a_fault() -> None:
    """Whoever makes a hostile block computes its checksum as well."""
    import struct
    import zlib

    x = sparse(64, part=0.1)
    packed = packed_of(x, block=64)
    raw = packed.view(np.uint8)
    nnz = int(np.count_nonzero(x))
    raw[16:24] = 255
    body = raw[16 : 24 + 4 * nnz].tobytes()
    head = raw[:12].tobytes()
    raw[12:16] = np.frombuffer(struct.pack("<I", zlib.crc32(head + body)), np.uint8)
    with pytest.raises(NumericError, match="as many bits"):
        run(BY_NAME["zvc_unpack"], [packed, x.copy()], block=64)


def test_numba_is_not_imported_by_running_them() -> None:
    """It would be tens of megabytes in each worker, and seconds in one tile."""
    import subprocess
    import sys

    code = (
        "import sys, numpy as np\n"
        "from accelvisor.kernels.registry import BY_NAME\n"
        "x = np.zeros(100, 'f4'); p = np.zeros(116, 'f4')\n"
        "BY_NAME['zvc_pack'].run_tile([x, p], (-1, -1, 0, 65536), 0)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dtype_but_bool_can_be_exchanged() -> None:
    labels = {d.label for d in exchange.EXCHANGED}
    assert labels == set(KINDS) - {"bfloat16"}
