"""The configuration: TOML files to one validated, frozen :class:`Config`.

``accelvisor.toml`` and then ``conf.d/*.toml`` beside it, in name order; a later file wins key by
key. Each file is checked by itself first, so that an error names the file and line it stands in. An
absent file means the built-in defaults. accelvisor.toml(5) documents the keys; a test compares.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from accelvisor.abi.registers import PAGE, WindowLayout
from accelvisor.daemon import toml_lines
from accelvisor.errors import ConfigError
from accelvisor.isolation import placing
from accelvisor.isolation.resources import Card, Policy, Profile
from accelvisor.limits import GIB, KIB, LIMITS, MIB

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_SIZE = re.compile(r"^\s*(\d+)\s*(B|KiB|MiB|GiB)?\s*$")
#: What Linux can be built for.
MOST_CPUS = 8192
_UNITS = {None: 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

Name = Annotated[str, msgspec.Meta(pattern=NAME)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]


class Size(int):
    """Bytes. In TOML a whole number of bytes, or a string such as ``"64MiB"``."""

    @classmethod
    def parse(cls, value: object) -> Size:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f'expected a size such as "64MiB", got `{type(value).__name__}`')
        if isinstance(value, int):
            if value < 0:
                raise ValueError("a size cannot be negative")
            return cls(value)
        match = _SIZE.match(value)
        if match is None:
            raise ValueError(f'"{value}" is not a size: write "64MiB" (B, KiB, MiB, GiB)')
        return cls(int(match[1]) * _UNITS[match[2]])


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class HostConfig(_Section, frozen=True):
    """``[host]``."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # empty: the machine's host name
    # CPUs that functions may use, as Linux writes lists: "2-7,12". Empty: all that the daemon may.
    cpus: Annotated[str, msgspec.Meta(pattern=r"^[0-9,-]*$", max_length=1024)] = ""


class DaemonConfig(_Section, frozen=True):
    """``[daemon]``."""

    supervisor: Literal["auto", "systemd", "subprocess"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Group of the vfio sockets that are for VMs: QEMU runs in it. Empty: the function's own group.
    socket_group: GroupName | Literal[""] = ""
    # Function processes that wait, warm, for the next function.
    spares: Annotated[int, msgspec.Meta(ge=0, le=16)] = 1


class AdminConfig(_Section, frozen=True):
    """``[admin]``: who may connect to the admin socket, and which groups may do what."""

    # Who may connect at all. Empty: everybody; what they may do is decided for each call.
    socket_group: GroupName | Literal[""] = ""
    read: tuple[GroupName, ...] = ("accelvisor",)
    operate: tuple[GroupName, ...] = ("accelvisor-operate",)
    admin: tuple[GroupName, ...] = ("accelvisor-admin",)


class LibvirtConfig(_Section, frozen=True):
    """``[libvirt]``."""

    uri: str = "qemu:///system"  # empty: no libvirt on this host


class MigrationConfig(_Section, frozen=True):
    """``[migration]``: moving functions between hosts that trust each other."""

    # Where other hosts reach this one. Empty: nobody can, and nothing moves away or comes.
    listen: str = "0.0.0.0:16519"
    # How they are told to reach it: host:port. Empty: the host's name and that port.
    address: Annotated[str, msgspec.Meta(max_length=128)] = ""
    # What the rounds before the switch-over aim at.
    downtime_ms: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 50
    # Bytes a second that one function's transfer may take. 0: as many as there are.
    rate: Size = Size(0)
    # Connections of one function's transfer.
    streams: Annotated[int, msgspec.Meta(ge=1, le=LIMITS.bulk_streams)] = 2
    # How long the VM's own migration waits for the first pass over device memory.
    first_pass_s: Annotated[int, msgspec.Meta(ge=0, le=18)] = 15
    # A model that is marked with a key which this host has not: refuse the function, or take it.
    watermark: Literal["if-known", "require"] = "if-known"
    # Where `accelctl migrate` finds the other host's libvirt; {address} is its name or address.
    libvirt_uri: Annotated[
        str, msgspec.Meta(pattern=r"^[a-z+]+://[^{}]*\{address\}[^{}]*$", max_length=256)
    ] = "qemu+tls://{address}/system"


class CheckpointConfig(_Section, frozen=True):
    """``[checkpoints]``: checkpoints at rest, and when one is taken by itself."""

    # How many of those that nobody pinned are kept of a function.
    keep: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 2
    # By zstd, where Python's zstandard is installed.
    compress: bool = False
    # One every so many seconds. 0: none by itself.
    every_s: Annotated[int, msgspec.Meta(ge=0, le=2_000_000)] = 0
    # One after so many faults of a function's programs, or restarts of its worker. 0: never.
    faults: Annotated[int, msgspec.Meta(ge=0)] = 0
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0


class LedgerConfig(_Section, frozen=True):
    """``[ledger]``: who owns which function. All hosts of a fleet must say the same here."""

    # local: each host's own file; the source of a move decides about it. etcd: one that all share.
    kind: Literal["local", "etcd"] = "local"
    # http://HOST:PORT or https://HOST:PORT, tried in order.
    endpoints: tuple[Annotated[str, msgspec.Meta(max_length=256)], ...] = ()
    # PEM files for https: the authority, and this host's certificate and key.
    ca: str = ""
    certificate: str = ""
    key: str = ""


class CardConfig(_Section, frozen=True):
    """``[cards.NAME]``: one emulated card."""

    chips: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    cores_per_chip: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    memory: Size = Size(4 * GIB)
    # Equal parts of the memory; a function has its memory in one of them if it can.
    banks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    # Pairs of rings for all functions together. 0: 16 for each core.
    queues: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    # The most functions that it can be cut into (SR-IOV's TotalVFs). 0: one for each core.
    functions: Annotated[int, msgspec.Meta(ge=0, le=LIMITS.functions)] = 0
    # Bytes a second of DMA for all functions together, shared by weight. 0: as many as there are.
    host_port: Size = Size(0)


class ProfileConfig(_Section, frozen=True):
    """``[profiles.NAME]``: one size of function."""

    cores: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    chips: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    memory: Size = Size(64 * MIB)
    window: Size = Size(16 * MIB)
    queues: Annotated[int, msgspec.Meta(ge=1, le=LIMITS.queues)] = 8
    ring_entries: Annotated[int, msgspec.Meta(ge=2, le=LIMITS.ring_entries)] = LIMITS.ring_entries
    # guaranteed: host CPUs of its own. burstable: its share, and cores that nobody holds.
    # best-effort: what the others leave.
    policy: Policy = Policy.BURSTABLE
    # Its share of what functions have in common: host CPUs, the card's host port, links.
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


BUILTIN_CARDS: Mapping[str, CardConfig] = {"card0": CardConfig()}
BUILTIN_PROFILES: Mapping[str, ProfileConfig] = {
    "small": ProfileConfig(),
    "medium": ProfileConfig(
        cores=4, chips=1, memory=Size(256 * MIB), window=Size(32 * MIB), queues=16
    ),
    "large": ProfileConfig(cores=8, chips=2, memory=Size(GIB), window=Size(64 * MIB), queues=32),
}


class Config(_Section, frozen=True):
    """Everything that can be configured. ``cards`` and ``profiles`` replace the built-in ones as
    soon as one is given."""

    host: HostConfig = HostConfig()
    daemon: DaemonConfig = DaemonConfig()
    admin: AdminConfig = AdminConfig()
    libvirt: LibvirtConfig = LibvirtConfig()
    migration: MigrationConfig = MigrationConfig()
    ledger: LedgerConfig = LedgerConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    cards: dict[Name, CardConfig] = msgspec.field(default_factory=lambda: dict(BUILTIN_CARDS))
    profiles: dict[Name, ProfileConfig] = msgspec.field(
        default_factory=lambda: dict(BUILTIN_PROFILES)
    )


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "host": HostConfig,
    "daemon": DaemonConfig,
    "admin": AdminConfig,
    "libvirt": LibvirtConfig,
    "migration": MigrationConfig,
    "ledger": LedgerConfig,
    "checkpoints": CheckpointConfig,
    "cards.NAME": CardConfig,
    "profiles.NAME": ProfileConfig,
}


_NAMED: Mapping[str, type[msgspec.Struct]] = {"cards": CardConfig, "profiles": ProfileConfig}
_NAME_RULE = "a name is 1 to 64 letters, digits, . _ -, and begins with a letter or digit"


def keys() -> list[str]:
    """Every configuration key as ``[section] key``, for the documentation test."""
    return [
        f"[{name}] {field}" for name, kind in SECTIONS.items() for field in kind.__struct_fields__
    ]


def load(path: Path) -> Config:
    """Read and validate.

    Raises:
        ConfigError: with the first problem's message and where; the message counts the others.
    """
    config, problems = check(path)
    if problems:
        first = problems[0]
        if len(problems) > 1:
            more = f" (and {len(problems) - 1} more: accelvisord --check-config lists them)"
            first = ConfigError(
                first.message + more, code=first.code, where=first.where, hint=first.hint
            )
        raise first
    return config


def check(path: Path) -> tuple[Config, list[ConfigError]]:
    """The configuration and *all* problems; with problems, the configuration is the default."""
    sources, problems = _read_all(path)
    merged: dict[str, Any] = {}
    for source in sources:
        problems += _check_one(source)
        _merge(merged, source.data)
    if problems:
        return Config(), problems
    config = msgspec.convert(merged, Config, dec_hook=_decode)
    problems = _check_meaning(config, merged, sources)
    return (Config() if problems else config), problems


# --- one file --------------------------------------------------------------------------------


class _Source(msgspec.Struct):
    path: Path
    text: str
    data: dict[str, Any]

    def where(self, key: Sequence[str]) -> str:
        line = toml_lines.find(self.text, key)
        return f"config:{self.path}" + (f":{line}" if line else "")


def _read_all(path: Path) -> tuple[list[_Source], list[ConfigError]]:
    files = [path] if path.exists() else []
    directory = path.parent / "conf.d"
    if directory.is_dir():
        files += sorted(directory.glob("*.toml"))
    sources: list[_Source] = []
    problems: list[ConfigError] = []
    for file in files:
        try:
            sources.append(_read(file))
        except ConfigError as error:
            problems.append(error)
    return sources, problems


def _read(path: Path) -> _Source:
    where = f"config:{path}"
    try:
        with path.open("rb") as stream:
            raw = stream.read(LIMITS.config_bytes + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read it: {error.strerror}", code="config-unreadable", where=where
        ) from error
    if len(raw) > LIMITS.config_bytes:
        raise ConfigError(f"larger than {LIMITS.config_bytes} bytes", where=where)
    try:
        text = raw.decode()
        return _Source(path, text, tomllib.loads(text))
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text", code="config-syntax", where=where) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"line (\d+)", str(error))
        if line:
            where += f":{line[1]}"
        raise ConfigError(f"not valid TOML: {error}", code="config-syntax", where=where) from error


_AT = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_PATTERN = re.compile(r"xpected `str` matching regex .*")


def _check_one(source: _Source) -> list[ConfigError]:
    """Section by section, so that each problem knows its own key (and all are listed)."""
    problems: list[ConfigError] = []
    for name, value in source.data.items():
        if name not in Config.__struct_fields__:
            problems.append(_unknown(source, [], name))
        elif name not in _NAMED:
            problems += _check_section(source, [name], value, SECTIONS[name])
        elif not isinstance(value, dict):
            problems.append(_wrong(source, [name], f"expected tables [{name}.NAME]"))
        else:
            for entry, table in value.items():
                if re.match(NAME, entry) is None:
                    problems.append(_wrong(source, [name, entry], _NAME_RULE))
                problems += _check_section(source, [name, entry], table, _NAMED[name])
    return problems


def _check_section(
    source: _Source, key: list[str], table: object, kind: type[msgspec.Struct]
) -> list[ConfigError]:
    """One table; unknown keys are all named, of wrong values the first."""
    if not isinstance(table, dict):
        return [_wrong(source, key, "expected a table")]
    problems = [_unknown(source, key, name) for name in table if name not in kind.__struct_fields__]
    known = {name: value for name, value in table.items() if name in kind.__struct_fields__}
    try:
        msgspec.convert(known, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        field = re.match(r"\.(\w+)", at[1]) if at else None
        message = _PATTERN.sub(
            "xpected a plain name (letters, digits, . _ -)", _AT.sub("", str(error))
        )
        path = [*key, field[1]] if field else key
        problems.append(_wrong(source, path, message[:1].lower() + message[1:]))
    return problems


def _wrong(source: _Source, key: Sequence[str], message: str) -> ConfigError:
    hint = "accelvisor.toml(5) describes every key"
    return ConfigError(f"{'.'.join(key)}: {message}", where=source.where(key), hint=hint)


def _unknown(source: _Source, key: Sequence[str], wrong: str) -> ConfigError:
    fields = _fields(key)
    place = f" in [{'.'.join(key)}]" if key else ""
    close = difflib.get_close_matches(wrong, fields, 1, 0.6)
    hint = f'did you mean "{close[0]}"?' if close else f"known here: {', '.join(fields)}"
    return ConfigError(
        f'unknown key "{wrong}"{place}',
        code="config-unknown-key",
        where=source.where([*key, wrong]),
        hint=hint,
    )


def _fields(key: Sequence[str]) -> tuple[str, ...]:
    if not key:
        return Config.__struct_fields__
    section = f"{key[0]}.NAME" if key[0] in ("cards", "profiles") else key[0]
    return SECTIONS[section].__struct_fields__ if section in SECTIONS else ()


def _decode(kind: type, value: object) -> object:
    if kind is Size:
        return Size.parse(value)
    raise NotImplementedError(kind)


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = dict(value) if isinstance(value, dict) else value


# --- the whole -------------------------------------------------------------------------------


def _check_meaning(
    config: Config, merged: Mapping[str, Any], sources: Sequence[_Source]
) -> list[ConfigError]:
    problems: list[ConfigError] = []

    def problem(key: Sequence[str], message: str, hint: str = "") -> None:
        where = "config"
        for source in sources:  # the last file that has the key decides
            if toml_lines.find(source.text, key):
                where = source.where(key)
        problems.append(ConfigError(f"{'.'.join(key)}: {message}", where=where, hint=hint))

    if config.ledger.kind == "etcd" and not config.ledger.endpoints:
        problem(["ledger", "endpoints"], "etcd needs at least one endpoint")
    if len(config.cards) > LIMITS.cards:
        problem(["cards"], f"{len(config.cards)} cards, at most {LIMITS.cards}")
    for name, card in config.cards.items():
        if card.memory < MIB or card.memory % (PAGE * card.banks):
            text = f"at least 1 MiB, and a multiple of 4 KiB for each of its {card.banks} banks"
            problem(["cards", name, "memory"], text)
        if 0 < card.host_port < MIB:
            problem(["cards", name, "host_port"], "0, or at least 1 MiB a second")
    if host_cpus(config.host.cpus) is None:
        problem(["host", "cpus"], f'"{config.host.cpus}" is no list of CPUs', 'write "0-3,8"')
    given = merged.get("profiles", {})
    for name, profile in config.profiles.items():
        if name in given:
            _check_profile(name, profile, config.cards, problem)
    return problems


def _check_profile(
    name: str, profile: ProfileConfig, cards: Mapping[str, CardConfig], problem: Any
) -> None:
    key = ["profiles", name]
    if profile.cores % profile.chips:
        problem(
            [*key, "cores"],
            f"{profile.cores} cores do not spread evenly over {profile.chips} chips",
            "each chip of a function gives the same number of cores",
        )
        return
    if not PAGE <= profile.memory <= LIMITS.memory_bytes or profile.memory % PAGE:
        problem([*key, "memory"], "4 KiB to 64 GiB, a multiple of 4 KiB")
    if profile.ring_entries & (profile.ring_entries - 1):
        problem([*key, "ring_entries"], "must be a power of two")
    need = WindowLayout(profile.queues, profile.ring_entries).staging + PAGE
    if profile.window & (profile.window - 1) or not need <= profile.window <= LIMITS.window_bytes:
        problem(
            [*key, "window"],
            f"must be a power of two from {need} bytes ({profile.queues} queues) to 1 GiB",
            "a PCI BAR has a power-of-two size",
        )
    empty = [card_of(name, item) for name, item in cards.items()]
    # Whether the host has CPUs to give away is no question of the configuration.
    answer = placing.plan(empty, [], replace(profile_of(name, profile), policy=Policy.BURSTABLE))
    if answer.placement is None:
        why = "; ".join(map(str, answer.reasons))
        hint = f"shrink it, or enlarge a card ({why})"
        problem(key, "fits on no card, not even an empty one", hint)


# --- as the planner knows it -----------------------------------------------------------------


def card_of(name: str, item: CardConfig) -> Card:
    """The card that a section describes."""
    cores = item.chips * item.cores_per_chip
    return Card(
        name,
        item.chips,
        item.cores_per_chip,
        int(item.memory),
        item.banks,
        item.queues or 16 * cores,
        item.functions or min(cores, LIMITS.functions),
        int(item.host_port),
    )


def profile_of(name: str, item: ProfileConfig) -> Profile:
    """The profile that a section describes."""
    return Profile(
        name,
        item.cores,
        item.chips,
        int(item.memory),
        int(item.window),
        item.queues,
        item.ring_entries,
        item.policy,
        item.weight,
    )


def host_cpus(text: str) -> tuple[int, ...] | None:
    """The CPUs of a list such as ``0-3,8``; None for what is none. Empty: no choice was made."""
    found: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            first, last = int(low), int(high or low)
            if not 0 <= first <= last < MOST_CPUS:
                return None
            found.update(range(first, last + 1))
    except ValueError:
        return None
    return tuple(sorted(found))
