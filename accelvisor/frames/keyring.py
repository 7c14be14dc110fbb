"""Keys by their ids: what a verifier sees of a trust document and the rotations since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accelvisor.frames.envelope import HeldKey
from accelvisor.frames.history import History
from accelvisor.frames.identity import key_id
from accelvisor.frames.rotation import overlay, overlay_all, require_room
from accelvisor.frames.steps import refuse
from accelvisor.frames.trust import HostKey, Trust


@dataclass(frozen=True, slots=True)
class Key:
    """A host's key. Is what :mod:`accelvisor.frames.envelope` calls a public key."""

    host: str
    host_name: str
    entry: HostKey

    @property
    def key_id(self) -> str:
        return self.entry.key_id

    @property
    def algorithm(self) -> str:
        return self.entry.algorithm

    @property
    def public(self) -> bytes:
        return self.entry.public

    @property
    def holder(self) -> str:
        return self.host


class Keyring:
    """Immutable: a new document or rotation makes a new one.

    Args:
        document: the trusted one.
        rotations: envelopes of rotations that came since; what is void is left out.
        history: keys that counted before; those of now are added.
    """

    def __init__(
        self, document: Trust, rotations: Iterable[bytes] = (), history: History | None = None
    ) -> None:
        effective, kept = overlay_all(document, rotations)
        self._set(document, effective, kept, history or History())

    def _set(
        self, document: Trust, effective: Trust, rotations: tuple[bytes, ...], history: History
    ) -> None:
        self.document = document
        #: With the rotations; for looking things up, not for signing.
        self.effective, self.rotations = effective, rotations
        self._keys = {
            entry.key_id: Key(host.uuid, host.name, entry)
            for host in self.effective.hosts
            for entry in host.keys
        }
        self._revoked = frozenset(document.revoked)
        self.history = history.with_keys(document).with_keys(self.effective)

    @property
    def manifest_threshold(self) -> int:
        return self.document.manifest_threshold

    def with_rotation(self, envelope: bytes) -> Keyring:
        """Raises DataError ``rotation-...``, see :func:`accelvisor.frames.rotation.overlay`."""
        after = overlay(self.effective, envelope)
        if after is self.effective:
            return self
        require_room(self.document, after)
        # What the others say is known; looking at all of them again takes long.
        made = Keyring.__new__(Keyring)
        made._set(self.document, after, (*self.rotations, envelope), self.history)
        return made

    def find(self, name: str) -> Key | None:
        """The key with this id, whatever its time; None for an unknown or revoked one."""
        return None if name in self._revoked else self._keys.get(name)

    def once(self, name: str) -> HeldKey | None:
        """The key with this id if it ever counted here: replaced, revoked, of a host that was
        removed. For a record which a ledger holds already, as that of a function's owner: it says
        who signed it then. Whoever stole an old key can sign with it, so nothing that comes from a
        peer may be judged by this, no link, no frame and no new record: that is :meth:`find`.
        """
        return self.history.find(name)

    def usable(self, name: str, now_ns: int) -> Key:
        """The key with this id, if it counts at that time. Step 2 of the verification.

        Raises:
            FrameRefused: ``frame-key-revoked``, ``frame-key-unknown``, ``frame-key-expired``.
        """
        if name in self._revoked:
            raise refuse("frame-key-revoked", f"key {name} was revoked")
        key = self._keys.get(name)
        if key is None:
            raise refuse("frame-key-unknown", f"key {name} is of no host that is trusted here")
        until = key.entry.not_after_ns
        if until and now_ns > until:
            raise refuse(
                "frame-key-expired",
                f"key {name} of host {key.host_name} was replaced and counts no more",
            )
        return key

    def peer(self, public: bytes, now_ns: int) -> Key:
        """The key of a peer that showed it in TLS.

        Raises:
            FrameRefused: as :meth:`usable`.
        """
        return self.usable(key_id(public), now_ns)

    def current(self, host: str) -> Key | None:
        """A host's current key: what its peers seal for. None without one."""
        found = self.effective.host(host)
        entry = found.current if found is not None else None
        return None if entry is None else self.find(entry.key_id)
