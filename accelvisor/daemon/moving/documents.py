"""The two frames as documents: what a function is and stands in, and what its state must look like.

Both are canonical msgpack inside a signed checkpoint. The *function frame* names resources,
configuration, the guest's processes and what the device may reach; the *status frame* names the
digests of the sections, fault counters and the model clock. The function process that tells most of
it is driven by a guest, so its answers are bounded here, on both hosts.

Status validation after a load (V1 to V8) compares the two hosts' documents; ring invariants (V4)
and DMA windows (V5) are checked by the function process itself while it loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from accelvisor.errors import ProtocolError, StateError
from accelvisor.frames import canonical
from accelvisor.frames.manifest import Firmware, Profile
from accelvisor.limits import LIMITS

Text = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Word = Annotated[int, Meta(ge=0)]  # 64 bits, which msgspec cannot bound
Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: What must be equal on two hosts for a computation to go on with the same bits.
_DECIDES = ("abi", "state", "numpy", "blas", "core", "libc", "machine", "simd")
#: Windows that a document lists; the process checks them all.
_WINDOWS = 256


class Process(Struct, frozen=True, forbid_unknown_fields=True):
    """One context: which guest process uses the function, on which queue, with how many objects."""

    queue: Number
    pid: Number
    name: Text
    objects: Number


class FunctionFrame(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The function as it is mapped to its VM. ``config`` is PCI configuration space."""

    version: Number = 1
    function: Text
    profile: Text
    cores: Number
    chips: Number
    memory_bytes: Number
    window_bytes: Number
    queues: Number
    ring_entries: Number
    firmware: dict[Text, Annotated[str, Meta(max_length=4096)]]
    config: Annotated[bytes, Meta(min_length=256, max_length=4096)]
    msi: bool
    processes: Annotated[tuple[Process, ...], Meta(max_length=LIMITS.contexts)]
    windows: Annotated[tuple[tuple[Word, Word, Number], ...], Meta(max_length=_WINDOWS)]
    window_count: Number
    peers: Annotated[tuple[Text, ...], Meta(max_length=256)]


class Digests(Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 of each section, hexadecimal (function/digest.py)."""

    state: Hex
    window: Hex
    memory: Hex


class StatusFrame(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the loaded device must answer when it is read back."""

    version: Number = 1
    digests: Digests
    faults: Number
    resets: Number
    objects: Number
    memory_used_bytes: Number


D = TypeVar("D", FunctionFrame, StatusFrame)


class _Context(Struct):
    """As ``describe`` tells it; objects are only counted."""

    queue: Number
    pid: Word
    name: str
    objects: list[Any]


class Described(Struct, kw_only=True):
    """What a function process answers to ``describe``; it may say more than is looked at."""

    uuid: Text
    profile: Text
    cores: Number
    chips: Number
    memory_bytes: Number
    window_bytes: Number
    queues: Number
    ring_entries: Number
    firmware: dict[Text, Annotated[str, Meta(max_length=4096)]]
    config: Annotated[str, Meta(max_length=8192)]
    msi: bool
    migration_state: Text
    fenced: bool
    tracking: bool
    contexts: Annotated[list[_Context], Meta(max_length=LIMITS.contexts)]
    windows: list[tuple[Word, Word, Number]]
    peers: Annotated[list[Text], Meta(max_length=256)]
    ram_bytes: Number
    faults: Number
    resets: Number
    objects: Number
    memory_used_bytes: Number


def described(reply: Mapping[str, Any]) -> Described:
    """Check what a function process said. Raises ProtocolError ``function-reply``."""
    try:
        return msgspec.convert(dict(reply), Described)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ProtocolError(
            f"the function describes itself impossibly: {error}",
            code="function-reply",
            where="documents",
        ) from error


def function_frame(said: Described) -> FunctionFrame:
    """The function frame of a function that described itself."""
    return FunctionFrame(
        function=said.uuid,
        profile=said.profile,
        cores=said.cores,
        chips=said.chips,
        memory_bytes=said.memory_bytes,
        window_bytes=said.window_bytes,
        queues=said.queues,
        ring_entries=said.ring_entries,
        firmware=said.firmware,
        config=bytes.fromhex(said.config),
        msi=said.msi,
        processes=tuple(
            Process(c.queue, min(c.pid, 2**32), c.name[:64], len(c.objects)) for c in said.contexts
        ),
        windows=tuple(said.windows[:_WINDOWS]),
        window_count=len(said.windows),
        peers=tuple(said.peers),
    )


def status_frame(said: Described, digests: Mapping[str, str]) -> StatusFrame:
    """The status frame of a function that stands still."""
    return StatusFrame(
        digests=Digests(**digests),
        faults=said.faults,
        resets=said.resets,
        objects=said.objects,
        memory_used_bytes=said.memory_used_bytes,
    )


def encode(frame: FunctionFrame | StatusFrame) -> bytes:
    """Its canonical bytes."""
    return canonical.encode(msgspec.to_builtins(frame, builtin_types=(bytes,)))


def decode(data: bytes, kind: type[D]) -> D:
    """Only of a verified checkpoint. Raises StateError ``status-frame``."""
    try:
        value = canonical.decode(data, max_bytes=LIMITS.manifest_bytes, max_values=8192)
        return msgspec.convert(value, kind, builtin_types=(bytes,))
    except Exception as error:
        raise _refuse("status-frame", "V1", f"a frame cannot be read: {error}") from error


def status_digest(digests: Digests) -> bytes:
    """What the manifest signs: SHA-256 of the canonical document of section digests."""
    return hashlib.sha256(canonical.encode(msgspec.to_builtins(digests))).digest()


def manifest_profile(frame: FunctionFrame) -> Profile:
    """The size, as a manifest names it."""
    return Profile(
        name=frame.profile,
        cores=frame.cores,
        memory_bytes=frame.memory_bytes,
        window_bytes=frame.window_bytes,
        queues=frame.queues,
        ring_entries=frame.ring_entries,
    )


def manifest_firmware(frame: FunctionFrame) -> Firmware:
    """Version, and a name for everything that decides about bits."""
    return Firmware(version=frame.firmware.get("version", "?"), blas=firmware_name(frame.firmware))


def firmware_name(firmware: Mapping[str, str]) -> str:
    """Equal names compute equal bits."""
    text = "\n".join(f"{key}={firmware.get(key, '')}" for key in _DECIDES)
    label = f"{firmware.get('blas', '?').split(' ')[0]}/{firmware.get('core', '')}"
    return f"{label[:64]} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


# --- status validation ----------------------------------------------------------------------------


def require_compatible(source: Mapping[str, str], here: Mapping[str, str]) -> None:
    """V1. Raises StateError ``status-firmware``, which names every difference."""
    differ = [key for key in _DECIDES if source.get(key) != here.get(key)]
    if differ:
        words = "; ".join(
            f"{key}: {str(source.get(key))[:80]} there, {str(here.get(key))[:80]} here"
            for key in differ
        )
        raise _refuse(
            "status-firmware",
            "V1",
            f"results would have other bits on this host: {words}",
            "install the same numpy and BLAS on both hosts, on CPUs with the same features",
        )


def validate(
    frame: FunctionFrame, status: StatusFrame, before: Described, after: Mapping[str, Any]
) -> None:
    """Everything that the daemon compares after a load.

    Args:
        frame, status: what the source signed.
        before: what the destination's function said of itself just before it loaded.
        after: what it answered to the load, having read itself back.

    Raises:
        StateError: ``status-firmware`` (V1), ``status-resources`` (V2), ``status-digest`` (V3),
            ``status-peers`` (V6), ``status-faults`` (V7).
    """
    require_compatible(frame.firmware, before.firmware)
    here = function_frame(before)
    for name in ("cores", "chips", "memory_bytes", "window_bytes", "queues", "ring_entries"):
        wanted, found = getattr(frame, name), getattr(here, name)
        enough = found >= wanted if name == "cores" else found == wanted
        if not enough:
            raise _refuse("status-resources", "V2", f"{name} is {wanted} there and {found} here")
    for name in Digests.__struct_fields__:
        if after.get(name) != getattr(status.digests, name):
            raise _refuse(
                "status-digest", "V3", f"the {name} reads back differently from what was sent"
            )
    if frame.peers:
        raise _refuse("status-peers", "V6", f"its peers are not in this group: {frame.peers[0]}")
    if after.get("faults") != status.faults:
        raise _refuse("status-faults", "V7", "the fault counter is another one after the load")


def require_context(frame: FunctionFrame, before: Described) -> None:
    """The guest's interrupt must go where it went at the source. QEMU keeps that itself, as the
    BARs, and the device hears of it (MSI registers) and has the descriptor; the rest of what it
    heard comes with its state.

    Raises:
        StateError: ``status-context``.
    """
    there, here = _interrupt(frame.config), _interrupt(bytes.fromhex(before.config))
    if (there[0] & 1 and there != here) or frame.msi != before.msi:
        raise _refuse(
            "status-context",
            "V2",
            "the guest changed the function's interrupt at the last moment",
            "start the migration again",
        )


def require_interrupt(config: bytes, said: Described) -> None:
    """As :func:`require_context`, of a function that was loaded first and whose QEMU got its
    context then: it heard of its interrupt what stands in ``config``. Raises the same.
    """
    there, here = _interrupt(config), _interrupt(bytes.fromhex(said.config))
    if there[0] & 1 and (there != here or not said.msi):
        raise _refuse(
            "status-context",
            "V2",
            "QEMU did not take over the function's interrupt",
            "restore the VM once more",
        )


def _interrupt(config: bytes) -> bytes:
    """Whether MSI is on, and where it goes."""
    at = _msi(config)
    return bytes([config[at + 2] & 1]) + config[at + 4 : at + 14]


def _msi(config: bytes) -> int:
    """Where the MSI capability lies; 0x40 when there is none."""
    at = config[0x34]
    for _ in range(48):
        if not 0x40 <= at <= 0xF0:
            break
        if config[at] == 0x05:
            return at
        at = config[at + 1]
    return 0x40


def _refuse(code: str, step: str, message: str, hint: str = "") -> StateError:
    return StateError(message, code=code, where=f"status:{step}", hint=hint)
