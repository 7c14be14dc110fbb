"""Checkpoints to and from other hosts, as files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import BinaryIO, cast

from accelvisor.daemon.moving import packing
from accelvisor.daemon.moving.library import Library
from accelvisor.daemon.moving.numbers import Mark
from accelvisor.daemon.moving.packing import Content, Recipient
from accelvisor.daemon.moving.shelf import Head, read_head
from accelvisor.daemon.moving.unpacking import Unpacked
from accelvisor.errors import ConflictError, DataError, FrameRefused
from accelvisor.frames import container
from accelvisor.frames.chunks import Buffer, Header, Kind
from accelvisor.frames.container import Readable
from accelvisor.frames.steps import refuse
from accelvisor.frames.store import Entry
from accelvisor.frames.verify import Expected
from accelvisor.limits import LIMITS


class _Nowhere:
    """Staging for what is only verified."""

    def write(self, header: Header, payload: Buffer) -> None:
        """It is not looked at."""


def copy_out(library: Library, name: str, file: BinaryIO) -> bytes:
    """A checkpoint as it is, once it was verified; its digest. Blocks. FrameRefused."""
    verifier = library.verifier(Expected(me=str(library.services.keys.host)))
    with library.store.open(name) as source:
        verified = container.verify(cast(Readable, source), verifier, _Nowhere())
        source.seek(0)
        shutil.copyfileobj(source, file, LIMITS.chunk_bytes)
    file.flush()
    return verified.digest


def sign_again(library: Library, state: Unpacked, file: BinaryIO, whom: Recipient) -> bytes:
    """A verified state as one whole checkpoint for somebody else; its digest. Blocks."""
    services = library.services
    return packing.write(services, file, _content(state), whom, zstd=False)


def take_in(library: Library, file: BinaryIO, name: Callable[[Head], str]) -> Entry:
    """Verify a whole checkpoint for this host, and keep it: what is kept is what was verified.
    Blocks.

    Args:
        file: binary, seekable, at its beginning.
        name: what it is called here.

    Raises:
        FrameRefused; ConflictError: ``checkpoint-exists``, ``checkpoint-known``; CapacityError.
    """
    store = library.store
    head = _head(library, file)
    uuid = head.manifest.function
    known = [entry.name for entry in store.list(uuid) if entry.digest == head.digest]
    if known:
        raise ConflictError(
            f"it is here already, as {known[0]}", code="checkpoint-known", where="checkpoints"
        )
    store.require_room(file.seek(0, os.SEEK_END))
    file.seek(0)
    expected = Expected(me=str(library.services.keys.host), parent=b"", function=uuid)
    own = f"{uuid}/{name(head)}"
    with store.put(own) as kept:
        shutil.copyfileobj(file, kept, LIMITS.chunk_bytes)
        library.services.fault("import:copied")
        kept.seek(0)
        container.verify(cast(Readable, kept), library.verifier(expected), _Nowhere())
    return store.entry(own)


def _head(library: Library, file: BinaryIO) -> Head:
    """What the file says of itself; a refusal is recorded."""
    try:
        return read_head(file)
    except FrameRefused as error:
        library.verifier(Expected()).refused(error, b"")
    except DataError as error:
        library.verifier(Expected()).refused(refuse("frame-shape", error.message), b"")


def _content(state: Unpacked) -> Content:
    manifest = state.manifest
    sections = {Kind[name.upper()]: size for name, size in manifest.sections.items()}
    return Content(
        function=manifest.function,
        domain=manifest.domain,
        owner=manifest.owner,
        mark=Mark(manifest.epoch, manifest.sequence),
        frames=manifest.kind,
        profile=manifest.profile,
        firmware=manifest.firmware,
        digest=manifest.digest,
        parent=b"",
        models=manifest.models,
        sections=sections,
        pieces=[piece for piece in state.place.pieces() if piece[0] in sections],
    )
