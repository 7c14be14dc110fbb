"""What keeps functions of one user apart."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import Any

import pytest

from accelvisor.function import landlock, sandbox, system_calls

_SCRIPT = """
import ctypes, os
from accelvisor.function.hiding import conceal, rename
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


def test_without_libseccomp_the_measure_is_inactive_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Any:
        raise OverflowError("a binding that does not suit its library")

    for library in (lambda: None, broken):
        monkeypatch.setattr(system_calls, "_library", library)
        system_calls.prepare.cache_clear()
        assert sandbox.tighten() is False
    system_calls.prepare.cache_clear()


def test_on_a_kernel_without_landlock_nothing_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def call(number: int, *_: object) -> int:
        asked.append(number)
        return -1

    monkeypatch.setattr(landlock, "_call", call)
    assert landlock.restrict([]) == 0
    assert asked == [444]


@pytest.mark.parametrize(
    ("version", "size", "rights", "network", "scoped"),
    [
        (1, 8, 13, 0, 0), (2, 8, 14, 0, 0), (3, 8, 15, 0, 0), (4, 16, 15, 3, 0),
        (5, 16, 16, 3, 0), (6, 24, 16, 3, 3), (7, 24, 16, 3, 3), (9, 24, 16, 3, 3),
    ],
)  # fmt: skip
def test_each_version_of_landlock_is_asked_for_all_that_it_knows_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    size: int,
    rights: int,
    network: int,
    scoped: int,
) -> None:
    """Rights as linux/landlock.h numbers them; a kernel refuses a bit that it does not know."""
    asked: list[bytes] = []
    null = os.open("/dev/null", os.O_RDONLY)

    def call(number: int, *arguments: Any) -> int:
        if number == 444 and arguments[0] is None:
            return version
        if number == 444:
            asked.append(arguments[0])
            return os.dup(null)
        return 0

    monkeypatch.setattr(landlock, "_call", call)
    try:
        assert landlock.restrict([null]) == version
    finally:
        os.close(null)
    assert len(asked[0]) == size
    fields = struct.unpack("=QQQ", asked[0].ljust(24, b"\0"))
    assert fields == ((1 << rights) - 1, network, scoped)


def test_the_filter_is_right_for_the_process_that_loads_it_and_no_other() -> None:
    """The process id is put into a compiled program: it must stand where it is compared."""
    found = system_calls.prepare()
    assert found is not None
    assert found._program.count(struct.pack("=I", system_calls._PID)) >= 1
    assert len(found._program) % 8 == 0
