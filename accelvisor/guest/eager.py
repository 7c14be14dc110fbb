"""Instructions called on tensors at once: each a program of one instruction, built once for each
combination of shapes, dtypes and attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from accelvisor.errors import UsageError
from accelvisor.guest.program import Call, Program
from accelvisor.guest.tensor import ShapeLike, Tensor, as_shape

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

_KEPT = 256


class Operations:
    """``fn.ops``: the device's instructions as functions of tensors."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()

    def call(
        self,
        instruction: str,
        *args: Tensor,
        out: Tensor | tuple[Tensor, ...] | None = None,
        shape: ShapeLike | None = None,
        dtype: Any = None,
        **attributes: int | float,
    ) -> Any:
        """Run one instruction; returns its result, or a tuple of several.

        Args:
            out: tensors to write into, instead of new ones; may be among the arguments.
            shape, dtype: of the result, where they do not follow from the arguments.

        Raises:
            ProgramError: shapes, dtypes or attributes do not fit. UsageError: an unknown name.
        """
        for tensor in args:
            if not isinstance(tensor, Tensor):
                raise UsageError(
                    f"{instruction} takes tensors, not {type(tensor).__name__}",
                    where="ops",
                    hint="fn.tensor(array) makes one",
                )
        outs = () if out is None else (out if isinstance(out, tuple) else (out,))
        key = (
            instruction,
            tuple((t.dtype.name, t.shape) for t in args),
            tuple((t.dtype.name, t.shape) for t in outs),
            None if shape is None else as_shape(shape),
            str(dtype),
            tuple(sorted(attributes.items())),
        )
        program = self._programs.get(key)
        if program is None:
            program = self._build(instruction, args, outs, shape, dtype, attributes)
            self._programs[key] = program
            if len(self._programs) > _KEPT:
                self._programs.popitem(last=False)[1].close()
        else:
            self._programs.move_to_end(key)
        return program(*args, out=outs or None)

    def clear(self) -> None:
        """Forget the programs that were built."""
        self._programs.clear()

    def __getattr__(self, name: str) -> Call:
        instruction = self._function.instructions.get(name)
        if instruction is None or name.startswith("_"):
            raise AttributeError(f"this device has no instruction {name!r}")
        return Call(self, instruction)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._function.instructions})

    def _build(
        self,
        instruction: str,
        args: tuple[Tensor, ...],
        outs: tuple[Tensor, ...],
        shape: ShapeLike | None,
        dtype: Any,
        attributes: dict[str, int | float],
    ) -> Program:
        with self._function.program(instruction) as p:
            inputs = [p.input(t.shape, t.dtype) for t in args]
            targets = tuple(p.temporary(t.shape, t.dtype) for t in outs)
            results = p.call(
                instruction, *inputs, out=targets or None, shape=shape, dtype=dtype, **attributes
            )
            p.output(*(results if isinstance(results, tuple) else (results,)))
        return p
