"""Giving functions to domains and taking them back.

The domain's XML is the truth about who has a function; the store follows it (``DomainsLink.look``).
So there is nothing to journal: after a kill at any step the next look finds what really is.
"""

from __future__ import annotations

from accelvisor.daemon.domains import DomainsLink
from accelvisor.daemon.functions import Functions
from accelvisor.daemon.lifecycle import Event, move
from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.hypervisor.port import Attachment, AttachRequest, Domain


async def attach(
    functions: Functions,
    links: DomainsLink,
    domain: str,
    key: str,
    live: bool | None,
    persistent: bool | None,
) -> Attachment:
    """Raises NotFoundError, ConflictError (``function-in-use``, ``function-failed``, ...), and what
    the port raises."""
    uuid = functions.registry.find(key).uuid
    async with functions.lock(uuid):
        function = functions.registry.find(uuid)
        move(function.state, Event.TAKEN, function.name)
        target = await links.call(lambda port: port.get(domain))
        if function.domain_uuid not in (None, target.uuid):
            raise ConflictError(
                f'function "{function.name}" belongs to domain "{function.domain}"',
                code="function-in-use",
                where=f"function:{function.name}",
                hint="a function has one domain: detach it there first",
            )
        request = _request(functions, target, uuid, live, persistent)
        done = await links.call(lambda port: port.attach(request))
    await links.look()
    return done


async def detach(
    functions: Functions,
    links: DomainsLink,
    domain: str,
    key: str,
    live: bool | None,
    persistent: bool | None,
    deadline_s: float,
) -> Attachment:
    """Without flags: wherever it is. Raises ConflictError (``function-not-attached``), and what the
    port raises."""
    uuid = functions.registry.find(key).uuid
    async with functions.lock(uuid):
        target = await links.call(lambda port: port.get(domain))
        here_live = uuid in target.live_functions
        here_stored = uuid in target.persistent_functions
        if live is None and persistent is None:
            live, persistent = here_live, here_stored
        if not (live and here_live) and not (persistent and here_stored):
            raise ConflictError(
                f'domain "{target.name}" does not have function "{key}" there',
                code="function-not-attached",
                where=f"domain:{target.name}",
                hint="accelctl function show says who has it",
            )
        request = _request(functions, target, uuid, bool(live), bool(persistent))
        done = await links.call(
            lambda port: port.detach(request, deadline_s=deadline_s), patient=True
        )
    await links.look()
    return done


async def release(functions: Functions, links: DomainsLink, key: str, deadline_s: float) -> None:
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


def _request(
    functions: Functions, target: Domain, uuid: str, live: bool | None, persistent: bool | None
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
    socket = str(functions.world.paths.function(uuid).vfio_socket)
    window = functions.registry.find(uuid).window_bytes
    # By UUID: another domain may get this name while this one's turn comes.
    return AttachRequest(target.uuid, uuid, socket, bool(live), bool(persistent), window)
