"""``python -m tests.fuzz [--seconds N]``: generated input at every parser, for equal times."""

from __future__ import annotations

import argparse
import subprocess
import sys

#: Each is a module with ``--seconds``; its exit status is not 0 when it found something.
TARGETS = ("tests.fuzz.vfio_codec", "tests.fuzz.rings", "tests.fuzz.frames")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    options = parser.parse_args()
    share = str(options.seconds / len(TARGETS))
    failed = []
    for target in TARGETS:
        print(f"== {target} for {share} s", flush=True)
        if subprocess.run([sys.executable, "-m", target, "--seconds", share]).returncode:
            failed.append(target)
    print(f"found something: {', '.join(failed)}" if failed else "found nothing")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
