"""Whether a host that joins may be trusted as what it says it is. Whoever has a join code chooses
UUID and name itself, and must not become a host that is trusted already.
"""

from __future__ import annotations

from uuid import UUID

from accelvisor.daemon.names import is_uuid
from accelvisor.errors import ConflictError
from accelvisor.frames.identity import PublicIdentity, key_id
from accelvisor.frames.trust import Host, Trust

_WHERE = "trust"


def admit(
    trusted: Trust, uuid: UUID, keys: PublicIdentity, name: str, again: UUID | None = None
) -> None:
    """Look at a host that joins.

    Args:
        trusted: the document with the rotations.
        again: the trusted host that a person expects with other keys.

    Raises:
        ConflictError: ``trust-key-revoked``, ``trust-host-other-key``, ``trust-name-taken``.
    """
    if key_id(keys.signing) in trusted.revoked:
        raise ConflictError(
            f"the key of host {name} was revoked here, or the host removed",
            code="trust-key-revoked",
            where=_WHERE,
            hint="accelctl trust rotate there, then join again",
        )
    known = trusted.host(str(uuid))
    if known is not None and uuid != again and not shows(known, keys):
        raise ConflictError(
            f"host {known.name} ({uuid}) is trusted already, with another key",
            code="trust-host-other-key",
            where=_WHERE,
            hint="if it is that host: accelctl trust invite --again HOST here, then join there;"
            " or accelctl trust remove HOST here, and join anew",
        )
    named = (host.name for host in trusted.hosts if host.uuid != str(uuid))
    if name in named or (is_uuid(name) and name != str(uuid)):
        raise ConflictError(
            f'a host that joins may not be called "{name}": that is another one',
            code="trust-name-taken",
            where=_WHERE,
            hint="set [host] name there to one that no other host has, or remove the other one",
        )


def shows(host: Host, keys: PublicIdentity) -> bool:
    """Whether these are the host's current keys."""
    current = host.current
    return current is not None and (current.public, current.sealing) == (keys.signing, keys.sealing)
