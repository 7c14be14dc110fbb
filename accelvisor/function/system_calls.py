"""The system calls that a worker may still make once it serves: computing, the descriptors that it
has, and nothing that reaches another process, another file for writing, or a new part of the
kernel.

A list of what is allowed; everything else answers EPERM (clone3 answers ENOSYS, on which the C
library takes clone, whose flags a filter can see). libseccomp compiles it in the zygote; the fork
that becomes a worker puts its process id in and loads it for all its threads. Compiling it there
would let a guest whose worker died wait a millisecond or two longer.

Executable memory stays possible, since kernels may be compiled by numba; memory that is writable
and executable at once does not.

To see what a worker was refused: ``strace -f -Z -p PID``, or ``ACCELVISOR_LOG_REFUSED=1`` in the
function's environment, with which the kernel's log names each refused call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fcntl
import importlib
import logging
import os
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, TypeAlias

log = logging.getLogger(__name__)

#: Set in a function's environment: the kernel logs what is refused.
LOG_VARIABLE = "ACCELVISOR_LOG_REFUSED"

#: Whatever their arguments. Names that an architecture or an old libseccomp lacks are passed over.
_ALLOWED = (
    "read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 lseek splice close "
    "dup dup2 dup3 "
    "fstat newfstatat statx stat lstat readlink readlinkat access faccessat faccessat2 getcwd "
    "getdents64 "
    "recvfrom recvmsg sendto sendmsg accept4 getsockname getpeername getsockopt shutdown "
    "poll ppoll epoll_create1 epoll_ctl epoll_wait epoll_pwait "
    "memfd_create ftruncate brk munmap mremap madvise membarrier "
    "futex sched_yield set_robust_list rseq gettid exit exit_group restart_syscall "
    "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack "
    "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom "
    "getpid getppid getuid geteuid getgid getegid uname sysinfo getrusage times getcpu "
    "sched_getaffinity getpriority"
)

# Found once: looking for it again would be most of what a worker does here.
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class _Bits(NamedTuple):
    """What bits of an argument must be."""

    argument: int
    mask: int
    value: int


_Rule: TypeAlias = tuple[str, tuple[_Bits, ...]]

_INT = 0xFFFF_FFFF  # the kernel takes no more of an int; what lies above is left to the caller
_POINTER = 0xFFFF_FFFF_FFFF_FFFF
_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41
_WRITE, _EXEC = 2, 4
#: Any way of opening a file but to read it.
_NOT_READING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_CLONE_VM, _CLONE_SIGHAND, _CLONE_THREAD = 0x100, 0x800, 0x10000
_A_THREAD = _CLONE_VM | _CLONE_SIGHAND | _CLONE_THREAD
#: pidfd, traced, vfork, another parent, untraced, and the namespaces: of no thread.
_NO_THREAD = 0x1000 | 0x2000 | 0x4000 | 0x8000 | 0x80_0000 | 0x7E02_0000
#: Not F_SETOWN and its like (nor the ioctls that do the same): they send signals to anybody.
_FCNTL = (
    fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL,
    fcntl.F_GET_SEALS, fcntl.F_ADD_SEALS,
)  # fmt: skip
_WORD = struct.Struct("=I")
_INSTRUCTION_BYTES = 8
_NATIVE = 0  # architecture
_SET_MODE_FILTER, _TSYNC, _LOG = 1, 1, 2
_IOCTL = (termios.FIONREAD, termios.FIONBIO, termios.TCGETS)
#: Stands for the worker's process id, which is above any that Linux gives (2^22 at most).
_PID = 0x5EC0_0B1D
#: Nor O_ASYNC, which makes a descriptor send signals.
_FLAGS = os.O_ASYNC


def _conditional() -> Iterator[_Rule]:
    """What is allowed with some arguments."""
    yield "openat", (_Bits(2, _NOT_READING, os.O_RDONLY),)
    for name in ("mmap", "mprotect"):
        for protection in (0, _WRITE, _EXEC):
            yield name, (_Bits(2, _WRITE | _EXEC, protection),)
    yield "clone", (_Bits(0, _A_THREAD | _NO_THREAD, _A_THREAD),)
    for command in _FCNTL:
        yield "fcntl", (_Bits(1, _INT, command),)
    yield "fcntl", (_Bits(1, _INT, fcntl.F_SETFL), _Bits(2, _FLAGS, 0))
    for request in _IOCTL:
        yield "ioctl", (_Bits(1, _INT, request),)
    for option in (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA):
        yield "prctl", (_Bits(0, _INT, option),)
    # Of the caller itself; a limit can only be read.
    yield "prlimit64", (_Bits(0, _INT, 0), _Bits(2, _POINTER, 0))
    yield "sched_setaffinity", (_Bits(0, _INT, 0),)
    yield "sched_setattr", (_Bits(0, _INT, 0),)
    yield "setpriority", (_Bits(0, _INT, os.PRIO_PROCESS), _Bits(1, _INT, 0))
    # Signals to itself, as abort(3) sends one.
    for name in ("kill", "tgkill"):
        yield name, (_Bits(0, _INT, _PID),)


class Filter:
    """The list, compiled.

    Args:
        library: libseccomp's binding.

    Raises whatever the binding does when this libseccomp cannot express it.
    """

    def __init__(self, library: Any) -> None:
        self._flags = _TSYNC | (_LOG if os.environ.get(LOG_VARIABLE) else 0)
        self._number = int(library.resolve_syscall(_NATIVE, "seccomp"))
        compiled = library.SyscallFilter(library.ERRNO(errno.EPERM))
        compiled.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        # As a tree: the kernel tries each number when it takes a filter, and again at each call.
        compiled.set_attr(library.Attr.CTL_OPTIMIZE, 2)
        for name, conditions in _rules():
            number = _number(library, name)
            if number >= 0:
                arguments = [
                    library.Arg(item.argument, library.MASKED_EQ, item.mask, item.value)
                    for item in conditions
                ]
                compiled.add_rule(library.ALLOW, number, *arguments)
        compiled.add_rule(library.ERRNO(errno.ENOSYS), "clone3")
        with open(os.memfd_create("filter", os.MFD_CLOEXEC), "r+b") as file:
            compiled.export_bpf(file)
            file.seek(0)
            self._program = file.read()

    def load(self) -> bool:
        """Hold every thread of this process to it, for good. False: this host cannot.

        The process has no_new_privs set.
        """
        program = self._program.replace(_WORD.pack(_PID), _WORD.pack(os.getpid()))
        instructions = ctypes.create_string_buffer(program, len(program))
        described = _Program(len(program) // _INSTRUCTION_BYTES, ctypes.addressof(instructions))
        # Above zero: the thread that could not be held to it.
        loaded = _syscall(
            ctypes.c_long(self._number), ctypes.c_long(_SET_MODE_FILTER),
            ctypes.c_long(self._flags), ctypes.byref(described),
        )  # fmt: skip
        return bool(loaded == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("instructions", ctypes.c_ushort), ("first", ctypes.c_void_p))


def _rules() -> Iterator[_Rule]:
    for name in _ALLOWED.split():
        yield name, ()
    yield from _conditional()


def _number(library: Any, name: str) -> int:
    """Of a system call; below zero when this architecture or libseccomp has none of that name."""
    with suppress(OSError, RuntimeError, ValueError):
        return int(library.resolve_syscall(_NATIVE, name))
    return -1


@cache
def prepare() -> Filter | None:
    """The filter, built once for this process and its forks; None on a host without libseccomp."""
    try:
        library = _library()
        if library is None or struct.calcsize("P") != 8:
            return None  # 32-bit machines have other names for half of the list
        return Filter(library)
    except Exception:  # two bindings, several versions: each has errors of its own
        log.exception("no filter of system calls")
        return None


def _library() -> Any:
    """libseccomp's binding: its own (Debian's python3-seccomp), or PyPI's, which is alike."""
    try:
        return importlib.import_module("seccomp")
    except ImportError:
        pass
    try:
        with _known_libraries():
            return importlib.import_module("pyseccomp")
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


@contextmanager
def _known_libraries() -> Iterator[None]:
    """pyseccomp asks ldconfig where its libraries are, another process, which takes longer than
    all the rest of a function's start. The loader knows.
    """
    finder = ctypes.util.find_library
    known = {"c": "libc.so.6", "seccomp": "libseccomp.so.2"}
    ctypes.util.find_library = known.get  # type: ignore[assignment]
    try:
        yield
    finally:
        ctypes.util.find_library = finder
