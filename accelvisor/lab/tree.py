"""The source tree that the laboratory serves: where it is, whose it is, what its packages need."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from accelvisor.errors import NotFoundError

# What dh_python3 makes of ${python3:Depends} beyond what the control file lists by itself.
_INTERPRETER = "python3"


def repository() -> Path:
    """The source tree that this very module belongs to."""
    tree = Path(__file__).resolve().parent.parent.parent
    if not (tree / "debian/control").is_file():
        raise NotFoundError(
            f"no source tree around {tree / 'accelvisor'}",
            where="lab",
            hint="the laboratory runs from a checkout: pip install -e '.[dev]' there",
        )
    return tree


def user() -> int:
    """The uid of the person at work: under sudo everybody is root, but not the same person."""
    said = os.environ.get("SUDO_UID", "")
    return int(said) if said.isdigit() else os.getuid()


def default_name() -> str:
    """The persistent laboratory of this tree and user: two of them on one machine never meet."""
    known = hashlib.sha256(f"{repository()}\0{user()}".encode()).hexdigest()
    return f"lab-{known[:8]}"


def runtime_depends(control: str) -> tuple[str, ...]:
    """The packages that binary packages depend on, of the first alternative each, sorted.

    ``control`` is the text of debian/control. Packages built from it, and what the build fills in,
    are left out; versions too, since apt takes the newest and dpkg checks it.
    """
    paragraphs = [_fields(text) for text in re.split(r"\n\s*\n", control)]
    own = {fields["package"] for fields in paragraphs if "package" in fields}
    found = {_INTERPRETER}
    for fields in paragraphs:
        if "package" not in fields:
            continue
        for relation in f"{fields.get('depends', '')},{fields.get('pre-depends', '')}".split(","):
            name = re.match(r"[a-z0-9][a-z0-9+.-]*", relation.strip())
            if name and name[0] not in own:
                found.add(name[0])
    return tuple(sorted(found))


def _fields(paragraph: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1].isspace():
            fields[name] = f"{fields.get(name, '')} {line.strip()}"
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.lower()
            fields[name] = value.strip()
    return fields
