"""`virsh save`, `restore`, `managedsave` and snapshots: a VM's functions are saved with it.

QEMU asks while its VM stands still: the functions are stopped together, copied with what they wrote
to the VM's RAM, and written as checkpoints of this host; QEMU's own file gets their digests as a
token. When QEMU brings the token back, the checkpoints are found by digest, verified and loaded;
the functions stand still until the VM goes on.

Which saved state of a VM is brought back is its operator's decision, as with QEMU's own file: an
older one is loaded too, and that is recorded. It must lie in this host's own store, be of this
function and domain, and the function must be this host's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import msgspec

from accelvisor.daemon.functions import holding
from accelvisor.daemon.moving import capture, documents
from accelvisor.daemon.moving.capture import Link, Taken, Taker
from accelvisor.daemon.moving.checkpoints import Checkpoints
from accelvisor.daemon.moving.numbers import Mark
from accelvisor.daemon.moving.packing import Recipient
from accelvisor.daemon.moving.unpacking import Unpacked
from accelvisor.daemon.store import Function
from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    DataError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)
from accelvisor.frames import canonical
from accelvisor.frames.store import Entry
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
SAVED = "save-"
_WHERE = "save"


class FileToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in QEMU's file: the digest of each function's checkpoint."""

    version: int
    mode: str
    parts: dict[str, bytes]

    def encode(self) -> bytes:
        """Its canonical bytes."""
        return canonical.encode(msgspec.to_builtins(self, builtin_types=(bytes,)))


def read_token(data: bytes) -> FileToken | None:
    """The token of a file; None for one that is something else (a migration's)."""
    try:
        value = canonical.decode(data, max_bytes=LIMITS.manifest_bytes)
        found = msgspec.convert(value, FileToken, builtin_types=(bytes,))
    except (DataError, msgspec.ValidationError):
        return None
    return found if found.version == 1 and found.mode == "file" else None


class DomainSaves:
    """One per daemon.

    Args:
        domain_state: what a domain does: "running", "paused" or "gone".
    """

    def __init__(
        self, checkpoints: Checkpoints, domain_state: Callable[[str], Awaitable[str]]
    ) -> None:
        self._checkpoints = checkpoints
        self._library = checkpoints.library
        self._services = checkpoints.library.services
        self._domain_state = domain_state
        #: Verified already, since the VM's PCI context was asked for, by (function, digest).
        self._ready: dict[str, Unpacked] = {}

    # --- saving -----------------------------------------------------------------------------------

    async def watch(self, domain_uuid: str) -> None:
        """The VM stopped, or its memory begins to be copied: follow what its functions write to it
        from here on, for QEMU does not see that.
        """
        for function in self._functions(domain_uuid):
            # What a chain of checkpoints follows ends with what this begins.
            self._checkpoints.forget_base(function.uuid)
            await asyncio.to_thread(self._link(function).control, "track", on=True)

    async def save_for_domain(self, domain_uuid: str) -> bytes:
        """Save all functions of a VM that stands still; the token. They stand still afterwards.

        Raises:
            ConflictError: ``function-moving``; ``save-untracked``: what they wrote to the VM's RAM
                is not known; ``ledger-...``.
            CapacityError: ``checkpoint-space``, ``checkpoint-memory``.
            AccelvisorError: what a function answered. Nothing is kept, and they go on; so it is
                when whoever asked has gone before the end.
        """
        given_up = asyncio.Event()
        try:
            return await self._services.functions.carry(self._save(domain_uuid, given_up))
        except AccelvisorError as error:
            # virsh only says that QEMU was refused.
            await self._services.record("save-refused", domain_uuid, _why(error))
            raise
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def _save(self, domain_uuid: str, given_up: asyncio.Event) -> bytes:
        functions = self._functions(domain_uuid)
        takers: list[Taker] = []
        entries: list[Entry] = []
        async with AsyncExitStack() as stack:
            for function in functions:
                await stack.enter_async_context(self._checkpoints.locks[function.uuid])
                self._services.functions.require_free(function)
                function.require_whole()
                # To the end, also after QEMU gave up: a move that began meanwhile would be undone.
                stack.enter_context(holding(self._services.functions.held, function.uuid))
            marks = [await self._library.next_mark(function.uuid) for function in functions]
            try:
                for function, mark in zip(functions, marks, strict=True):
                    await self._begin(function, mark, takers)
                taken = await self._stop(takers)
                for function, mark, one in zip(functions, marks, taken, strict=True):
                    entries.append(await self._keep(function, mark, one))
                if given_up.is_set():
                    raise _too_late()
            except BaseException:
                await asyncio.to_thread(self._undo, functions, takers, entries)
                raise
            for taker in takers:
                await asyncio.to_thread(taker.drop)
        parts = {entry.function: entry.digest for entry in entries}
        for entry in entries:
            words = f"checkpoint {entry.name} is part of the saved VM"
            await self._services.record("checkpoint-saved", entry.function, words)
        return FileToken(1, "file", parts).encode()

    async def _begin(self, function: Function, mark: Mark, takers: list[Taker]) -> None:
        self._checkpoints.forget_base(function.uuid)
        paths = self._services.functions.world.paths.function(function.uuid)
        taker = Taker(function, paths, mark.epoch)
        takers.append(taker)
        said = await asyncio.to_thread(taker.begin)
        if not said.tracking:
            raise ConflictError(
                "what the function wrote to the VM's memory while that was saved is not known",
                code="save-untracked",
                where=f"function:{function.name}",
                hint="accelvisord was not there when the VM stopped: resume it, and try again",
            )

    async def _stop(self, takers: list[Taker]) -> list[Taken]:
        """All together: what one sends to another is received before either stops."""
        for state in ("fence", "RUNNING_P2P", "STOP_COPY"):
            await asyncio.gather(*(asyncio.to_thread(_walk, taker.link, state) for taker in takers))
        self._services.fault("save:frozen")
        return await asyncio.gather(*(asyncio.to_thread(_copy, taker) for taker in takers))

    async def _keep(self, function: Function, mark: Mark, taken: Taken) -> Entry:
        content = await self._library.content(function, taken, mark, "both")
        name = f"{function.uuid}/{SAVED}{mark.epoch}.{mark.sequence}"
        zstd = self._checkpoints.settings.zstd
        return await asyncio.to_thread(self._library.keep, name, content, Recipient(), zstd)

    def _undo(
        self, functions: list[Function], takers: list[Taker], entries: list[Entry]
    ) -> None:
        for entry in entries:
            self._library.store.delete(entry.name)
        for taker in takers:
            taker.drop()
        for function in functions:
            try:
                self._go_on(function)
            except AccelvisorError as error:
                LOG.error("function %s: %s", function.uuid, error.message)

    async def drop(self, token: bytes) -> None:
        """Delete what a token names that nobody has."""
        parts = wanted.parts if (wanted := read_token(token)) is not None else {}
        for function, digest in parts.items():
            async with self._checkpoints.locks[function]:
                entry = await asyncio.to_thread(self._entry, function, digest)
                if entry is not None:
                    await asyncio.to_thread(self._library.store.delete, entry.name)
                    words = f"checkpoint {entry.name} is part of no saved VM"
                    await self._services.record("checkpoint-deleted", function, words)

    # --- loading ----------------------------------------------------------------------------------

    async def context_for_domain(self, domain_uuid: str) -> Mapping[str, bytes]:
        """Before anything is loaded: PCI configuration space of each function, as the newest saved
        checkpoint has it; nothing for one that was never saved. It is verified.

        Raises:
            FrameRefused, StateError: as :meth:`load_for_domain`.
        """
        found = {}
        for function in self._functions(domain_uuid):
            entries = await asyncio.to_thread(self._library.store.list, function.uuid)
            saved = [e for e in entries if e.name.partition("/")[2].startswith(SAVED)]
            if saved:
                state = await self._verified(function, saved[-1])
                self._drop(function.uuid)
                self._ready[function.uuid] = state
                if state.frame is not None:
                    found[function.uuid] = state.frame.config
        return found

    async def loaded_contexts(self, domain_uuid: str) -> Mapping[str, bytes]:
        """After the load: PCI configuration space of each function that was loaded and has not gone
        on since.
        """
        found = {}
        for function in self._functions(domain_uuid):
            said = await asyncio.to_thread(self._link(function).describe)
            if said.fenced and said.migration_state == "STOP":
                found[function.uuid] = bytes.fromhex(said.config)
        return found

    async def require_contexts(self, domain_uuid: str, contexts: Mapping[str, bytes]) -> None:
        """QEMU has given its devices these contexts: the functions must have heard the same.

        Raises:
            StateError: ``status-context``.
        """
        for function in self._functions(domain_uuid):
            if function.uuid in contexts:
                said = await asyncio.to_thread(self._link(function).describe)
                documents.require_interrupt(contexts[function.uuid], said)

    async def load_for_domain(self, domain_uuid: str, token: bytes) -> None:
        """QEMU brings its token back: load all functions. They stand still afterwards.

        Raises:
            DataError: ``token``; ConflictError: ``save-functions``: the VM has other functions.
            NotFoundError: ``checkpoint-not-found``: it is not in this host's store.
            FrameRefused, StateError, and what a function answers. No function computes then.
        """
        try:
            await self._services.functions.carry(self._load(domain_uuid, token))
        except AccelvisorError as error:
            await self._services.record("restore-refused", domain_uuid, _why(error))
            raise

    async def _load(self, domain_uuid: str, token: bytes) -> None:
        wanted = read_token(token)
        if wanted is None:
            raise DataError(
                "what QEMU's file brings is no token of accelvisor", code="token", where=_WHERE
            )
        functions = self._functions(domain_uuid)
        if {function.uuid for function in functions} != set(wanted.parts):
            raise ConflictError(
                "the VM was saved with other functions than it has",
                code="save-functions",
                where=_WHERE,
                hint="attach the functions that it was saved with",
            )
        states: list[Unpacked] = []
        async with AsyncExitStack() as stack:
            for function in functions:
                await stack.enter_async_context(self._checkpoints.locks[function.uuid])
                self._services.functions.require_free(function)
            # Whose PCI context was there before has it compared now, the others at the end.
            given = set(self._ready)
            try:
                # All of them before one is loaded.
                for function in functions:
                    states.append(await self._state(function, wanted.parts[function.uuid]))
                for function, state in zip(functions, states, strict=True):
                    await self._into(function, state, function.uuid in given)
            finally:
                for state in states:
                    await asyncio.to_thread(state.close)

    async def _state(self, function: Function, digest: bytes) -> Unpacked:
        ready = self._ready.pop(function.uuid, None)
        if ready is not None:
            if ready.verified.digest == digest:
                return ready
            await asyncio.to_thread(ready.close)
        entry = await asyncio.to_thread(self._entry, function.uuid, digest)
        if entry is not None:
            return await self._verified(function, entry)
        raise NotFoundError(
            f"the checkpoint {digest.hex()[:16]} of function {function.name} is not on this host",
            code="checkpoint-not-found",
            where=_WHERE,
            hint="accelctl checkpoint export there, and import here",
        )

    def _entry(self, function: str, digest: bytes) -> Entry | None:
        entries = self._library.store.list(function)
        return next((entry for entry in entries if entry.digest == digest), None)

    async def _verified(self, function: Function, entry: Entry) -> Unpacked:
        return await self._library.verified(entry.name, function.uuid, function, older=True)

    async def _into(self, function: Function, state: Unpacked, context: bool) -> None:
        manifest = state.manifest
        mark = Mark(manifest.epoch, manifest.sequence)
        await self._library.step_back(function.uuid, mark, state.verified.digest)
        await self._checkpoints.restoring.reload(function, state, go=False, context=context)
        await asyncio.to_thread(self._library.numbers.reached, function.uuid, mark)
        words = f"checkpoint {manifest.epoch}.{manifest.sequence} was loaded with its VM"
        await self._services.record("checkpoint-restored", function.uuid, words)

    # --- going on ---------------------------------------------------------------------------------

    async def resumed(self, domain_uuid: str) -> None:
        """The VM goes on, whatever was before: restored, saved in vain, snapshot, begun anew. What
        a move decides about is left alone.
        """
        functions = self._functions(domain_uuid)
        for function in functions:
            self._drop(function.uuid)
        await asyncio.gather(*(self._resume(function) for function in functions))

    async def gone(self, domain_uuid: str) -> None:
        """The VM is not there any more: forget what was verified for it."""
        for function in self._functions(domain_uuid):
            self._drop(function.uuid)

    async def recover(self) -> None:
        """At the start: a VM that runs has no function that stands still, unless a move says so."""
        domains = {
            function.domain_uuid
            for function in self._services.functions.registry.all()
            if function.domain_uuid is not None
        }
        await asyncio.gather(*(self._go_on_if_running(domain) for domain in domains))

    async def _go_on_if_running(self, domain: str) -> None:
        if await self._domain_state(domain) == "running":
            await self.resumed(domain)

    async def _resume(self, function: Function) -> None:
        functions = self._services.functions
        for pause_s in capture.PAUSES_S:
            try:
                # A save that QEMU waited for no longer is ended first.
                async with self._checkpoints.locks[function.uuid]:
                    # Asked only now: that may have taken long enough for a move to begin, or end.
                    if function.uuid in functions.held or not functions.registry.get(function.uuid):
                        return
                    with holding(functions.held, function.uuid):
                        await asyncio.to_thread(self._go_on, function)
                    # Nor does a checkpoint that left it standing need a restart any more.
                    await asyncio.to_thread(self._library.numbers.end, function.uuid)
                return
            except (UnavailableError, DeadlineError) as error:
                LOG.warning("function %s: %s", function.uuid, error.message)
                reason = error.message
            except AccelvisorError as error:
                LOG.error("function %s: %s", function.uuid, error.message)
                reason = error.message
                break
            await asyncio.sleep(pause_s)
        words = f"it stands still, though its VM goes on: {reason}"
        await self._services.record(capture.STANDING, function.uuid, words)

    def _go_on(self, function: Function) -> None:
        """From wherever it stands; nothing to do for one that computes."""
        link = self._link(function)
        said = link.describe()
        loaded = said.migration_state == "STOP"
        if said.fenced or said.migration_state != "RUNNING":
            link.control("migrate", to="RUNNING")
            if loaded:
                link.control("moved")
            link.control("fence", on=False)
        if said.tracking and function.uuid not in self._checkpoints.followed:
            link.control("track", on=False)

    def _drop(self, uuid: str) -> None:
        state = self._ready.pop(uuid, None)
        if state is not None:
            state.close()

    def _functions(self, domain_uuid: str) -> list[Function]:
        known = self._services.functions.registry.all()
        return sorted((f for f in known if f.domain_uuid == domain_uuid), key=lambda f: f.uuid)

    def _link(self, function: Function) -> Link:
        return capture.Link(self._services.functions.world.paths.function(function.uuid))


def _why(error: AccelvisorError) -> str:
    return f"{error.message} ({error.code})"


def _too_late() -> ConflictError:
    return ConflictError(
        "QEMU did not wait for the functions to be saved",
        code="save-late",
        where=_WHERE,
        hint="a slow disk, or a busy host: try again",
    )


def _walk(link: Link, state: str) -> None:
    if state == "fence":
        link.control("fence", on=True)
    else:
        link.control("migrate", to=state)


def _copy(taker: Taker) -> Taken:
    taker.stopped(whole=True, extents=True)
    return taker.finish(0.0)
