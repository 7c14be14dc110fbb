"""``python3 -m accelvisor.function SPEC.json``: run one function until SIGTERM.

The zygote is forked before the holder imports what only it needs.
"""

from __future__ import annotations

import gc
import os
import socket
import sys


def main(arguments: list[str]) -> int:
    """Exit status: 0 stopped as asked, 1 refused by this host, 2 usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python3 -m accelvisor.function SPEC.json", file=sys.stderr)
        return 2
    # Tiles are the parallelism; a BLAS with threads of its own would only fight them for cores.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from accelvisor.function.hiding import conceal

    conceal()
    # What holder and zygote both need comes first, and is shared; the zygote's own imports take the
    # longest, and run beside the rest of the holder's.
    from accelvisor.function import shape, zygote  # noqa: F401

    gc.freeze()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        zygote.run(theirs)
    theirs.close()
    from accelvisor.errors import AccelvisorError
    from accelvisor.function.holder import Holder
    from accelvisor.function.spare import obtain
    from accelvisor.function.zygote import tell

    try:
        spec = obtain(arguments[0])
        if spec is None:
            return 0
        tell(ours, spec)
        Holder(spec).run((ours, pid))
    except AccelvisorError as error:
        print(f"{error.where}: {error.message} [{error.code}]\n{error.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
