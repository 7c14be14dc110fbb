"""Nobody finds what somebody else left: scrubbing between two owners, and the signed records of it.

A function that a domain has, or had, is *used* (``tenant`` in its row) until it was scrubbed: its
holder replaces memory, window, registers, queues and worker by new ones, reads back that they are
empty, and the epoch grows. The record says so, signed with the host's key, and a domain is given a
function only with the record of its epoch: :meth:`Scrubs.require`.

What happens to the resources of a function that ends, by whatever way, is the same step for all:
its process goes, with all it held, and a record of that is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelvisor.daemon import files, function_link, seals, working
from accelvisor.daemon.seals import Seal
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, DataError
from accelvisor.frames.envelope import SignatureError
from accelvisor.isolation import scrub
from accelvisor.isolation.resources import Placement
from accelvisor.isolation.scrub import How, Record
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.daemon.functions import Functions

LOG = logging.getLogger(__name__)


class Scrubs:
    """One per daemon.

    Args:
        host, boot: this host's UUID, and the boot it is in.
        clock_ns: since 1970.
    """

    def __init__(
        self, functions: Functions, host: str, boot: str, clock_ns: Callable[[], int]
    ) -> None:
        self._functions = functions
        self._registry = functions.registry
        self._host = host
        self._boot = boot
        self._clock_ns = clock_ns
        self._seal: Seal | None = None
        self._unsigned: list[Record] = []
        functions.on_fresh = self.fresh
        functions.on_ended = self.ended
        functions.scrub = self.require
        functions.released = self.release

    async def use(self, seal: Seal) -> None:
        """The key is there; what was scrubbed before is recorded now."""
        self._seal = seal
        waiting, self._unsigned = self._unsigned, []
        for record in waiting:
            await self._keep(record)

    # --- what was scrubbed ------------------------------------------------------------------------

    async def fresh(self, function: Function) -> None:
        """The function has a new process, and with it new memory. Where no record comes of that,
        since its own VM was there first, whoever is to have it next has it scrubbed.
        """
        files_of = self._functions.world.paths.function(function.uuid)
        try:
            status = await function_link.call(files_of.holder_socket, "status")
            await self._write(function, How.NEW, _evidence(status), function.memory_bytes)
        except AccelvisorError as error:
            LOG.warning("scrub record of function %s: %s", function.uuid, error.message)

    async def ended(self, function: Function) -> None:
        """Its process is gone, also one that only half came up."""
        try:
            await self._write(function, How.ENDED, (), function.memory_bytes)
        except AccelvisorError as error:
            LOG.warning("scrub record of function %s: %s", function.uuid, error.message)

    async def resized(self, function: Function, gone: Placement, nbytes: int) -> None:
        """Memory of a function that goes on was given back and read as zero."""
        await self._write(replace(function, placement=gone), How.RESIZED, (), nbytes)

    async def release(self, function: Function) -> Function:
        """Scrub a function that has no domain any more. The caller holds its lock.

        Returns:
            the row as it is now: without a tenant, at a new epoch.

        Raises:
            ConflictError: ``function-in-use``: a QEMU is still connected.
            StateError: ``scrub-failed``: what was read back is not empty.
            UnavailableError, DeadlineError, FunctionFailure: its process does not answer.
        """
        paths = self._functions.world.paths.function(function.uuid)
        epoch = await self._next_epoch(function)
        shape = working.shape(function.placement, epoch)
        made = await function_link.call(paths.holder_socket, "renew", shape.to_dict())
        if made.get("shape") != shape.to_dict():
            raise self._failed(function, "the holder has another shape than it was told")
        status = await function_link.wait_ready(
            paths.holder_socket, deadline_s=self._functions.world.ready_s
        )
        clean = replace(function, epoch=epoch)
        files.write(paths, self._functions.specification(clean))
        await self._write(clean, How.RENEWED, _evidence(status), function.memory_bytes)
        words = f"{function.name} was scrubbed: all of it is new, epoch {epoch}"
        await self._registry.clean(clean, words)
        return clean

    async def _next_epoch(self, function: Function) -> int:
        """Above what the row says and what the worker is at."""
        paths = self._functions.world.paths.function(function.uuid)
        try:
            return await working.epoch(paths, function) + 1
        except (AccelvisorError, TypeError, ValueError):
            return function.epoch + 1  # it has no worker now: the next one begins where it is told

    # --- what is asked for ------------------------------------------------------------------------

    async def require(self, function: Function, domain_uuid: str) -> Function:
        """``function`` may be given to a domain: it is that domain's own, or clean by the record of
        its epoch; if not it is scrubbed now. The caller holds its lock.

        Raises:
            ConflictError: ``function-not-scrubbed``, with what stood in the way.
        """
        if function.tenant == domain_uuid:
            return function
        if function.tenant is None and await self._recorded(function):
            return function
        try:
            return await self.release(function)
        except AccelvisorError as error:
            raise ConflictError(
                f'function "{function.name}" may hold what its last domain left, and cannot be'
                f" scrubbed: {error.message}",
                code="function-not-scrubbed",
                where=f"function:{function.name}",
                hint="stop whatever is connected to it, or accelctl function reset",
            ) from error

    async def _recorded(self, function: Function) -> bool:
        """Whether a record that this host signed says that it is clean at its epoch."""
        for epoch, data in await self._registry.scrubs(function.uuid):
            if epoch != function.epoch:
                continue
            try:
                document = self.verified(data)
            except (DataError, SignatureError) as error:
                LOG.warning("scrub record of function %s: %s", function.uuid, error)
                continue
            if scrub.covers(document, self._host, function.uuid, function.epoch):
                return True
        return False

    def verified(self, data: bytes) -> dict[str, Any]:
        """The document of a record that this host signed.

        Raises:
            DataError: it is no such record.
            SignatureError: its signature is not one of this host's.
        """
        return seals.opened(self._seal, scrub.TYPE, data)

    # --- inside -----------------------------------------------------------------------------------

    async def _write(
        self, function: Function, how: How, evidence: tuple[tuple[str, int], ...], nbytes: int
    ) -> None:
        record = Record(
            self._host, self._boot, function.uuid, function.epoch, how, function.placement,
            nbytes, function.tenant or "", self._clock_ns(), evidence,
        )  # fmt: skip
        found = scrub.unclean(evidence)
        if found:
            raise self._failed(function, "; ".join(found))
        if self._seal is None:
            self._unsigned.append(record)
        else:
            await self._keep(record)

    async def _keep(self, record: Record) -> None:
        if self._seal is None:
            raise RuntimeError("a record cannot be signed yet")
        sealed = seals.signed(self._seal, scrub.TYPE, record.document())
        await self._registry.add_scrub(record.function, record.epoch, sealed)

    def _failed(self, function: Function, why: str) -> ConflictError:
        return ConflictError(
            f'function "{function.name}" does not read as empty: {why}',
            code="scrub-failed",
            where=f"function:{function.name}",
            hint="delete it; its process does not do what it was told",
        )


def _evidence(status: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """What the holder read back of memory that nobody can have written yet."""
    data = status.get("data")
    if not isinstance(data, dict) or status.get("connection") != 0:
        return (("unread", 1),)
    return tuple(sorted((str(name)[: LIMITS.name_chars], int(bool(v))) for name, v in data.items()))
