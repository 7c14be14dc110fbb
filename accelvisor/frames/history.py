"""Keys that counted once, by host: for reading what was signed in their time.

A ledger's newest record of a function that never moved is as old as the function. The key that
signed it may have been replaced many times since, or revoked. It must not count for anything new,
but forgetting it would make the function nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from accelvisor.errors import DataError
from accelvisor.frames.envelope import HeldKey
from accelvisor.frames.identity import KEY_BYTES
from accelvisor.frames.trust import Trust
from accelvisor.limits import LIMITS


class History:
    """Immutable.

    Args:
        hosts: raw public keys by host UUID, the oldest first.
    """

    def __init__(self, hosts: Mapping[str, tuple[bytes, ...]] | None = None) -> None:
        self._hosts = dict(hosts or {})
        self._keys = {key.key_id: key for key in self}

    def __iter__(self) -> Iterator[HeldKey]:
        return (HeldKey(host, public) for host, keys in self._hosts.items() for public in keys)

    def find(self, name: str) -> HeldKey | None:
        """The key with this id."""
        return self._keys.get(name)

    def with_keys(self, trusted: Trust) -> History:
        """And the keys of this document; the same one when all are known.

        Each host has room of its own, so that none can push out another one's keys. A key stays
        whose it was first.
        """
        hosts = dict(self._hosts)
        for host in trusted.hosts:
            new = tuple(key.public for key in host.keys if key.key_id not in self._keys)
            if new:
                # A host that was seen lately moves to the end.
                kept = hosts.pop(host.uuid, ())
                hosts[host.uuid] = (*kept, *new)[-LIMITS.history_keys :]
        if hosts == self._hosts:
            return self
        listed = {host.uuid for host in trusted.hosts}
        gone = [uuid for uuid in hosts if uuid not in listed]
        for uuid in gone[: max(len(hosts) - LIMITS.history_hosts, 0)]:
            del hosts[uuid]
        return History(hosts)

    def encode(self) -> bytes:
        """For a file."""
        return msgspec.msgpack.encode(self._hosts)

    @classmethod
    def decode(cls, data: bytes) -> History:
        """Raises DataError ``trust-shape``."""
        try:
            hosts = msgspec.msgpack.decode(data, type=dict[str, tuple[bytes, ...]])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _shape(str(error)) from error
        if any(len(public) != KEY_BYTES for keys in hosts.values() for public in keys):
            raise _shape("a key has another length")
        return cls(hosts)


def _shape(why: str) -> DataError:
    return DataError(
        f"the keys that counted once cannot be read: {why}", code="trust-shape", where="trust"
    )
