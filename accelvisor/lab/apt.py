"""Where Debian packages come from: the machine's own apt configuration, and nothing else.

A lab must build wherever its machine can install packages: behind a proxy, from a mirror in the
house, with a private certificate authority. So the mirror, the proxy and the certificates are
those that the machine's apt already uses; the public archive is only the default of last resort.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from accelvisor.lab.process import run

PUBLIC_MIRROR = "http://deb.debian.org/debian"
SUITE = "trixie"

# Suites of the main Debian archive; third-party lists reuse code names but not with "main" alone.
_SUITES = frozenset(
    ["bookworm", "trixie", "forky", "duke", "sid", "stable", "testing", "unstable", "oldstable"]
)
# Options of the machine's apt that decide whether the mirror can be reached at all. Nothing that
# weakens authentication is taken over; every package is still checked against Debian's keys.
_KEPT = re.compile(r"^Acquire::(https?::(Proxy|CaInfo|Timeout)|Retries|Check-(Date|Valid-Until))\b")


@dataclass(frozen=True, slots=True)
class Source:
    """One archive of the machine's apt: its address and the suites and components taken from it."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def parse_one_line(text: str) -> Iterator[Source]:
    """Entries of the classic format: ``deb [options] URI suite component...``."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)((?:\s+[^#\s]\S*)*)", line)
        if found:
            yield Source(found[1], (found[2],), tuple(found[3].split()))


def parse_deb822(text: str) -> Iterator[Source]:
    """Entries of the deb822 format: paragraphs of fields, continued lines indented."""
    for paragraph in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and name:
                fields[name] += " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0")
        if enabled and "deb" in fields.get("types", "").split():
            suites = tuple(fields.get("suites", "").split())
            components = tuple(fields.get("components", "").split())
            yield from (Source(uri, suites, components) for uri in fields.get("uris", "").split())


def machine_sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """Every archive that the machine's apt reads, in apt's order."""
    found: list[Source] = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".sources":
            found.extend(parse_deb822(text))
        elif path.suffix == ".list":
            found.extend(parse_one_line(text))
    return found


def choose_mirror(sources: Iterable[Source]) -> str | None:
    """The address of the main Debian archive among the sources; None when there is none."""
    for source in sources:
        main = "main" in source.components and bool(_SUITES & set(source.suites))
        if main and "security" not in source.uri:
            return _follow_list(source.uri).rstrip("/")
    return None


def _follow_list(uri: str) -> str:
    """Cloud images name a file that lists mirrors; the first one in it serves."""
    if not uri.startswith("mirror+file:"):
        return uri
    try:
        lines = Path(urlsplit(uri).path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return PUBLIC_MIRROR
    named = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    return named[0] if named else PUBLIC_MIRROR


def mirror() -> str:
    """The mirror to build from: ACCELVISOR_LAB_MIRROR, the machine's own, or the public one."""
    return (
        os.environ.get("ACCELVISOR_LAB_MIRROR") or choose_mirror(machine_sources()) or PUBLIC_MIRROR
    )


def machine_options() -> list[str]:
    """The machine's apt options that decide whether its mirror can be reached."""
    dump = run(["apt-config", "dump"], timeout=30).stdout.decode(errors="replace")
    return [line for line in dump.splitlines() if _KEPT.match(line)]


def proxy_environment() -> dict[str, str]:
    """What debootstrap's downloader must know of apt's proxy; an environment that is set wins."""
    env: dict[str, str] = {}
    for line in machine_options():
        found = re.match(r'Acquire::(https?)::Proxy "(.+)";', line)
        if found and found[2] != "DIRECT":
            env[f"{found[1]}_proxy"] = found[2]
    names = ("http_proxy", "https_proxy", "no_proxy")
    env.update({name: os.environ[name] for name in names if name in os.environ})
    return env


def configure(root: Path, address: str) -> list[Path]:
    """Point a new root's apt at the mirror; returns the files that must go before it is published.

    Nothing of this machine (resolver, proxy, certificates) may stay in an image.
    """
    suites = (SUITE, f"{SUITE}-backports")
    lines = [f"deb {address} {suite} main" for suite in suites]
    (root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = [
        'Acquire::Languages "none";',
        'APT::Install-Recommends "false";',
        'Dpkg::Options { "--force-unsafe-io"; };',
        'Dpkg::Use-Pty "0";',
        *machine_options(),
    ]
    borrowed = root / "etc/apt/apt.conf.d/90accelvisor-lab"
    borrowed.write_text("\n".join(options) + "\n", encoding="utf-8")
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    policy.chmod(0o755)
    temporary = [borrowed, policy]
    copies = [Path("/etc/resolv.conf"), Path("/etc/hosts")]
    if address.startswith("https:"):
        copies.append(Path("/etc/ssl/certs/ca-certificates.crt"))
        copies += [Path(found[1]) for line in options if (found := _CA.search(line))]
    for path in copies:
        inside = root / path.relative_to("/")
        if path.is_file() and not inside.is_file():
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, inside)
            temporary.append(inside)
    return temporary


_CA = re.compile(r'CaInfo "(.+)";')
