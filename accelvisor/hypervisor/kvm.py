"""Can KVM run a guest here? Run one, of two instructions: FLD1, HLT.

A /dev/kvm proves little: on some cloud machines (KVM without hardware virtualisation) every ioctl
succeeds, firmware runs by KVM's instruction emulator, and the guest's kernel then dies on the
first instruction that the emulator lacks. FLD1 is such a one: only a processor executes it.

The virtual CPU starts, as real ones do, in real mode at offset 0xfff0 of segment 0xf000 (Intel SDM
vol. 3, 10.1.4); its hidden base, 0xffff0000, is set to what the selector says, which is a state
that every processor with virtualisation can enter. ioctl numbers and structures: Linux,
include/uapi/linux/kvm.h and arch/x86/include/uapi/asm/kvm.h.

``python -m accelvisor.hypervisor.kvm`` makes the attempt and prints what was found. :func:`probe`
runs it as a child, because an ioctl into a broken hypervisor may also hang. A daemon that may not
see /dev/kvm reads what ``--record FILE`` wrote before it was started (:func:`recorded`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass

_GET_API_VERSION = 0xAE00
_CREATE_VM = 0xAE01
_GET_VCPU_MMAP_SIZE = 0xAE04
_CREATE_VCPU = 0xAE41
_SET_TSS_ADDR = 0xAE47
_SET_USER_MEMORY_REGION = 0x4020AE46
_RUN = 0xAE80
_GET_SREGS = 0x8138AE83
_SET_SREGS = 0x4138AE84
_SREGS_BYTES = 312  # struct kvm_sregs; it begins with the code segment, which begins with its base
_EXIT_HLT = 5
_REASONS = {8: "shutdown", 9: "entry failed", 17: "KVM only emulates it, and cannot"}
_CODE_SEGMENT = 0xF0000
_CODE_PAGE = 0xFF000  # holds 0xf000:0xfff0
_CODE_OFFSET = 0xFF0
_CODE = b"\xd9\xe8\xf4"  # FLD1; HLT


@dataclass(frozen=True, slots=True)
class KvmVerdict:
    """``usable``: a processor executed a guest's instruction; ``detail`` is for people."""

    usable: bool
    detail: str


def probe(*, device: str = "/dev/kvm", deadline_s: float = 5.0) -> KvmVerdict:
    """Try it in a child process. Never raises for what it finds."""
    if not os.path.exists(device):
        return KvmVerdict(False, f"there is no {device}")
    if platform.machine() != "x86_64":
        return KvmVerdict(False, f"KVM on {platform.machine()} is not probed")
    try:
        child = subprocess.run(
            [sys.executable, "-I", os.path.abspath(__file__), device],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return KvmVerdict(False, f"a virtual CPU did not stop within {deadline_s:g} s")
    except OSError as error:
        return KvmVerdict(False, f"the probe could not be started: {error}")
    if child.returncode == 0:
        return KvmVerdict(True, "KVM runs guests")
    reason = (child.stdout or child.stderr).strip().splitlines()
    return KvmVerdict(False, reason[-1] if reason else f"the probe ended with {child.returncode}")


def run_code(device: str) -> str | None:
    """Run the two instructions; None when they ran, or the step that failed, in words."""
    step = f"open {device}"
    kvm = vm = vcpu = -1
    try:
        kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        step = "KVM_GET_API_VERSION"
        if (version := fcntl.ioctl(kvm, _GET_API_VERSION)) != 12:
            return f"KVM's API has version {version}, 12 is known"
        step = "KVM_CREATE_VM"
        vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
        step = "KVM_SET_TSS_ADDR"
        # Intel without unrestricted guest wants three pages of address space for itself.
        fcntl.ioctl(vm, _SET_TSS_ADDR, 0x7FFF_D000)
        step = "KVM_SET_USER_MEMORY_REGION"
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            page[_CODE_OFFSET : _CODE_OFFSET + len(_CODE)] = _CODE
            region = struct.pack("=IIQQQ", 0, 0, _CODE_PAGE, mmap.PAGESIZE, _address(page))
            fcntl.ioctl(vm, _SET_USER_MEMORY_REGION, region)
            step = "KVM_CREATE_VCPU"
            vcpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
            step = "KVM_SET_SREGS"
            registers = bytearray(_SREGS_BYTES)
            fcntl.ioctl(vcpu, _GET_SREGS, registers)
            struct.pack_into("=Q", registers, 0, _CODE_SEGMENT)
            fcntl.ioctl(vcpu, _SET_SREGS, bytes(registers))
            step = "mmap of the virtual CPU"
            with mmap.mmap(vcpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE)) as state:
                step = "KVM_RUN"
                fcntl.ioctl(vcpu, _RUN, 0)
                # struct kvm_run: two u8 flags, 6 bytes, exit_reason u32
                (reason,) = struct.unpack_from("=I", state, 8)
        if reason != _EXIT_HLT:
            known = _REASONS.get(reason, f"reason {reason}")
            return f"/dev/kvm is there, but an instruction of the guest did not run ({known})"
        return None
    except OSError as error:
        return f"{step}: {error.strerror}"
    finally:
        for descriptor in (vcpu, vm, kvm):
            if descriptor >= 0:
                os.close(descriptor)


def _address(page: mmap.mmap) -> int:
    from ctypes import addressof, c_char

    view = c_char.from_buffer(page)
    try:
        return addressof(view)
    finally:
        del view


def record(path: str, verdict: KvmVerdict) -> None:
    """Write a verdict for :func:`recorded`; readable by everybody, replaced in one step."""
    text = json.dumps({"usable": verdict.usable, "detail": verdict.detail})
    temporary = f"{path}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the unit's umask: the daemon is another user
        file.write(text + "\n")
    os.rename(temporary, path)


def recorded(path: str) -> KvmVerdict | None:
    """The verdict in that file; None when there is none or it makes no sense."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(4096))
        usable, detail = found["usable"], found["detail"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (isinstance(usable, bool) and isinstance(detail, str)):
        return None
    return KvmVerdict(usable, detail)


def verdict(path: str, *, device: str = "/dev/kvm") -> KvmVerdict:
    """Probe; where this process cannot see the device, what was recorded at ``path``."""
    if os.access(device, os.R_OK | os.W_OK):
        return probe(device=device)
    return recorded(path) or probe(device=device)


def main(arguments: list[str]) -> int:
    """0 when a guest's instruction ran; else 1, and the reason on standard output.

    ``--record FILE`` probes in a child, writes the verdict, and ends with 0.
    """
    if arguments[1:2] == ["--record"] and len(arguments) == 3:
        record(arguments[2], probe())
        return 0
    reason = run_code(arguments[1] if len(arguments) > 1 else "/dev/kvm")
    if reason is not None:
        print(reason)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
