"""Whose QEMU a function lets in: that of the domain that owns it by its row, and nobody else's.

An owner reaches the function in two places: its specification, which its next process reads, and
the holder of the process that runs. Whoever changes an owner calls :func:`admit` under the
function's lock, after the row is committed: a daemon that is killed in between does it when it
finds the function again (``Keeper``).
"""

from __future__ import annotations

import logging
import uuid as uuids
from dataclasses import replace

from accelvisor.daemon import files, function_link
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import ALIVE, Event, move
from accelvisor.daemon.paths import peer
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError, ConflictError, UsageError

LOG = logging.getLogger(__name__)

#: How long the last owner's QEMU may take to hang up before the function is scrubbed (seconds).
GONE_S = 2.0


async def admit(functions: Functions, function: Function) -> None:
    """Make what the function lets in follow its row; repeatable. The caller holds the lock.

    Raises:
        SystemFailure: ``spec-write``, ``function-socket``.
        UnavailableError, DeadlineError, ProtocolError: its process does not answer.
    """
    paths = functions.world.paths.function(function.uuid)
    files.write(paths, functions.specification(function))
    await function_link.call(paths.holder_socket, "admit", {"peer": peer(function.domain_uuid)})
    await functions.on_owner()


async def require_ours(functions: Functions, function: Function) -> None:
    """No other host has the function; while it is being moved, its move says who lets whom in.

    Raises:
        ConflictError: ``ledger-not-owner``, ``ledger-undecided``.
        UnavailableError: ``ledger-unreachable``, and no domain has it.
    """
    if function.uuid not in functions.held:
        await functions.may_run(function)


async def take(
    functions: Functions, function: Function, domain: str, domain_uuid: str, how: str = ""
) -> Function:
    """Give a function that nobody has to a domain, in the store. The caller holds the lock, and
    calls :func:`admit` next.

    Raises:
        ConflictError: its state is none in which it can be taken; ``function-not-scrubbed``;
            ``function-revoked``.
    """
    if function.revoked:
        raise ConflictError(
            f'function "{function.name}" was revoked',
            code="function-revoked",
            where=f"function:{function.name}",
            hint="create another one",
        )
    function = await functions.scrub(function, domain_uuid)
    taken = replace(function, domain=domain, domain_uuid=domain_uuid)
    taken = taken.with_state(move(function.state, Event.TAKEN, function.name))
    words = f"{function.name} goes to domain {domain}{how}"
    await functions.registry.commit(taken, "function-attaching", words)
    return taken


async def follow(functions: Functions, function: Function) -> None:
    """:func:`admit` where the owner is a fact that no failure here can change: then whom the
    function lets in is right again with the next owner or process, and until then it is reported.
    """
    if function.state not in ALIVE:
        return  # no process; the next one reads its specification
    try:
        if function.domain_uuid is None and (function.revoked or function.partition is not None):
            why = "was revoked" if function.revoked else "is static"
            await functions.end(function, f"{function.name} {why}, and no domain has it any more")
            return
        await admit(functions, function)
        function = functions.registry.find(function.uuid)
        if function.domain_uuid is None and function.tenant is not None:
            await functions.wait_disconnected(function.uuid, GONE_S)
            await functions.released(function)
    except AccelvisorError as error:
        # Whoever is to have it next has it scrubbed first.
        LOG.warning("function %s, which another has now: %s", function.uuid, error.message)


async def prepare(
    functions: Functions, key: str, domain: str, domain_uuid: str
) -> tuple[Function, bool]:
    """A domain is about to start, and its definition names this function: it is let in if the
    function is its own, or free: then it becomes its own. Never asks libvirt, which is in its hook.

    Returns:
        the function, and whether it was free until now.

    Raises:
        UsageError: ``domain_uuid`` is none.
        ConflictError: ``function-in-use``, ``function-state`` and those of its life.
        and what :func:`require_ours` and :func:`admit` raise.
    """
    try:
        domain_uuid = str(uuids.UUID(domain_uuid))
    except ValueError:
        raise UsageError(f'"{domain_uuid[:80]}" is no UUID of a domain', where="admin") from None
    function = functions.registry.find(key)
    _require(function, domain_uuid)
    await require_ours(functions, function)
    if function.domain_uuid == domain_uuid and await _admitted(functions, function):
        # Without the lock: a verb that holds it may be waiting for this very domain.
        return function, False
    return await functions.carry(_prepare(functions, function.uuid, domain, domain_uuid))


async def _prepare(
    functions: Functions, uuid: str, domain: str, domain_uuid: str
) -> tuple[Function, bool]:
    async with functions.lock(uuid):
        function = functions.registry.find(uuid)
        _require(function, domain_uuid)
        if function.domain_uuid is not None:
            await admit(functions, function)
            return function, False
        taken = await take(functions, function, domain, domain_uuid, ", which is starting")
        try:
            await admit(functions, taken)
        except AccelvisorError as error:
            words = f"{function.name} is free again: {error.message}"
            await functions.registry.commit(function, "function-ready", words)
            await follow(functions, function)
            raise
        return taken, True


async def _admitted(functions: Functions, function: Function) -> bool:
    paths = functions.world.paths.function(function.uuid)
    status = await function_link.call(paths.holder_socket, "status")
    return status.get("peer") == peer(function.domain_uuid)


def _require(function: Function, domain_uuid: str) -> None:
    if function.domain_uuid not in (None, domain_uuid):
        raise ConflictError(
            f"function {function.uuid} belongs to domain {function.domain}",
            code="function-in-use",
            where=f"function:{function.name}",
            hint=f"accelctl detach {function.uuid}",
        )
    # "running" is its own last run, whose end may not have been heard of yet.
    if function.state not in ALIVE:
        reason = f": {function.reason}" if function.reason else ""
        raise ConflictError(
            f"function {function.uuid} is {function.state}{reason}",
            code="function-state",
            where=f"function:{function.name}",
            hint=f"accelctl function show {function.uuid}",
        )
