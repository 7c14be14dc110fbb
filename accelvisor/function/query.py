"""Answers to QUERY: JSON for people and for the guest's runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from accelvisor.abi import ABI_MAJOR, ABI_MINOR
from accelvisor.abi.commands import Query
from accelvisor.abi.status import CommandStatus
from accelvisor.function import state as s
from accelvisor.function.links import Links
from accelvisor.function.objects import KINDS, TENSOR, Contexts, Memory, Object, Objects, Refused
from accelvisor.function.spec import Spec
from accelvisor.function.state import State
from accelvisor.function.trace import Trace
from accelvisor.kernels.registry import describe


def status_name(status: int) -> str:
    """The name of a status code; its number when a newer worker knew more."""
    try:
        return CommandStatus(status).name
    except ValueError:
        return str(status)


class Queries:
    """Builds answers from the state. ``context`` is None while the queue has none open."""

    def __init__(
        self,
        state: State,
        spec: Spec,
        memory: Memory,
        objects: Objects,
        contexts: Contexts,
        trace: Trace,
        links: Links,
    ) -> None:
        self._state = state
        self._spec = spec
        self._memory = memory
        self._objects = objects
        self._contexts = contexts
        self._trace = trace
        self._links = links
        self._table: dict[int, Callable[[int | None], Any]] = {
            Query.INFO: lambda _: self.info(),
            Query.INSTRUCTIONS: lambda _: describe(),
            Query.STATISTICS: lambda _: self.statistics(),
            Query.FAULT: self._fault,
            Query.OBJECTS: self._own_objects,
            Query.TRACE: lambda context: self.trace(_need(context)),
            Query.FABRIC: lambda _: self._links.describe(),
        }

    def answer(self, what: int, context: int | None) -> bytes:
        """JSON of one query.

        Raises:
            Refused: BAD_DESCRIPTOR for an unknown query, NO_CONTEXT where one is needed.
        """
        build = self._table.get(what)
        if build is None:
            raise Refused(CommandStatus.BAD_DESCRIPTOR, f"unknown query {what}")
        return msgspec.json.encode(build(context))

    def reshape(self, spec: Spec) -> None:
        """The function has another size."""
        self._spec = spec

    def info(self) -> dict[str, Any]:
        """Identity, resources, state."""
        spec, u32 = self._spec, self._state.u32
        return {
            "uuid": spec.uuid,
            "profile": spec.profile,
            "abi": f"{ABI_MAJOR}.{ABI_MINOR}",
            "cores": spec.cores,
            "chips": spec.chips,
            "queues": spec.queues,
            "ring_entries": spec.ring_entries,
            "window_bytes": spec.window_bytes,
            "memory_bytes": self._memory.nbytes,
            "memory_used_bytes": self._memory.used,
            "objects": len(self._objects),
            "frozen": bool(u32[s.R_FREEZE]),
            "faults": u32[s.R_FAULTS],
            "fault_resets": self._state.u64[s.W_FAULT_RESETS],
            "quarantined": bool(u32[s.R_FREEZE] & s.FREEZE_QUARANTINE),
            "revoked": not spec.cores,
            "resets": u32[s.R_RESETS],
            "epoch": u32[s.R_EPOCH],
            "shape_epoch": spec.epoch,
            "worker_starts": self._state.u64[s.W_STARTS],
        }

    def statistics(self) -> dict[str, int]:
        """Counters since the function was created."""
        return {name: self._state.u64[word] for name, word in s.K.items()}

    def objects(self) -> list[dict[str, Any]]:
        """Every context with its objects, for the host."""
        found = []
        for context in range(s.CONTEXTS):
            queue = self._state.u32[s.context_at(context) // 4]
            if queue:
                pid, name = self._contexts.identity(context)
                found.append(
                    {
                        "context": context,
                        "queue": queue - 1,
                        "pid": pid,
                        "name": name,
                        "objects": [_object(o) for o in self._objects.of(context)],
                    }
                )
        return found

    def opened(self, context: int) -> None:
        """A context began: what ran in an earlier one of its number is not its own."""
        self._trace.forget(context)

    def trace(self, context: int | None = None) -> dict[str, Any]:
        """Who ran when: of one context, or of all."""
        names = {}
        for number in range(s.CONTEXTS) if context is None else (context,):
            if self._state.u32[s.context_at(number) // 4]:
                names[number] = self._contexts.identity(number)[1]
        return self._trace.describe(names, context)

    def _fault(self, context: int | None) -> dict[str, Any]:
        status, cookie, text = self._contexts.trouble(_need(context))
        return {
            "status": status,
            "name": status_name(status),
            "cookie": cookie,
            "text": text,
            "fault": status >= 0x100,
        }

    def _own_objects(self, context: int | None) -> list[dict[str, Any]]:
        return [_object(o) for o in self._objects.of(_need(context))]


def _need(context: int | None) -> int:
    if context is None:
        raise Refused(CommandStatus.NO_CONTEXT, "the queue has no context")
    return context


def _object(o: Object) -> dict[str, Any]:
    common: dict[str, Any] = {
        "handle": o.handle,
        "address": o.address,
        "nbytes": o.nbytes,
        "extent": o.extent,
    }
    if o.kind == TENSOR and o.dtype is not None:
        return {"kind": "tensor", "dtype": o.dtype.label, "shape": o.shape, **common}
    return {"kind": KINDS[o.kind], "sha256": o.digest.hex(), **common}
