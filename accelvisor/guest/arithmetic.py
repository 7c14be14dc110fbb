"""The operators that tensors and the values of a program share: instructions of the same names."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from accelvisor.errors import ProtocolError

T = TypeVar("T")


def only(name: str, result: object, kind: type[T]) -> T:
    """The one output of arithmetic instruction ``name``, as the device's table should have it.

    Raises:
        ProtocolError: ``instruction-table``: it has another number of outputs.
    """
    if not isinstance(result, kind):
        raise ProtocolError(
            f"the device's {name!r} has not exactly one output",
            code="instruction-table",
            where=f"instruction {name}",
            hint="guest library and device do not fit: update the older one",
        )
    return result


class Arithmetic(Generic[T]):
    """``+ - * / @`` as the device's ``add``, ``sub``, ``mul``, ``div`` and ``matmul``."""

    __slots__ = ()

    @abstractmethod
    def _op(self, name: str, other: Any, *, swapped: bool = False) -> T:
        """Run or record instruction ``name`` on this and ``other``, a number or one of its kind."""

    def __add__(self, other: Any) -> T:
        return self._op("add", other)

    def __radd__(self, other: Any) -> T:
        return self._op("add", other, swapped=True)

    def __sub__(self, other: Any) -> T:
        return self._op("sub", other)

    def __rsub__(self, other: Any) -> T:
        return self._op("sub", other, swapped=True)

    def __mul__(self, other: Any) -> T:
        return self._op("mul", other)

    def __rmul__(self, other: Any) -> T:
        return self._op("mul", other, swapped=True)

    def __truediv__(self, other: Any) -> T:
        return self._op("div", other)

    def __matmul__(self, other: T) -> T:
        return self._op("matmul", other)
