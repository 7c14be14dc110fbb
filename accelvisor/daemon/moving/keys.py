"""This host's keys and its trust document, on disk: ``STATE/trust``, readable by the daemon alone.

============ ===================================================================================
host.pem     the keys that this host signs and seals with; host.old.pem those before them
host.new.pem those that are to follow, while a rotation is under way
root.pem     the key that signs this host's own trust document, while no fleet's roots do
trust        the trust document that is in force
rotations    key changes since then, of peers and our own
history      public keys that counted once, for reading the ledger's old records
============ ===================================================================================

Each file is replaced whole (write, sync, rename), and the order of writing is such that a kill
between two of them leaves a host that works: new keys are on disk before they count, and the next
start takes or drops them by what the keyring says.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import UUID

import msgspec

from accelvisor.daemon import atomic
from accelvisor.daemon.moving import admitting
from accelvisor.errors import (
    ConflictError,
    DataError,
    NotFoundError,
    PermissionDenied,
    StateError,
    SystemFailure,
)
from accelvisor.frames import changes, trust
from accelvisor.frames import envelope as envelopes
from accelvisor.frames.envelope import HeldKey
from accelvisor.frames.history import History
from accelvisor.frames.identity import (
    Identity,
    PublicIdentity,
    Signer,
    SigningKey,
    certificate,
)
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.rotation import rotate
from accelvisor.frames.trust import Host, Trust, Trusted
from accelvisor.limits import LIMITS
from accelvisor.migration.tls import Credentials, Pin, Pins

LOG = logging.getLogger(__name__)
_YEARS_NS = 30 * 366 * 86_400 * 10**9
#: A clock that is behind must not make our own certificate not yet valid.
_BEFORE_NS = 366 * 86_400 * 10**9
_WHERE = "trust"
_NEW = "host.new.pem"
K = TypeVar("K", bound=SigningKey)
#: Seconds. The wall clock decides when a key's time is over, and it may be set or jump.
_LOOK_S = 60.0


class Timer(Protocol):
    """What :data:`Later` gives: a call that has not been made yet."""

    def cancel(self) -> None: ...


#: Calls something after some seconds: an event loop's ``call_later``.
Later = Callable[[float, Callable[[], None]], Timer]


class Keys:
    """What this host is and whom it trusts. All methods are quick and may be called in the loop.

    Args:
        directory: made when it is missing.
        host: this host's UUID.
        name, address: how others show and reach it (host:port, empty when it does not listen).
        later: for cutting connections when the time of their key is over; until :meth:`close`.

    Raises:
        StateError: ``trust-damaged``: a file cannot be read; nothing is made anew in its place.
        SystemFailure: ``trust-io``.
    """

    def __init__(
        self,
        directory: Path,
        host: UUID,
        name: str,
        address: str,
        clock_ns: Callable[[], int] = time.time_ns,
        later: Later | None = None,
    ) -> None:
        self.host = host
        self._later = later
        self._timer: Timer | None = None
        self._directory = directory
        self._clock_ns = clock_ns
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load(name, address or "-")
        except OSError as error:
            raise _failed(directory, error) from error
        except DataError as error:
            raise StateError(
                f"keys or trust are damaged: {error.message}",
                code="trust-damaged",
                where=str(directory),
                hint="restore the directory; deleting it makes this host a stranger to its peers",
            ) from error

    def _load(self, name: str, address: str) -> None:
        self.identity = self._kept(
            "host.pem", Identity.from_pem, lambda: Identity.generate(os.urandom)
        )
        self.root = self._kept(
            "root.pem", SigningKey.from_pem, lambda: SigningKey.generate(os.urandom)
        )
        envelope = self._read("trust")
        if envelope is None:
            self._trusted = self._begin(name, address)
        else:
            self._trusted = _opened(envelope)
        raw = self._read("history")
        self._history = History.decode(raw) if raw else History()
        self.keyring = Keyring(self.document, self._read_rotations(), self._history)
        self._settle()
        self.credentials = Credentials(self.host, self.identity, self._certificate(), Pins())
        self._take_effect()
        mine = self.document.host(str(self.host))
        if mine is not None and self.mine_to_sign and (mine.name, mine.address) != (name, address):
            self._describe(name, address)

    # --- what is in force -------------------------------------------------------------------------

    @property
    def signer(self) -> Signer:
        """What this host signs its own records with."""
        return self.identity

    def key(self, key_id: str) -> HeldKey | None:
        """A key that is, or was, this host's own."""
        mine = str(self.host)
        if key_id == self.identity.key_id:
            return HeldKey(mine, self.identity.public)
        found = self.keyring.once(key_id)
        return found if found is not None and found.holder == mine else None

    @property
    def document(self) -> Trust:
        return self._trusted.document

    @property
    def envelope(self) -> bytes:
        """The signed document, to be shown or copied."""
        return self._trusted.envelope

    @property
    def mine_to_sign(self) -> bool:
        """Whether this host alone may change its document: no fleet's roots are in force."""
        roots = self.document.roots
        return [key.key_id for key in roots.keys] == [self.root.key_id]

    def peers(self) -> list[Host]:
        """All trusted hosts but this one, as they are with the rotations."""
        return [host for host in self.keyring.effective.hosts if host.uuid != str(self.host)]

    def find(self, name: str) -> Host:
        """A peer by UUID or name.

        Raises:
            NotFoundError: ``trust-host-unknown``; ConflictError: ``trust-host-ambiguous``.
        """
        peers = self.peers()
        # A UUID first: nobody may be taken for another host because of its name.
        found = [h for h in peers if h.uuid == name] or [h for h in peers if h.name == name]
        if len(found) > 1:
            raise ConflictError(
                f'{len(found)} trusted hosts are called "{name}"',
                code="trust-host-ambiguous",
                where=_WHERE,
                hint=f"name it by its UUID: {', '.join(host.uuid for host in found)}",
            )
        if found:
            return found[0]
        known = ", ".join(host.name for host in self.peers()) or "none"
        raise NotFoundError(
            f'no trusted host is called "{name}"',
            code="trust-host-unknown",
            where=_WHERE,
            hint=f"known: {known}; accelctl trust invite and join make two hosts trust each other",
        )

    @staticmethod
    def address_of(host: Host) -> tuple[str, int]:
        """Where a peer listens. NotFoundError ``trust-address``."""
        return Keys.address_of_text(host.address, host.name)

    @staticmethod
    def address_of_text(address: str, name: str = "") -> tuple[str, int]:
        """From host:port. NotFoundError ``trust-address``."""
        text, _, port = address.rpartition(":")
        if not text or not port.isdigit():
            raise NotFoundError(
                f"host {name} has no address" if name else f'"{address}" is no host:port',
                code="trust-address",
                where=_WHERE,
                hint="set [migration] address there, and let the hosts join again",
            )
        return text.strip("[]"), int(port)

    # --- changes ----------------------------------------------------------------------------------

    def admit(
        self, uuid: UUID, keys: PublicIdentity, name: str, again: UUID | None = None
    ) -> None:
        """Raises as :func:`accelvisor.daemon.moving.admitting.admit`."""
        admitting.admit(self.keyring.effective, uuid, keys, name, again)

    def learn(
        self,
        uuid: UUID,
        keys: PublicIdentity,
        name: str,
        address: str,
        again: UUID | None = None,
    ) -> bool:
        """Trust a host that has joined. Returns whether it was trusted, with other keys.

        Raises:
            as :meth:`admit`; PermissionDenied: ``trust-roots``.
        """
        self.admit(uuid, keys, name, again)
        now = self._clock_ns()
        known = self.keyring.effective.host(str(uuid))
        replaced = known is not None and not admitting.shows(known, keys)
        if known is None:
            after = changes.add_host(
                self.document, str(uuid), name, address or "-", keys, created_ns=now
            )
        else:
            after = self.document
            if replaced:
                after = changes.set_key(after, str(uuid), keys, created_ns=now, retire_ns=now)
            after = _described(after, str(uuid), name, address or "-", now)
        self._adopt(after)
        return replaced

    def remove(self, name: str) -> Host:
        """Trust a host no longer; all its keys are revoked. Returns it."""
        host = self.find(name)
        after = changes.remove_host(
            self.document,
            host.uuid,
            created_ns=self._clock_ns(),
            rotated=[key.key_id for key in host.keys],
        )
        self._adopt(after)
        return host

    def revoke(self, key: str) -> None:
        """A key counts no more. NotFoundError ``trust-key-unknown``; ConflictError for our own."""
        if key == self.identity.key_id:
            raise ConflictError(
                "this is the key that this host uses",
                code="trust-own-key",
                where=_WHERE,
                hint="accelctl trust rotate first",
            )
        now, document = self._clock_ns(), self.document
        shown = {k.key_id: host for host in self.keyring.effective.hosts for k in host.keys}
        if key in shown and shown[key].uuid == str(self.host):
            # Of our own rotations we know that they were ours, whoever has the key before them.
            document = changes.put_host(document, shown[key], created_ns=now)
        self._adopt(changes.revoke_key(document, key, created_ns=now, rotated=shown))

    def rotate(self) -> bytes:
        """New keys for this host, at once; the old ones count for a while. Returns the statement
        to tell the peers.

        Raises:
            NotFoundError: ``trust-host-unknown``; DataError: ``rotation-...``.
            SystemFailure: ``trust-io``; nothing has changed.
        """
        mine = self.keyring.effective.host(str(self.host))
        if mine is None:
            raise NotFoundError(
                "this host is not in its own trust document",
                code="trust-host-unknown",
                where=_WHERE,
            )
        # One before it may have had no room for its last step.
        self._settle()
        fresh = Identity.generate(os.urandom)
        now = self._clock_ns()
        retire = now + int(LIMITS.rotation_overlap_s * 10**9)
        statement = rotate(mine, self.identity, fresh, created_ns=now, retire_ns=retire)
        self.keyring.with_rotation(statement)  # which may refuse it: then nothing is written
        if self.mine_to_sign and mine != self.document.host(mine.uuid):
            # What we rotated before is signed by our own root from here on, and none too many.
            self._adopt(changes.put_host(self.document, mine, created_ns=now))
        after = self.keyring.with_rotation(statement)
        self._write(_NEW, fresh.to_pem())
        self._take_rotation(after)
        # It counts from here on, so nothing may hinder it any more.
        self.identity = fresh
        self.credentials.renew(fresh, self._certificate())
        try:
            self._settle()
        except SystemFailure as error:
            LOG.warning("the new keys are in %s until the next start: %s", _NEW, error.message)
        return statement

    def rotated(self, statement: bytes) -> None:
        """A peer tells that it has new keys. DataError ``rotation-...``."""
        self._take_rotation(self.keyring.with_rotation(statement))

    def replace(self, envelope: bytes) -> None:
        """Take over a document that a fleet's roots have signed.

        Raises:
            DataError: ``trust-...``: it is not signed as it must be, or older than ours.
        """
        self._install(trust.update(self._trusted, envelope))

    def join_fleet(self, envelope: bytes, roots: frozenset[str]) -> None:
        """Take over a fleet's document in the place of our own; a person has named its root keys.

        Raises:
            DataError: ``trust-roots``, ``trust-signature``, ``trust-threshold``, ``trust-shape``.
        """
        self._install(trust.first(envelope, roots))

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, name: str, address: str) -> Trusted:
        now = self._clock_ns()
        document = changes.create([self.root.public], 1, created_ns=now)
        document = changes.add_host(
            document, str(self.host), name, address, self.identity.public_identity, created_ns=now
        )
        envelope = trust.sign(document, [self.root])
        self._write("trust", envelope)
        return _opened(envelope)

    def _describe(self, name: str, address: str) -> None:
        now = self._clock_ns()
        self._adopt(_described(self.document, str(self.host), name, address, now))

    def _adopt(self, document: Trust) -> None:
        """Sign a change ourselves. PermissionDenied ``trust-roots`` where a fleet's roots must."""
        if document is self.document:
            return
        if not self.mine_to_sign:
            raise PermissionDenied(
                "this host's trust document is signed by a fleet's root keys",
                code="trust-roots",
                where=_WHERE,
                hint="change it with those keys, and give it to accelctl trust import",
            )
        # Several changes may have been made in a row: it is one new version.
        document = msgspec.structs.replace(document, version=self.document.version + 1)
        self._install(trust.update(self._trusted, trust.sign(document, [self.root])))

    def _install(self, trusted: Trusted) -> None:
        self._write("trust", trusted.envelope)
        self._trusted = trusted
        self.keyring = Keyring(self.document, self.keyring.rotations, self.keyring.history)
        self._take_effect()

    def _take_rotation(self, keyring: Keyring) -> None:
        if keyring is self.keyring:
            return
        self._write("rotations", msgspec.msgpack.encode(list(keyring.rotations)))
        self.keyring = keyring
        self._take_effect()

    def _settle(self) -> None:
        """The last step of a rotation, also of one that a kill ended: new keys take the place of
        the old ones if the keyring has them. If it has not, nobody was told of them.
        """
        raw, path = self._read(_NEW), self._directory / _NEW
        if raw is None:
            return
        new, current = Identity.from_pem(raw), self.keyring.current(str(self.host))
        try:
            if current is None or current.key_id != new.key_id:
                path.unlink()
                return
            atomic.replace(self._directory / "host.old.pem", self._read("host.pem") or b"")
            os.replace(path, self._directory / "host.pem")
            atomic.sync_directory(self._directory)
        except OSError as error:
            raise _failed(self._directory, error) from error
        self.identity = new

    def _take_effect(self) -> None:
        pins = [
            Pin(UUID(host.uuid), key.public, not_after_ns=key.not_after_ns)
            for host in self.peers()
            for key in host.keys
        ]
        self.credentials.trust(Pins(pins, clock_ns=self._clock_ns))
        self._expect_end()
        self._remember()

    def _remember(self) -> None:
        """Each key is kept when it comes, so that it is there when it goes."""
        history = self.keyring.history
        if history is self._history:
            return
        try:
            self._write("history", history.encode())
        except SystemFailure as error:
            # A key that is revoked must not stay because of this; the next change tries again.
            LOG.warning("old keys may be forgotten at the next start: %s", error.message)
        else:
            self._history = history

    def _expect_end(self) -> None:
        """Judge open connections again when the time of a key is over."""
        self.close()
        end = self.credentials.pins.next_end()
        if self._later is not None and end is not None:
            wait_s = (end - self._clock_ns()) / 1e9
            self._timer = self._later(min(max(wait_s, 0.0), _LOOK_S), self._look)

    def _look(self) -> None:
        self.credentials.judge()
        self._expect_end()

    def close(self) -> None:
        """The timer is of no use any more. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _certificate(self) -> bytes:
        now = self._clock_ns()
        return certificate(
            self.identity,
            self.host,
            serial=secrets.randbits(63) | 1,
            not_before_ns=now - _BEFORE_NS,
            not_after_ns=now + _YEARS_NS,
        )

    def _read_rotations(self) -> tuple[bytes, ...]:
        raw = self._read("rotations")
        try:
            return tuple(msgspec.msgpack.decode(raw, type=list[bytes])) if raw else ()
        except msgspec.MsgspecError as error:
            raise DataError(f"rotations: {error}") from error

    # --- files ------------------------------------------------------------------------------------

    def _kept(self, name: str, load: Callable[[bytes], K], make: Callable[[], K]) -> K:
        """The key in a file, which is made when it is not there."""
        raw = self._read(name)
        if raw is not None:
            return load(raw)
        made = make()
        self._write(name, made.to_pem())
        return made

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        """Raises SystemFailure ``trust-io``; the file is as it was then."""
        try:
            atomic.replace(self._directory / name, data)
        except OSError as error:
            raise _failed(self._directory, error) from error


def _failed(directory: Path, error: OSError) -> SystemFailure:
    return SystemFailure(
        f"keys and trust cannot be kept: {error.strerror}", code="trust-io", where=str(directory)
    )


def _opened(envelope: bytes) -> Trusted:
    """A document of our own directory: whole, and signed by the roots that it names."""
    payload = envelopes.decode(
        envelope, kind=trust.TRUST_TYPE, max_bytes=LIMITS.trust_bytes
    ).payload
    roots = trust.decode(payload).roots
    return trust.first(envelope, frozenset(key.key_id for key in roots.keys))


def _described(document: Trust, uuid: str, name: str, address: str, now: int) -> Trust:
    """The document with a host's name and address; the same one when nothing changes."""
    host = changes.require_host(document, uuid)
    if (host.name, host.address) == (name, address):
        return document
    after = msgspec.structs.replace(host, name=name, address=address)
    hosts = [after if other is host else other for other in document.hosts]
    return changes.change(document, now, hosts=hosts)
