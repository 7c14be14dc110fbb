"""Tensors in device memory, and numpy arrays that the device can reach."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi import commands
from accelvisor.abi.dtypes import DType, by_label
from accelvisor.errors import UsageError
from accelvisor.guest.arithmetic import Arithmetic, only
from accelvisor.guest.closing import Closing
from accelvisor.guest.staging import SharedBuffer

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

Array = npt.NDArray[Any]
ShapeLike = Sequence[int] | int


def device_dtype(dtype: npt.DTypeLike) -> DType:
    """The device's number for a numpy dtype.

    Raises:
        UsageError: the device has no such type.
    """
    try:
        return by_label(np.dtype(dtype).name)
    except (KeyError, TypeError):
        raise UsageError(
            f"the device has no type {dtype!r}",
            code="dtype-unknown",
            where="tensor",
            hint="one of " + ", ".join(d.label for d in DType),
        ) from None


def as_shape(shape: ShapeLike) -> tuple[int, ...]:
    """A shape as a tuple of integers; one number is a vector's length."""
    return (shape,) if isinstance(shape, int) else tuple(int(d) for d in shape)


class Tensor(Closing, Arithmetic["Tensor"]):
    """An array in device memory: C order, contiguous.

    ``t[3]``, ``t[2:5]`` and ``t.reshape(...)`` are views of the same memory, without a copy. Freed
    by :meth:`close`, at the end of a ``with`` block, or when it is garbage-collected. Made by
    ``Function.tensor``, ``empty``, ``zeros``, ``ones`` and ``full``.
    """

    __slots__ = (
        "__weakref__",
        "_generation",
        "_handle",
        "_owner",
        "dtype",
        "function",
        "offset",
        "shape",
    )

    def __init__(self, function: Function, shape: ShapeLike, dtype: npt.DTypeLike) -> None:
        self._handle = 0
        self._owner: Tensor | None = None
        self.function = function
        self.offset = 0  # bytes from the start of the handle's memory
        self.shape = as_shape(shape)
        self.dtype = np.dtype(dtype)
        self._generation = function.generation
        self._handle = function.create(device_dtype(dtype), self.shape)

    # --- what it is ------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.size * self.dtype.itemsize

    @property
    def handle(self) -> int:
        """The device's name of it.

        Raises:
            UsageError: it was closed.
            DeviceReset, ConflictError: its context is gone.
        """
        if self._owner is not None:
            return self._owner.handle
        if not self._handle:
            raise UsageError("the tensor is closed", code="tensor-closed", where="tensor")
        if self._generation != self.function.generation or self.function.closed:
            gone = self.function.stale(self._generation)
            if gone is not None:
                raise gone
        return self._handle

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        owner = self._owner or self
        state = "" if owner._handle else " closed"
        return f"<Tensor {self.dtype.name} {self.shape}{state}>"

    # --- views -----------------------------------------------------------------------------------

    def _view(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        view = Tensor.__new__(Tensor)
        view._handle = 0
        view._owner = self._owner or self
        view._generation = self._generation
        view.function = self.function
        view.offset = self.offset + offset
        view.shape = shape
        view.dtype = self.dtype
        return view

    def __getitem__(self, key: int | slice) -> Tensor:
        """A view of one element of the first axis, or of a range of them (step 1)."""
        n = len(self)
        stride = prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(key, slice):
            start, stop, step = key.indices(n)
            if step != 1:
                raise UsageError("a view has step 1", where="tensor", hint="use gather_rows")
            return self._view(start * stride, (max(stop - start, 0), *self.shape[1:]))
        index = operator.index(key)
        if not -n <= index < n:
            raise IndexError(f"index {index} of {n}")
        return self._view(index % n * stride, self.shape[1:])

    def reshape(self, *shape: int) -> Tensor:
        """A view with another shape of as many elements; one dim may be -1."""
        known = prod(d for d in shape if d != -1)
        if shape.count(-1) == 1 and known and self.size % known == 0:
            shape = tuple(self.size // known if d == -1 else d for d in shape)
        if -1 in shape or prod(shape) != self.size:
            raise UsageError(f"{self.shape} does not fit into {shape}", where="tensor")
        return self._view(0, shape)

    # --- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free its memory on the device; a view leaves it to its owner. Safe to call twice."""
        handle, self._handle = self._handle, 0
        if handle and self.function.stale(self._generation) is None:
            self.function.call(commands.tensor_destroy(0, handle))

    def __del__(self) -> None:
        # Only an append: a collection may come at any moment, in any thread, at interpreter exit.
        if getattr(self, "_handle", 0):
            self.function.graveyard.append((self._handle, self._generation))

    # --- values ----------------------------------------------------------------------------------

    def numpy(self, out: Array | None = None) -> Array:
        """The values, in a new array, or in ``out`` (same shape and dtype, C order).

        Raises:
            UsageError: ``out`` does not fit. CommandRefused, DeviceFault, CommandTimeout.
        """
        handle = self.handle
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif out.shape != self.shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise UsageError(
                f"out is {out.dtype} {out.shape}, the tensor is {self.dtype} {self.shape}",
                where="tensor",
                hint="give a contiguous array of the tensor's own shape and dtype",
            )
        if out.nbytes:
            near = _pinned(self.function, out)
            if near is not None:
                buffer, at = near
                self.function.copies.direct(
                    handle, self.offset, buffer, at, out.nbytes, inward=False
                )
            else:
                self.function.copies.read(handle, self.offset, _bytes(out))
        return out

    def copy_(self, source: Tensor | npt.ArrayLike) -> Tensor:
        """Overwrite the values with those of ``source``, broadcast as numpy does; returns self."""
        if isinstance(source, Tensor):
            source = source.numpy()
        array = np.asarray(source, dtype=self.dtype)
        if array.shape != self.shape:
            try:
                array = np.broadcast_to(array, self.shape)
            except ValueError:
                raise UsageError(
                    f"shape {array.shape} does not fit {self.shape}", where="tensor"
                ) from None
        handle = self.handle
        array = np.ascontiguousarray(array)
        if array.nbytes:
            near = _pinned(self.function, array)
            if near is not None:
                buffer, at = near
                self.function.copies.direct(
                    handle, self.offset, buffer, at, array.nbytes, inward=True
                )
            else:
                self.function.copies.write(handle, self.offset, _bytes(array))
        return self

    def item(self) -> Any:
        """The only element, as a Python number."""
        if self.size != 1:
            raise UsageError(f"a tensor of {self.size} elements is not one number", where="tensor")
        return self.numpy().item()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a tensor's values must be copied from the device")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    # --- operators: the device's instructions of those names -------------------------------------

    def _op(self, name: str, other: Any, *, swapped: bool = False) -> Tensor:
        if not isinstance(other, Tensor):
            other = full(self.function, self.shape, other, self.dtype)
        pair = (other, self) if swapped else (self, other)
        return only(name, self.function.ops.call(name, *pair), Tensor)


class PinnedArray:
    """A numpy array (:attr:`array`) in memory that the device reaches by DMA.

    Copies between it (or a contiguous part of it) and tensors need no staging: the device fetches
    the bytes where they are. Kept until :meth:`release`, the end of a ``with`` block, or the
    function's end.
    """

    def __init__(self, function: Function, shape: ShapeLike, dtype: npt.DTypeLike) -> None:
        shape, kind = as_shape(shape), np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        self._buffer = SharedBuffer(function.transport.allocate_dma(max(nbytes, 1)))
        self._released = False
        self.array: Array = np.frombuffer(self._buffer.view[:nbytes], dtype=kind).reshape(shape)
        self.start = _address(self.array)
        self.end = self.start + nbytes
        self._function = function
        self._pid = os.getpid()

    @property
    def buffer(self) -> SharedBuffer:
        """The DMA buffer behind it."""
        return self._buffer

    def release(self) -> None:
        """Unpin, as soon as no command uses it. :attr:`array` is not for the device from now on.
        Safe twice.
        """
        self.start = self.end = 0
        self._function.pinned_arrays.discard(self)
        self.array = np.empty(0, self.array.dtype)
        if self._pid == os.getpid() and not self._released:
            self._released = True
            try:
                self._buffer.release()
            except BufferError:
                pass  # another array still looks at it

    def __enter__(self) -> Array:
        return self.array

    def __exit__(self, *_: object) -> None:
        self.release()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _pinned(function: Function, array: Array) -> tuple[SharedBuffer, int] | None:
    """(DMA buffer, byte offset) where the array's bytes lie, if they lie in one."""
    live = function.pinned_arrays
    if not live:
        return None
    start = _address(array)
    for pinned in live:
        if pinned.start <= start and start + array.nbytes <= pinned.end:
            return pinned.buffer, start - pinned.start
    return None


def empty(function: Function, shape: ShapeLike, dtype: npt.DTypeLike) -> Tensor:
    """A tensor whose contents are not defined."""
    return Tensor(function, shape, dtype)


def from_numpy(
    function: Function, data: npt.ArrayLike, dtype: npt.DTypeLike | None = None
) -> Tensor:
    """A tensor with the values of ``data``; Python floats become float32, the device's own type."""
    array = np.asarray(data, dtype=dtype)
    if dtype is None and array.dtype == np.float64 and not isinstance(data, np.ndarray):
        array = array.astype(np.float32)
    tensor = Tensor(function, array.shape, array.dtype)
    return tensor.copy_(array)


def full(
    function: Function, shape: ShapeLike, value: float | int, dtype: npt.DTypeLike
) -> Tensor:
    """A tensor whose elements are all ``value``."""
    tensor = Tensor(function, shape, dtype)
    fill = function.instructions.get("fill")
    if fill is not None and tensor.dtype.name in fill.operands[fill.writes[0]].dtypes:
        function.ops.call("fill", out=tensor, value=value)
        return tensor
    return tensor.copy_(np.asarray(value, dtype=dtype))
