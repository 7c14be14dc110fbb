"""What one function is: the ``spec.json`` that the daemon writes and the holder reads.

Standard library only, because the holder imports it. The file comes from the daemon, but a person
may have edited it, so each field is checked and each refusal names the field.
"""

from __future__ import annotations

import json
import os
import re
import uuid as uuid_module
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from accelvisor.abi.registers import PAGE, WindowLayout
from accelvisor.errors import ConfigError
from accelvisor.function import fabric_spec
from accelvisor.function.fabric_spec import FabricSpec
from accelvisor.isolation.segments import Segment, checked
from accelvisor.limits import KIB, LIMITS

#: A UNIX socket's path has 107 bytes and its NUL.
_SOCKET_PATH_BYTES = 107
#: How libvirt calls the AppArmor profile of a domain, and we the socket of that domain's QEMU.
PEER = re.compile("libvirt-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ABSENT: Mapping[str, Callable[[], int]] = {"keeper": os.geteuid, "epoch": lambda: 1}
_OPTIONAL = ("socket_group", "peer", "keeper", "epoch")
#: Those that are no plain text or number, and have a check of their own.
_STRUCTURED = ("segments", "fabric")


@dataclass(frozen=True, slots=True)
class Spec:
    """One function. Sizes in bytes; ``socket_group`` is QEMU's group, empty for none; ``peer`` is
    the profile of the VM whose QEMU may connect (:mod:`accelvisor.function.doors`), empty for none;
    ``keeper`` is the user that, beside root, may ask things on holder.sock and control.sock.
    ``epoch`` and ``segments`` are what it begins with (:mod:`accelvisor.function.shape`).
    ``fabric`` has its ``chips`` chips and their links (:mod:`accelvisor.function.fabric_spec`).
    """

    uuid: str
    profile: str
    cores: int
    chips: int
    memory_bytes: int
    window_bytes: int
    queues: int
    ring_entries: int
    vfio_socket: str
    holder_socket: str
    control_socket: str
    socket_group: str = ""
    peer: str = ""
    keeper: int = 0
    epoch: int = 1
    segments: tuple[Segment, ...] = ()
    fabric: FabricSpec = field(default_factory=FabricSpec)

    def __post_init__(self) -> None:
        if not self.fabric.chips:
            object.__setattr__(self, "fabric", fabric_spec.plain(self.chips, self.cores))

    @property
    def layout(self) -> WindowLayout:
        """Where rings and staging lie in the window."""
        return WindowLayout(self.queues, self.ring_entries)

    @property
    def uuid_bytes(self) -> bytes:
        """The UUID in RFC 4122 order."""
        return uuid_module.UUID(self.uuid).bytes

    def to_json(self) -> str:
        """What :func:`read` and :func:`parse` take apart."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def parse(fields: object, *, where: str = "spec") -> Spec:
    """Check a decoded ``spec.json``.

    Raises:
        ConfigError: a field is missing, unknown, of another type or out of range.
    """
    if not isinstance(fields, dict):
        raise _bad(where, "the specification is not a JSON object")
    known = Spec.__dataclass_fields__
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise _bad(where, f"unknown field {unknown[0]!r}")
    values: dict[str, int | str] = {}
    for name, declared in known.items():
        if name in _STRUCTURED:
            continue
        if name not in fields and name not in _OPTIONAL:
            raise _bad(where, f"field {name!r} is missing")
        value = fields.get(name, _ABSENT[name]() if name in _ABSENT else "")
        wanted = int if declared.type == "int" else str
        if type(value) is not wanted:
            raise _bad(where, f"field {name!r} must be {wanted.__name__}, it is {value!r}")
        values[name] = value
    _check(values, where)
    segments = _segments(fields.get("segments"), values, where)
    fabric = FabricSpec()
    if "fabric" in fields:
        chips, cores = int(values["chips"]), int(values["cores"])
        fabric = fabric_spec.parse(
            fields["fabric"], chips, cores, lambda text: _bad(where, text)
        )
    return Spec(**values, segments=segments, fabric=fabric)  # type: ignore[arg-type]


def read(path: str) -> object:
    """The JSON in a specification file, not checked.

    Raises:
        ConfigError: it cannot be read or is not JSON.
    """
    where = f"spec:{path}"
    try:
        with open(path, "rb") as file:
            raw = file.read(64 * KIB + 1)
    except OSError as error:
        raise _bad(where, f"cannot read it: {error.strerror}") from error
    if len(raw) > 64 * KIB:
        raise _bad(where, "larger than 64 KiB")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"not JSON: {error}") from error


def _check(values: Mapping[str, int | str], where: str) -> None:
    def number(name: str, low: int, high: int) -> int:
        value = values[name]
        if not isinstance(value, int) or not low <= value <= high:
            raise _bad(where, f"field {name!r} is {value}, it must be {low}..{high}")
        return value

    try:
        canonical = str(uuid_module.UUID(str(values["uuid"])))
    except ValueError:
        canonical = ""
    if canonical != values["uuid"]:
        raise _bad(where, f"field 'uuid' is no lower-case UUID: {values['uuid']!r}")
    number("keeper", 0, 2**32 - 1)
    number("epoch", 1, 2**32 - 1)
    # Neither cores nor memory: what is left of a function that was revoked.
    least = 1 if values["cores"] or values["memory_bytes"] else 0
    number("cores", least, LIMITS.cores)
    number("chips", 1, 256)
    number("memory_bytes", least * PAGE, LIMITS.memory_bytes)
    if int(values["memory_bytes"]) % PAGE:
        raise _bad(where, f"field 'memory_bytes' is not a multiple of {PAGE}")
    queues = number("queues", 1, LIMITS.queues)
    for name, low, high in (
        ("ring_entries", 2, LIMITS.ring_entries),
        ("window_bytes", PAGE, LIMITS.window_bytes),
    ):
        value = number(name, low, high)
        if value & (value - 1):
            raise _bad(where, f"field {name!r} is {value}, it must be a power of two")
    staging = WindowLayout(queues, int(values["ring_entries"])).staging
    if int(values["window_bytes"]) < staging + PAGE:
        raise _bad(where, f"field 'window_bytes' must exceed the {staging} bytes of the rings")
    for name in ("vfio_socket", "holder_socket", "control_socket"):
        path = str(values[name])
        if not os.path.isabs(path) or "\0" in path:
            raise _bad(where, f"field {name!r} must be an absolute path: {path!r}")
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            raise _bad(where, f"field {name!r} exceeds {_SOCKET_PATH_BYTES} bytes: {path}")
    if values["peer"] and not PEER.fullmatch(str(values["peer"])):
        raise _bad(where, f"field 'peer' is no profile of a VM: {values['peer']!r}")


def _segments(rows: object, values: Mapping[str, int | str], where: str) -> tuple[Segment, ...]:
    """Where the memory lies; empty: in one piece."""
    memory = int(values["memory_bytes"])
    if not rows:
        return ()
    try:
        segments = checked([Segment(**row) for row in rows], where)  # type: ignore[attr-defined]
    except TypeError as error:
        raise _bad(where, f"field 'segments' is no list of segments: {error}") from error
    if segments[-1].end != memory:
        raise _bad(where, f"field 'segments' ends at {segments[-1].end}, not 'memory_bytes'")
    return segments


def _bad(where: str, message: str) -> ConfigError:
    return ConfigError(
        message,
        code="spec-invalid",
        where=where,
        hint="accelvisord writes this file; delete and create the function again",
    )
