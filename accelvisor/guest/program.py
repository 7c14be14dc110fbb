"""Programs: built like numpy code, checked as they are built, uploaded once, launched often.

    with fn.program("layer") as p:
        x = p.input((32, 64))
        w = p.input((64, 10))
        p.output(p.relu(p.matmul(x, w)))
    y = p(x_tensor, w_tensor)

The methods beside ``input``, ``parameter`` and ``output`` are the device's own instructions:
``dir(p)`` and ``help(p.matmul)`` show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelvisor.abi import programs
from accelvisor.abi.dtypes import DType, by_label
from accelvisor.abi.programs import Operation, Role, Slot
from accelvisor.errors import ConflictError, ProgramError, UsageError
from accelvisor.guest.arithmetic import Arithmetic, only
from accelvisor.guest.instructions import Instruction
from accelvisor.guest.launch import Bound
from accelvisor.guest.tensor import ShapeLike, Tensor, as_shape, device_dtype
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

class Value(Arithmetic["Value"]):
    """A tensor of a program that is being built. Arithmetic operators build instructions."""

    __slots__ = ("dtype", "name", "program", "role", "shape", "slot")

    def __init__(
        self,
        program: Program,
        slot: int,
        dtype: DType,
        shape: tuple[int, ...],
        role: Role,
        name: str,
    ) -> None:
        self.program = program
        self.slot = slot
        self.dtype = dtype.label
        self.shape = shape
        self.role = role
        self.name = name

    def __repr__(self) -> str:
        return f"<Value {self.name}: {self.dtype} {self.shape}>"

    def _op(self, name: str, other: Any, *, swapped: bool = False) -> Value:
        if not isinstance(other, Value):
            other = self.program.call("fill", shape=self.shape, dtype=self.dtype, value=other)
        pair = (other, self) if swapped else (self, other)
        return only(name, self.program.call(name, *pair), Value)


class Call:
    """One instruction as a method of a program: its signature and help are the device's."""

    def __init__(self, target: Any, instruction: Instruction) -> None:
        self._target = target
        self._instruction = instruction
        self.__name__ = self.__qualname__ = instruction.name
        self.__doc__ = instruction.help()
        self.__signature__ = instruction.signature()

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._target.call(self._instruction.name, *args, **keywords)

    def __repr__(self) -> str:
        return f"<instruction {self.__name__}{self.__signature__}>"


class Program:
    """A list of instructions over tensors, and, once built, a function of tensors.

    Args:
        function: where it will run.
        name: for people.
    """

    def __init__(self, function: Function, name: str = "program") -> None:
        self.function = function
        self.name = name
        self._values: list[Value] = []
        self._operations: list[tuple[Instruction, tuple[int, ...], dict[str, int | float]]] = []
        self._results: list[Value] = []
        self._arguments: list[Value] = []
        self._data = b""

    # --- building --------------------------------------------------------------------------------

    def input(
        self, shape: ShapeLike, dtype: npt.DTypeLike = "float32", name: str = ""
    ) -> Value:
        """An argument that the program only reads."""
        value = self._value(Role.INPUT, as_shape(shape), device_dtype(dtype), name)
        self._arguments.append(value)
        return value

    def parameter(
        self, shape: ShapeLike, dtype: npt.DTypeLike = "float32", name: str = ""
    ) -> Value:
        """An argument that the program reads and may write in place (weights under training)."""
        value = self._value(Role.OUTPUT, as_shape(shape), device_dtype(dtype), name)
        self._arguments.append(value)
        return value

    def temporary(
        self, shape: ShapeLike, dtype: npt.DTypeLike = "float32", name: str = ""
    ) -> Value:
        """Memory of the program's own, to be given as ``out=``; undefined until it is written."""
        return self._value(Role.TEMPORARY, as_shape(shape), device_dtype(dtype), name)

    def output(self, *values: Value) -> None:
        """Make values the program's results, in this order; each call of it makes new tensors."""
        for value in values:
            self._own(value)
            if value.role is Role.INPUT:
                raise ProgramError(
                    f"{value.name} is an input, not a result",
                    where=self.name,
                    hint="return it from the caller, or copy it: p.copy(x)",
                )
            value.role = Role.OUTPUT
            if value not in self._results:
                self._results.append(value)

    def call(
        self,
        instruction: str,
        *args: Any,
        out: Any = None,
        shape: ShapeLike | None = None,
        dtype: npt.DTypeLike | None = None,
        **attributes: int | float,
    ) -> Any:
        """Append an instruction by name; returns its result, or a tuple of several.

        Args:
            args: the values it reads, in declared order.
            out: the value (or tuple of values) to write into; new temporaries when None.
            shape, dtype: of the result, where they do not follow from the arguments (fill).

        Raises:
            ProgramError: shapes, dtypes or attributes do not fit; ``where`` names the operand.
            UsageError: the device has no such instruction.
        """
        if self._data:
            raise ConflictError(
                "the program is built already", code="program-built", where=self.name
            )
        row = self.function.instructions.require(instruction)
        given = self._operands(row, args, out)
        shapes: list[tuple[int, ...] | None] = [v.shape if v else None for v in given]
        dtypes: list[str | None] = [v.dtype if v else None for v in given]
        for i in row.writes:
            if given[i] is None and shape is not None:
                shapes[i] = as_shape(shape)
            if given[i] is None and dtype is not None:
                dtypes[i] = device_dtype(dtype).label
        all_shapes, all_dtypes = row.infer(shapes, dtypes, attributes)
        row.pack(attributes)
        for i, value in enumerate(given):
            if value is None:
                kind = by_label(all_dtypes[i])
                given[i] = self._value(Role.TEMPORARY, tuple(all_shapes[i]), kind, "")
        slots = tuple(v.slot for v in given if v is not None)
        self._operations.append((row, slots, dict(attributes)))
        results = tuple(given[i] for i in row.writes)
        return results[0] if len(results) == 1 else results

    def build(self) -> bytes:
        """The program's bytes; uploads them. Called at the end of the ``with`` block.

        Raises:
            ProgramRefused: the device found it invalid.
        """
        if not self._data:
            if len(self._values) > LIMITS.program_slots:
                raise ProgramError(
                    f"{len(self._values)} tensors, a program may have {LIMITS.program_slots}",
                    where=self.name,
                    hint="reuse temporaries by out=, or cut the program in two",
                )
            slots = tuple(Slot(by_label(v.dtype), v.shape, v.role) for v in self._values)
            operations = tuple(
                Operation(row.opcode, operands, row.pack(attributes))
                for row, operands, attributes in self._operations
            )
            data = programs.encode(programs.Program(slots, operations))
            self.function.load(data)
            self._data = data
        return self._data

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.build()

    def __getattr__(self, name: str) -> Call:
        # Only names that are no attribute of a program arrive here.
        if name.startswith("_"):
            raise AttributeError(name)
        row = self.function.instructions.get(name)
        if row is None:
            try:
                self.function.instructions.require(name)
            except UsageError as error:
                raise AttributeError(f"{error.message}; {error.hint}") from None
            raise AttributeError(name)
        return Call(self, row)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.function.instructions})

    # --- what it is ------------------------------------------------------------------------------

    @property
    def data(self) -> bytes:
        """The encoded program; empty until it is built."""
        return self._data

    @property
    def arguments(self) -> tuple[Value, ...]:
        """What a call takes, in order: inputs and parameters as they were declared."""
        return tuple(self._arguments)

    @property
    def results(self) -> tuple[Value, ...]:
        """What a call returns."""
        return tuple(self._results)

    def __str__(self) -> str:
        lines = [f"program {self.name}({', '.join(v.name for v in self.arguments)})"]
        for row, operands, attributes in self._operations:
            names = [self._values[s].name for s in operands]
            read = ", ".join(names[i] for i in row.reads)
            extra = "".join(f", {k}={v}" for k, v in attributes.items())
            written = [self._values[operands[i]] for i in row.writes]
            left = ", ".join(f"{v.name}: {v.dtype}{list(v.shape)}" for v in written)
            lines.append(f"    {left} = {row.name}({read}{extra})")
        lines.append(f"    return {', '.join(v.name for v in self._results) or 'nothing'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self._operations)} instructions>"

    # --- running ---------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Tensor | npt.ArrayLike,
        out: Tensor | Sequence[Tensor] | None = None,
        repeat: int = 1,
        wait: bool = True,
        timeout_s: float | None = None,
        **named: Tensor | npt.ArrayLike,
    ) -> Any:
        """Run it. Arrays among the arguments are uploaded for this call.

        Args:
            out: tensors for the results; new ones when None.
            repeat: how often to run it in one command.
            wait: False returns a :class:`Launch` to wait for later.

        Returns:
            The result's tensor, a tuple of them, or None; a Launch with ``wait=False``.

        Raises:
            UsageError: the arguments do not fit. DeviceFault, CommandTimeout, DeviceReset.
        """
        bound, passing = self._prepare(args, named, out)
        try:
            if not wait:
                return bound.launch(repeat)
            result = bound(repeat, timeout_s)
        finally:
            bound.release()
        for tensor in passing:
            tensor.close()
        return result

    def bind(
        self, *args: Tensor, out: Tensor | Sequence[Tensor] | None = None, **named: Tensor
    ) -> Bound:
        """The program with its arguments fixed: the shortest way to launch it again and again."""
        return self._prepare(args, named, out)[0]

    def close(self) -> None:
        """Unload it from the device. Safe to call twice."""
        data, self._data = self._data, b""
        if data and not self.function.closed:
            self.function.unload(data)

    # --- inside ----------------------------------------------------------------------------------

    def _value(self, role: Role, shape: tuple[int, ...], dtype: DType, name: str) -> Value:
        if self._data:
            raise ConflictError(
                "the program is built already", code="program-built", where=self.name
            )
        slot = len(self._values)
        value = Value(self, slot, dtype, shape, role, name or f"t{slot}")
        self._values.append(value)
        return value

    def _own(self, value: Any) -> Value:
        if not isinstance(value, Value) or value.program is not self:
            raise UsageError(
                f"{value!r} is not a value of this program",
                code="value-foreign",
                where=self.name,
                hint="tensors and arrays come in as p.input(...) and are given when it is called",
            )
        return value

    def _operands(self, row: Instruction, args: Sequence[Any], out: Any) -> list[Value | None]:
        reads, writes = row.reads, row.writes
        if len(args) != len(reads):
            wanted = ", ".join(row.operands[i].name for i in reads)
            raise UsageError(
                f"{row.name} takes {len(reads)} tensors, got {len(args)}",
                where=self.name,
                hint=f"{row.name}({wanted})",
            )
        given: list[Value | None] = [None] * len(row.operands)
        for i, value in zip(reads, args, strict=True):
            given[i] = self._own(value)
        outs = () if out is None else (out if isinstance(out, (tuple, list)) else (out,))
        if outs and len(outs) != len(writes):
            raise UsageError(
                f"{row.name} writes {len(writes)} tensors, out has {len(outs)}", where=self.name
            )
        for i, value in zip(writes, outs, strict=False):
            if self._own(value).role is Role.INPUT:
                raise ProgramError(
                    f"{value.name} is an input and cannot be written",
                    where=f"{row.name}.{row.operands[i].name}",
                    hint="declare it with p.parameter(...)",
                )
            given[i] = value
        return given

    def _prepare(
        self,
        args: Sequence[Any],
        named: dict[str, Any],
        out: Tensor | Sequence[Tensor] | None,
    ) -> tuple[Bound, list[Tensor]]:
        """The call's bindings, and the tensors that were made for this call's arguments."""
        if not self._data:
            raise ConflictError(
                "the program is not built",
                code="program-not-built",
                where=self.name,
                hint="end its with block, or call build()",
            )
        function = self.function
        at: dict[int, Tensor] = {}
        passing: list[Tensor] = []
        for value, given in zip(self._arguments, self._match(args, named), strict=True):
            if not isinstance(given, Tensor):
                if value.role is Role.OUTPUT:
                    raise UsageError(
                        f"{value.name} is written and must be a tensor", where=self.name
                    )
                given = function.tensor(np.asarray(given, dtype=value.dtype))
                passing.append(given)
            self._fits(value, given)
            at[value.slot] = given
        fresh = [v for v in self._results if v.slot not in at]
        if out is None:
            outs: list[Tensor] = [Tensor(function, v.shape, v.dtype) for v in fresh]
        else:
            outs = [out] if isinstance(out, Tensor) else list(out)
            if len(outs) != len(fresh):
                raise UsageError(
                    f"{len(fresh)} results, out has {len(outs)} tensors", where=self.name
                )
        for value, tensor in zip(fresh, outs, strict=True):
            self._fits(value, tensor)
            at[value.slot] = tensor
        results = tuple(at[v.slot] for v in self._results)
        result = results if len(results) > 1 else (results[0] if results else None)
        tensors = [at[slot] for slot in sorted(at)]
        handle = function.load(self._data)  # again after a restart; else it only looks it up
        return Bound(function, handle, tensors, result, tensors), passing

    def _match(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        names = [v.name for v in self._arguments]
        signature = f"{self.name}({', '.join(names)})"
        if len(args) > len(names):
            raise UsageError(
                f"{len(args)} arguments, the program takes {len(names)}",
                where=self.name,
                hint=signature,
            )
        given = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name not in names or name in given:
                what = "is given twice" if name in given else "is no argument"
                raise UsageError(f"{name} {what}", where=self.name, hint=signature)
            given[name] = value
        missing = [n for n in names if n not in given]
        if missing:
            raise UsageError(f"{missing[0]} is missing", where=self.name, hint=signature)
        return [given[n] for n in names]

    def _fits(self, value: Value, tensor: Tensor) -> None:
        if tensor.shape != value.shape or tensor.dtype.name != value.dtype:
            raise UsageError(
                f"{value.name} is {tensor.dtype.name} {tensor.shape}, "
                f"the program wants {value.dtype} {value.shape}",
                code="argument-mismatch",
                where=self.name,
            )
        if tensor.function is not self.function:
            raise UsageError(f"{value.name} lies on another function", where=self.name)
