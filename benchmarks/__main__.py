"""``python -m benchmarks [GROUP...] [--json FILE] [--quick]``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

from benchmarks.record import Record, table

#: group -> modules with ``run(quick: bool) -> Iterable[Record]``
GROUPS = {
    "device": ("benchmarks.device",),
    "migration": ("benchmarks.migration", "benchmarks.checkpoint", "benchmarks.moves"),
    "isolation": ("benchmarks.isolation",),
    "fabric": (
        "benchmarks.scheduling", "benchmarks.queues", "benchmarks.collectives",
        "benchmarks.fabric_model",
    ),
}
#: Only when named: they need the laboratory.
ON_DEMAND = {"migration-lab": ("benchmarks.migration_lab",)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "group", nargs="*", metavar="GROUP",
        help=f"{', '.join(GROUPS)}; by name only: {', '.join(ON_DEMAND)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    options = parser.parse_args(argv)
    known = GROUPS | ON_DEMAND
    unknown = [g for g in options.group if g not in known]
    if unknown:
        parser.error(f"no group {unknown[0]!r}; there are: {', '.join(known)}")
    _lift_blas_settings()
    records: list[Record] = []
    for group in options.group or GROUPS:
        for module in known[group]:
            for record in importlib.import_module(module).run(options.quick):
                print(f"  {record.group}: {record.name} ...", file=sys.stderr)
                records.append(record)
    print(table(records))
    if options.json:
        document = {"machine": _machine(), "records": [r.to_dict() for r in records]}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(r.holds is not False for r in records) else 1


def _lift_blas_settings() -> None:
    """Start again without settings that make a BLAS slower than it can be: numpy reads them once.

    Some machines force an old kernel on OpenBLAS; a ratio against such a BLAS would flatter us.
    """
    forced = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    if any(name in os.environ for name in forced):
        clean = {k: v for k, v in os.environ.items() if k not in forced}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], clean)


def _machine() -> dict[str, object]:
    import numpy as np

    from accelvisor.kernels import blas

    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas.fingerprint(),
    }


if __name__ == "__main__":
    sys.exit(main())
