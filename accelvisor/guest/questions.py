"""Questions to the device: JSON answers of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelvisor.abi import commands
from accelvisor.abi.commands import Query
from accelvisor.errors import ProtocolError
from accelvisor.guest.errors import error_from
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.guest.function import Function


def ask(function: Function, what: Query) -> Any:
    """The answer, parsed; of Query.INSTRUCTIONS its bytes.

    Raises:
        ProtocolError: it is no JSON. Others as :meth:`Function.call`.
    """
    import json

    size = 4096
    while True:
        landing = function.copies.landing(size)
        completion = function.carry(commands.query(0, what, landing.memory), landing)
        answer = bytearray(min(completion.value, size))
        try:
            function.copies.fetch(landing, memoryview(answer))
        finally:
            landing.release()
        if size < completion.value <= LIMITS.query_bytes:
            size = completion.value
            continue
        if completion.status:
            raise error_from(completion)
        if what is Query.INSTRUCTIONS:
            return bytes(answer)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ProtocolError(
                f"the device's answer to {what.name.lower()} is not JSON: {error}",
                where=f"query:{what.name.lower()}",
            ) from error
