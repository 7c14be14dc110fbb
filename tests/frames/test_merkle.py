"""The tree that grows leaf by leaf against RFC 6962's definition."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import DataError
from accelvisor.frames.merkle import Merkle, node_hash, plain_root


def leaves(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([0]) + i.to_bytes(4, "little")).digest() for i in range(count)]


@pytest.mark.parametrize("count", [*range(70), 127, 128, 129, 1000])
def test_growing_is_the_definition(count: int) -> None:
    tree = Merkle()
    for leaf in leaves(count):
        tree.add(leaf)
    assert tree.root() == plain_root(leaves(count))
    assert tree.size == count
    assert len(tree.peaks) == count.bit_count()


@given(st.integers(0, 300), st.integers(0, 300))
def test_goes_on_from_its_peaks(before: int, after: int) -> None:
    tree = Merkle()
    for leaf in leaves(before):
        tree.add(leaf)
    again = Merkle(tree.size, tree.peaks)
    for leaf in leaves(before + after)[before:]:
        again.add(leaf)
    assert again.root() == plain_root(leaves(before + after))


def test_asking_for_the_root_changes_nothing() -> None:
    tree = Merkle()
    for count, leaf in enumerate(leaves(20), 1):
        tree.add(leaf)
        assert tree.root() == tree.root() == plain_root(leaves(count))


def test_known_roots_of_rfc_6962() -> None:
    """The test vectors of Certificate Transparency's reference implementation."""
    data = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657",
            "606162636465666768696a6b6c6d6e6f"]  # fmt: skip
    roots = [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    ]
    tree = Merkle()
    assert tree.root().hex() == hashlib.sha256(b"").hexdigest()
    for text, root in zip(data, roots, strict=True):
        tree.add(hashlib.sha256(b"\x00" + bytes.fromhex(text)).digest())
        assert tree.root().hex() == root


def test_leaf_cannot_pass_for_a_node() -> None:
    a, b = leaves(2)
    tree = Merkle()
    tree.add(hashlib.sha256(b"\x00" + a + b).digest())
    assert tree.root() != node_hash(a, b)


@given(st.integers(2, 64), st.data())
def test_swapping_two_leaves_changes_the_root(count: int, data: st.DataObject) -> None:
    order = leaves(count)
    i, j = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    order[i], order[j] = order[j], order[i]
    assert plain_root(order) != plain_root(leaves(count))


@pytest.mark.parametrize(
    ("size", "peaks"), [(1, []), (3, [b""] * 2), (-1, []), (2, [bytes(32)] * 2)]
)
def test_peaks_of_no_tree_are_refused(size: int, peaks: list[bytes]) -> None:
    with pytest.raises(DataError):
        Merkle(size, peaks)
