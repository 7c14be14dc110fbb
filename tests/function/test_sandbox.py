"""What keeps functions of one user apart."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import ctypes, os
from accelvisor.function.sandbox import conceal, rename
conceal()
rename("av-test")
if os.fork() == 0:
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0, "a child may be traced"
    assert open("/proc/self/comm").read() == "av-test\\n"
    assert os.readlink("/proc/self/fd/0") and open("/proc/self/maps").read()
    assert len(os.listdir("/proc/self/fd")) > 2
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_concealed_process_and_its_children_cannot_be_traced_but_see_themselves() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
