"""Tensors as a numpy user expects them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelvisor.abi.dtypes import DType
from accelvisor.errors import UsageError
from accelvisor.guest.function import Function
from accelvisor.guest.tensor import device_dtype

from .fake_device import FakeDevice


@pytest.mark.parametrize("dtype", [d.label for d in DType])
def test_every_dtype_comes_back_as_it_went(fn: Function, dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    tensor = fn.tensor(array)
    assert tensor.dtype == array.dtype
    assert np.array_equal(tensor.numpy(), array)


def test_python_floats_become_float32_and_arrays_keep_their_type(fn: Function) -> None:
    assert fn.tensor([1.5]).dtype == np.float32
    assert fn.tensor(np.array([1.5])).dtype == np.float64
    assert fn.tensor([1]).dtype == np.int64


def test_scalars_and_empty_tensors(fn: Function) -> None:
    assert fn.tensor(3.5).shape == ()
    assert fn.tensor(3.5).item() == 3.5
    empty = fn.tensor(np.empty((3, 0), np.float32))
    assert empty.numpy().shape == (3, 0)
    assert empty.nbytes == 0


def test_what_it_is(fn: Function) -> None:
    tensor = fn.empty((2, 3), "int16")
    assert (tensor.ndim, tensor.size, tensor.nbytes, len(tensor)) == (2, 6, 12, 2)
    assert repr(tensor) == "<Tensor int16 (2, 3)>"
    with pytest.raises(TypeError):
        len(fn.tensor(1.0))


def test_fills(fn: Function) -> None:
    assert fn.zeros((2, 2)).numpy().tolist() == [[0, 0], [0, 0]]
    assert fn.ones(3, "int32").numpy().tolist() == [1, 1, 1]
    assert fn.full((2,), 7, "uint8").numpy().tolist() == [7, 7]  # not a type of the fake's fill


def test_a_strided_array_is_copied_in_order(fn: Function) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(fn.tensor(array.T).numpy(), array.T)
    assert np.array_equal(fn.tensor(array[:, ::2]).numpy(), array[:, ::2])


def test_copy_broadcasts_and_converts(fn: Function) -> None:
    tensor = fn.empty((2, 3))
    assert tensor.copy_([1, 2, 3]).numpy().tolist() == [[1, 2, 3], [1, 2, 3]]
    assert tensor.copy_(fn.tensor([[4.0], [5.0]])).numpy().tolist() == [[4, 4, 4], [5, 5, 5]]
    with pytest.raises(UsageError):
        tensor.copy_([1, 2])


def test_out_must_fit(fn: Function) -> None:
    tensor = fn.tensor([[1.0, 2.0]])
    out = np.empty((1, 2), np.float32)
    assert tensor.numpy(out=out) is out
    for wrong in (np.empty(2, np.float32), np.empty((1, 2)), np.empty((2, 1), np.float32).T):
        if wrong.flags.c_contiguous and wrong.shape == (1, 2) and wrong.dtype == np.float32:
            continue
        with pytest.raises(UsageError):
            tensor.numpy(out=wrong)


def test_numpy_takes_a_tensor(fn: Function) -> None:
    tensor = fn.tensor([1.0, 2.0])
    assert np.asarray(tensor).tolist() == [1.0, 2.0]
    assert np.asarray(tensor, np.int64).dtype == np.int64


def test_operators_run_on_the_device(device: FakeDevice, fn: Function) -> None:
    a, b = fn.tensor([[1.0, 2.0], [3.0, 4.0]]), fn.tensor([[1.0, 1.0], [0.0, 1.0]])
    n = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    m = np.array([[1.0, 1.0], [0.0, 1.0]], np.float32)
    assert np.array_equal((a + b).numpy(), n + m)
    assert np.array_equal((a - b).numpy(), n - m)
    assert np.array_equal((a * b).numpy(), n * m)
    assert np.array_equal((a @ b).numpy(), n @ m)
    assert np.array_equal((2 * a + 1).numpy(), 2 * n + 1)
    assert np.array_equal((1 - a).numpy(), 1 - n)


def test_views_share_memory(fn: Function) -> None:
    tensor = fn.tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    row, rows = tensor[1], tensor[1:]
    assert row.numpy().tolist() == [4, 5, 6, 7]
    row.copy_(0)
    assert rows.numpy()[0].tolist() == [0, 0, 0, 0]
    assert tensor[-1].numpy().tolist() == [8, 9, 10, 11]
    assert rows[1].numpy().tolist() == [8, 9, 10, 11]
    assert tensor.reshape(2, -1)[1].numpy().tolist() == [0, 0, 8, 9, 10, 11]
    assert (row + rows[1]).numpy().tolist() == [8, 9, 10, 11]


def test_a_view_neither_frees_nor_outlives_its_owner(fn: Function) -> None:
    tensor = fn.tensor([1.0, 2.0])
    view = tensor[:1]
    view.close()
    assert view.item() == 1.0
    tensor.close()
    with pytest.raises(UsageError):
        view.numpy()


def test_a_view_keeps_its_owner_alive(fn: Function) -> None:
    view = fn.tensor([1.0, 2.0])[1]
    fn.tensor([5.0])
    assert view.item() == 2.0


@pytest.mark.parametrize("shape", [(5,), (-1, -1), (7, -1)])
def test_reshape_to_another_size_is_refused(fn: Function, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        fn.empty((3, 4)).reshape(*shape)


def test_indices_are_checked(fn: Function) -> None:
    tensor = fn.empty((3, 4))
    for index in (3, -4):
        with pytest.raises(IndexError):
            tensor[index]
    with pytest.raises(UsageError):
        tensor[::2]
    assert tensor[2:1].shape == (0, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.integers(-5, 5), st.integers(-5, 5))
def test_ranges_are_numpys(fn: Function, start: int, stop: int) -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    tensor = fn.tensor(array)
    assert np.array_equal(tensor[start:stop].numpy(), array[start:stop])


def test_a_closed_tensor_says_so(fn: Function) -> None:
    with fn.tensor([1.0]) as tensor:
        pass
    tensor.close()
    with pytest.raises(UsageError) as caught:
        tensor.numpy()
    assert caught.value.code == "tensor-closed"


def test_the_reason_of_a_failing_block_is_not_hidden(device: FakeDevice, fn: Function) -> None:
    tensor = fn.tensor([0.0])
    device.statuses[0x11] = 0x007  # destroying it will be refused as well
    with pytest.raises(ZeroDivisionError), tensor:
        1 / tensor.item()


def test_an_unknown_dtype_is_refused() -> None:
    for wrong in ("complex64", "U4", object, "nonsense"):
        with pytest.raises(UsageError):
            device_dtype(wrong)
