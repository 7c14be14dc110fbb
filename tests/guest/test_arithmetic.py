"""Operators trust the device's instruction table no further than they must."""

from __future__ import annotations

from typing import Any

import pytest

from accelvisor.errors import ProtocolError
from accelvisor.guest.function import Function
from accelvisor.guest.program import Program
from accelvisor.guest.tensor import Tensor


@pytest.mark.parametrize("outputs", [0, 2])
def test_a_device_whose_add_has_not_one_output_is_an_error_not_a_wrong_result(
    fn: Function, monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    def call(*_: Any, **__: Any) -> Any:
        return (None,) * outputs

    x = fn.tensor([1.0])
    monkeypatch.setattr(type(fn.ops), "call", call)
    with pytest.raises(ProtocolError) as caught:
        x + x
    assert caught.value.code == "instruction-table"
    assert isinstance(x, Tensor)
    with fn.program("p") as p:
        value = p.input((1,))
        monkeypatch.setattr(Program, "call", call)
        with pytest.raises(ProtocolError, match="'sub' has not exactly one output"):
            value - value
        monkeypatch.undo()
        p.output(value + value)
