"""Tensors in a function's memory, as the host sees them: where its process says that they are.

That process is driven by a guest, so what it says is only a claim about bytes that the host reads
itself. A claim that no honest process could make is refused; one that is merely wrong gives other
numbers, in which no mark is found. The bytes are copied out with read calls: the guest may change
them meanwhile, and a page that was never written is not filled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from accelvisor.abi.dtypes import by_label
from accelvisor.abi.registers import PAGE
from accelvisor.daemon.moving import orders
from accelvisor.daemon.moving.driver import in_thread
from accelvisor.daemon.paths import Paths
from accelvisor.errors import CapacityError, ProtocolError
from accelvisor.frames.watermark import DTypeName, Place
from accelvisor.limits import LIMITS

_READABLE = frozenset(get_args(DTypeName))
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Object(Struct):
    """A tensor or a program; what else is said of it is not looked at."""

    kind: str
    handle: Annotated[int, Meta(ge=0)]
    address: Number
    nbytes: Number
    dtype: str = ""
    shape: Annotated[tuple[Number, ...], Meta(max_length=LIMITS.tensor_rank)] = ()


class _Context(Struct):
    objects: Annotated[list[_Object], Meta(max_length=LIMITS.objects)]


class _Reply(Struct):
    contexts: Annotated[list[_Context], Meta(max_length=LIMITS.contexts)]


class Reach(Protocol):
    """How a function's process is asked."""

    async def places(self, function: str) -> list[Place]:
        """Its tensors. Raises as :func:`places`, and as :func:`orders.order`."""
        ...

    async def read(self, function: str, place: Place) -> npt.NDArray[Any]:
        """A copy of one of them. Raises as :func:`read`, and as :func:`orders.order`."""
        ...


class Processes:
    """Is a :class:`Reach`: the function processes of this host.

    Args:
        memory_bytes: of the function with a UUID; raises NotFoundError.
    """

    def __init__(self, paths: Paths, memory_bytes: Callable[[str], int]) -> None:
        self._paths = paths
        self._memory_bytes = memory_bytes

    async def places(self, function: str) -> list[Place]:
        size = self._memory_bytes(function)
        return places(await orders.control(self._paths, function, "objects"), size)

    async def read(self, function: str, place: Place) -> npt.NDArray[Any]:
        size = self._memory_bytes(function)
        path = self._paths.function(function).holder_socket
        given = await orders.order(path, "lend", expected=4)
        try:
            # Its end is awaited even when we are cancelled: it uses the descriptor.
            found: npt.NDArray[Any] = await in_thread(
                lambda: read(given.fds[2], size, place), lambda: None
            )
            return found
        finally:
            given.close()


def places(reply: Mapping[str, Any], memory_bytes: int) -> list[Place]:
    """The tensors of a function that may hold marks, of all its contexts.

    Args:
        reply: what its process answered to ``objects``.

    Raises:
        ProtocolError: ``function-reply``: no process could have such objects.
    """
    try:
        said = msgspec.convert(dict(reply), _Reply)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _impossible(str(error)) from error
    objects = [item for context in said.contexts for item in context.objects]
    if len(objects) > LIMITS.objects:
        raise _impossible(f"{len(objects)} objects")
    return [
        _place(item, memory_bytes)
        for item in objects
        if item.kind == "tensor" and item.nbytes and item.dtype in _READABLE
    ]


def _place(item: _Object, memory_bytes: int) -> Place:
    nbytes = math.prod(item.shape) * by_label(item.dtype).itemsize
    faults = {
        f"handle {item.handle:#x}": item.handle >> 64,
        f"{item.nbytes} bytes for {item.dtype} {item.shape}": nbytes != item.nbytes,
        f"a tensor at {item.address:#x}": item.address % PAGE,
        f"a tensor at {item.address:#x} that ends outside": item.address + nbytes > memory_bytes,
    }
    for fault, there in faults.items():
        if there:
            raise _impossible(fault)
    return Place(
        handle=item.handle,
        address=item.address,
        dtype=item.dtype,  # type: ignore[arg-type]
        shape=item.shape,
    )


def read(fd: int, memory_bytes: int, place: Place) -> npt.NDArray[Any]:
    """A copy of a tensor of a function's memory.

    Args:
        fd: the memory, as its holder lends it.
        place: one of :func:`places`.

    Raises:
        ProtocolError: ``function-reply``: the memory has another size.
        CapacityError: ``watermark-size``: the tensor is larger than what is copied out.
    """
    dtype = np.dtype(place.dtype).newbyteorder("<")
    nbytes = math.prod(place.shape) * dtype.itemsize
    require_size(place)
    if os.fstat(fd).st_size != memory_bytes or place.address + nbytes > memory_bytes:
        raise _impossible("memory of another size")
    data = bytearray(nbytes)
    view = memoryview(data)
    at = 0
    while at < nbytes:
        got = os.preadv(fd, [view[at:]], place.address + at)
        if not got:
            raise _impossible("memory that ends early")
        at += got
    return np.frombuffer(data, dtype).reshape(place.shape)


def require_size(place: Place) -> None:
    """Raises CapacityError ``watermark-size``."""
    nbytes = math.prod(place.shape) * by_label(place.dtype).itemsize
    if nbytes > LIMITS.watermark_tensor_bytes:
        raise CapacityError(
            f"the tensor has {nbytes} bytes, the limit is {LIMITS.watermark_tensor_bytes}",
            code="watermark-size",
            where="watermark",
            hint="mark a smaller layer",
        )


def _impossible(what: str) -> ProtocolError:
    return ProtocolError(
        f"the function's process tells of impossible objects: {what}",
        code="function-reply",
        where="tensors",
    )
