"""Every module of the product, as the source tree has it and as an installation imports it."""

from __future__ import annotations

from pathlib import Path

import accelvisor

_ROOT = Path(accelvisor.__file__).parent
# Tools of the source tree, which no package has.
_NOT_PACKAGED = ("lab",)

#: A program that imports every module that it finds, and prints their names.
IMPORT_ALL = """\
import importlib, pkgutil, warnings
warnings.simplefilter("error")
import accelvisor
def fail(name):
    raise
for found in pkgutil.walk_packages(accelvisor.__path__, "accelvisor.", fail):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
        print(found.name)
"""


def modules(*tops: str) -> set[str]:
    """Names of the modules in the tree; only those below ``tops`` where given."""
    found = set()
    for path in _ROOT.rglob("*.py"):
        parts = path.relative_to(_ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not parts or parts[-1] == "__main__" or parts[0] in _NOT_PACKAGED:
            continue
        if not tops or parts[0] in tops:
            found.add(".".join(("accelvisor", *parts)))
    return found
