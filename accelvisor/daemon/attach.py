"""Giving functions to domains and taking them back.

The domain's XML is the truth about who has a function; the store follows it (``DomainsLink.look``).
So that no two verbs give one function away, the owner is committed to the store *before* libvirt is
asked, under the function's lock, and what libvirt then says replaces it before the lock is given
back. After a kill at any step the next look finds what really is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelvisor.daemon import admission, function_link
from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import ALIVE, Event, State, move
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    NotFoundError,
    SystemFailure,
    UnavailableError,
    UsageError,
)
from accelvisor.hypervisor.port import Attachment, AttachRequest, Domain

LOG = logging.getLogger(__name__)
#: How long the function may take to notice that QEMU went (seconds).
GONE_S = 2.0


async def attach(
    functions: Functions,
    links: DomainsLink[Any],
    domain: str,
    key: str,
    live: bool | None,
    persistent: bool | None,
) -> Attachment:
    """Raises NotFoundError, ConflictError (``function-in-use``, ``function-failed``, ...), and what
    the ledger and the port raise. Carried to its end when the caller goes away."""
    uuid = functions.registry.find(key).uuid

    async def verb() -> Attachment:
        async with functions.lock(uuid):
            function = functions.registry.find(uuid)
            functions.require_free(function)
            move(function.state, Event.TAKEN, function.name)  # before anybody is asked
            await admission.require_ours(functions, function)
            target = await links.call(lambda port: port.get(domain))
            request = _request(functions, target, function, live, persistent)
            _require_free(function, target, await links.call(lambda port: port.list()))
            await _require_fit(functions, function, target, request)
            if function.domain_uuid is None:
                await admission.take(functions, function, target.name, target.uuid)
            try:
                await admission.admit(functions, functions.registry.find(uuid))
                _require_socket(function, request)
                return await links.call(lambda port: port.attach(request), patient=True)
            finally:
                await _settle(functions, links, uuid, target.uuid)

    done = await functions.carry(verb())
    await links.look()
    return done


async def detach(
    functions: Functions,
    links: DomainsLink[Any],
    domain: str,
    key: str,
    live: bool | None,
    persistent: bool | None,
    deadline_s: float,
) -> Attachment:
    """Without flags: wherever it is. Raises ConflictError (``function-not-attached``), and what the
    port raises. Carried to its end when the caller goes away."""
    uuid = functions.registry.find(key).uuid

    async def verb() -> Attachment:
        async with functions.lock(uuid):
            function = functions.registry.find(uuid)
            functions.require_free(function)
            target = await links.call(lambda port: port.get(domain))
            here_live = uuid in target.live_functions
            here_stored = uuid in target.persistent_functions
            if live is None and persistent is None:
                where = here_live, here_stored
            else:
                where = bool(live), bool(persistent)
            if not (where[0] and here_live) and not (where[1] and here_stored):
                raise ConflictError(
                    f'domain "{target.name}" does not have function "{key}" there',
                    code="function-not-attached",
                    where=f"domain:{target.name}",
                    hint="accelctl function show says who has it",
                )
            request = _request(functions, target, function, *where)
            try:
                return await links.call(
                    lambda port: port.detach(request, deadline_s=deadline_s), patient=True
                )
            finally:
                await _settle(functions, links, uuid, target.uuid)

    done = await functions.carry(verb())
    await links.look()
    return done


async def release(
    functions: Functions, links: DomainsLink[Any], key: str, deadline_s: float
) -> None:
    """Take a function from whatever domain has it; nothing to do when none has."""
    function = functions.registry.find(key)
    if function.domain_uuid is None:
        return
    try:
        await detach(functions, links, function.domain_uuid, key, None, None, deadline_s)
    except NotFoundError as error:
        if error.code != "domain-not-found":
            raise
        await links.look()
    except ConflictError as error:
        if error.code != "function-not-attached":
            raise
        await links.look()


async def require_unused(functions: Functions, links: DomainsLink[Any], function: Function) -> None:
    """For deletion, under the function's lock: neither does a domain name it now, whatever the
    store says, nor is a QEMU connected.

    Raises:
        ConflictError: ``function-in-use``.
    """
    try:
        domains = await links.call(lambda port: port.list())
    except UnavailableError:
        domains = ()  # without libvirt, only a QEMU that runs counts
    for domain in domains:
        if function.uuid in (*domain.live_functions, *domain.persistent_functions):
            raise _in_use(function, f'domain "{domain.name}" has it', "detach it first, or --force")
    if function.state is not State.FAILED and await _connected(functions, function.uuid):
        raise _in_use(function, "a QEMU is connected to it", "stop that VM, or use --force")


def _require_free(function: Function, target: Domain, domains: Sequence[Domain]) -> None:
    if function.domain_uuid not in (None, target.uuid):
        raise _in_use(
            function,
            f'it belongs to domain "{function.domain}"',
            "a function has one domain: detach it there first",
        )
    for domain in domains:
        named = function.uuid in (*domain.live_functions, *domain.persistent_functions)
        if named and domain.uuid != target.uuid:
            raise _in_use(
                function,
                f'the definition of domain "{domain.name}" names it',
                "detach it there first",
            )


async def _require_fit(
    functions: Functions, function: Function, target: Domain, request: AttachRequest
) -> None:
    """The process answers and serves, and nobody else is connected."""
    files = functions.world.paths.function(function.uuid)
    status = await function_link.call(files.holder_socket, "status")
    if status.get("gave_up"):
        raise ConflictError(
            f'function "{function.name}" gave up: {str(status["gave_up"])[:200]}',
            code="function-failed",
            where=f"function:{function.name}",
            hint="accelctl function reset restarts it",
        )
    if not request.live or function.uuid in target.live_functions:
        return  # the second is the port's to refuse
    if await _connected(functions, function.uuid):
        raise _in_use(function, "a QEMU is connected to it", "detach it there, or stop that VM")


def _require_socket(function: Function, request: AttachRequest) -> None:
    """A link there would lead QEMU elsewhere."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(request.socket).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        raise SystemFailure(
            f'function "{function.name}" has no socket for QEMU',
            code="function-socket",
            where=request.socket,
            hint="accelctl function reset; if it comes back, what runs in it is not to be trusted",
        )


async def _connected(functions: Functions, uuid: str) -> bool:
    """Whether a QEMU is connected; one that is just going is waited for."""
    path = functions.world.paths.function(uuid).holder_socket
    loop = asyncio.get_running_loop()
    end = loop.time() + GONE_S
    while True:
        try:
            if not (await function_link.call(path, "status")).get("connected"):
                return False
        except UnavailableError:
            return False  # no process, so nothing is connected
        if loop.time() > end:
            return True
        await asyncio.sleep(0.05)


async def _settle(
    functions: Functions, links: DomainsLink[Any], uuid: str, domain_uuid: str
) -> None:
    """What the domain says now into the store. The row is written anew in any case: a look that
    began before sees that it is too late (``Keeper.follow``)."""
    function = functions.registry.get(uuid)
    if function is None:
        return
    try:
        found = await links.call(lambda port: port.get(domain_uuid))
    except NotFoundError:
        found = None
    except AccelvisorError as error:
        # The safe side: it stays with the domain until a look says otherwise.
        LOG.warning("function %s: %s", uuid, error.message)
        functions.registry.touch(function)
        return
    live = found is not None and found.state.active and uuid in found.live_functions
    stored = found is not None and uuid in found.persistent_functions
    unknown = found is not None and not found.functions_known
    if unknown or function.state not in ALIVE:
        functions.registry.touch(function)
    elif found is not None and (live or stored):
        state = State.RUNNING if live else State.ATTACHED
        words = f"{function.name} {'runs in' if live else 'is attached to'} domain {found.name}"
        placed = replace(function, domain=found.name, domain_uuid=found.uuid).with_state(state)
        await functions.registry.commit(placed, f"function-{state}", words)
        if placed.domain_uuid != function.domain_uuid:
            await admission.follow(functions, placed)
    elif function.domain_uuid in (None, domain_uuid):
        words = f"{function.name} is free again (was with domain {function.domain})"
        placed = replace(function, domain=None, domain_uuid=None).with_state(State.READY)
        await functions.registry.commit(placed, "function-ready", words)
        await admission.follow(functions, placed)
    else:
        functions.registry.touch(function)


def _in_use(function: Function, why: str, hint: str) -> ConflictError:
    return ConflictError(
        f'function "{function.name}": {why}',
        code="function-in-use",
        where=f"function:{function.name}",
        hint=hint,
    )


def _request(
    functions: Functions,
    target: Domain,
    function: Function,
    live: bool | None,
    persistent: bool | None,
) -> AttachRequest:
    if live is None and persistent is None:
        live, persistent = target.state.active, target.persistent
    if not live and not persistent:
        raise UsageError("neither live nor persistent leaves nothing to do", where="admin")
    if live and not target.state.active:
        raise ConflictError(
            f'domain "{target.name}" does not run',
            code="domain-state",
            where=f"domain:{target.name}",
            hint="leave out --live, or start it first",
        )
    socket = str(functions.world.paths.function(function.uuid).domain_socket(target.uuid))
    return AttachRequest(
        target.uuid, function.uuid, socket, bool(live), bool(persistent), function.window_bytes
    )
