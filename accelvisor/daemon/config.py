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
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from accelvisor.abi.registers import PAGE
from accelvisor.daemon import toml_lines
from accelvisor.daemon.card_config import (
    BUILTIN_CARDS,
    BUILTIN_PROFILES,
    CardConfig,
    ProfileConfig,
    Section,
    Size,
    check_grid,
    check_profile,
)
from accelvisor.errors import ConfigError
from accelvisor.limits import LIMITS, MIB

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
#: What Linux can be built for.
MOST_CPUS = 8192

Name = Annotated[str, msgspec.Meta(pattern=NAME)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]


class HostConfig(Section, frozen=True):
    """``[host]``."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # empty: the machine's host name
    # CPUs that functions may use, as Linux writes lists: "2-7,12". Empty: all that the daemon may.
    cpus: Annotated[str, msgspec.Meta(pattern=r"^[0-9,-]*$", max_length=1024)] = ""


class DaemonConfig(Section, frozen=True):
    """``[daemon]``."""

    supervisor: Literal["auto", "systemd", "subprocess"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Group of the vfio sockets that are for VMs: QEMU runs in it. Empty: the function's own group.
    socket_group: GroupName | Literal[""] = ""
    # Function processes that wait, warm, for the next function.
    spares: Annotated[int, msgspec.Meta(ge=0, le=16)] = 1


class AdminConfig(Section, frozen=True):
    """``[admin]``: who may connect to the admin socket, and which groups may do what."""

    # Who may connect at all. Empty: everybody; what they may do is decided for each call.
    socket_group: GroupName | Literal[""] = ""
    read: tuple[GroupName, ...] = ("accelvisor",)
    operate: tuple[GroupName, ...] = ("accelvisor-operate",)
    admin: tuple[GroupName, ...] = ("accelvisor-admin",)


class LibvirtConfig(Section, frozen=True):
    """``[libvirt]``."""

    uri: str = "qemu:///system"  # empty: no libvirt on this host


class MigrationConfig(Section, frozen=True):
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


class CheckpointConfig(Section, frozen=True):
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


class LedgerConfig(Section, frozen=True):
    """``[ledger]``: who owns which function. All hosts of a fleet must say the same here."""

    # local: each host's own file; the source of a move decides about it. etcd: one that all share.
    kind: Literal["local", "etcd"] = "local"
    # http://HOST:PORT or https://HOST:PORT, tried in order.
    endpoints: tuple[Annotated[str, msgspec.Meta(max_length=256)], ...] = ()
    # PEM files for https: the authority, and this host's certificate and key.
    ca: str = ""
    certificate: str = ""
    key: str = ""


class Config(Section, frozen=True):
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
        check_grid(name, card, merged.get("cards", {}).get(name, {}), problem)
        if 0 < card.host_port < MIB:
            problem(["cards", name, "host_port"], "0, or at least 1 MiB a second")
    if host_cpus(config.host.cpus) is None:
        problem(["host", "cpus"], f'"{config.host.cpus}" is no list of CPUs', 'write "0-3,8"')
    given = merged.get("profiles", {})
    for name, profile in config.profiles.items():
        if name in given:
            check_profile(name, profile, config.cards, problem)
    return problems


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
