"""Objects that are closed at the end of their ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from accelvisor.errors import AccelvisorError


class Closing:
    """Closed at the block's end; that this fails does not hide why the block did."""

    __slots__ = ()

    def close(self) -> None:
        """Let go of what is held; each kind says how. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except AccelvisorError:
            if error is None:
                raise
