"""Can KVM run a guest here? Run one: a virtual CPU whose whole program is HLT.

A /dev/kvm proves little: inside some virtual machines KVM_CREATE_VM succeeds and the first start
of a virtual CPU fails. ``python -m accelvisor.hypervisor.kvm`` makes the attempt and prints one
line; it is run as a child, because an ioctl into a broken hypervisor may also hang.

The virtual CPU starts, as real ones do, in real mode at the reset vector 0xfffffff0 (Intel SDM
vol. 3, 10.1.4), so one page there with an HLT in it needs no register to be set. ioctl numbers and
the layout of kvm_run: Linux, include/uapi/linux/kvm.h.
"""

from __future__ import annotations

import fcntl
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
_EXIT_HLT = 5
_RESET_PAGE = 0xFFFFF000
_RESET_OFFSET = 0xFF0
_HLT = 0xF4


@dataclass(frozen=True, slots=True)
class KvmVerdict:
    """``usable``: a guest instruction was executed. ``detail`` says what was found, in words."""

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
        return KvmVerdict(True, "a guest instruction ran")
    reason = (child.stdout or child.stderr).strip().splitlines()
    return KvmVerdict(False, reason[-1] if reason else f"the probe ended with {child.returncode}")


def run_hlt(device: str) -> str | None:
    """Run the one instruction; None when it ran, or the step that failed, in words."""
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
            page[_RESET_OFFSET] = _HLT
            region = struct.pack("=IIQQQ", 0, 0, _RESET_PAGE, mmap.PAGESIZE, _address(page))
            fcntl.ioctl(vm, _SET_USER_MEMORY_REGION, region)
            step = "KVM_CREATE_VCPU"
            vcpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
            step = "mmap of the virtual CPU"
            with mmap.mmap(vcpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE)) as state:
                step = "KVM_RUN"
                fcntl.ioctl(vcpu, _RUN, 0)
                # struct kvm_run: two u8 flags, 6 bytes, exit_reason u32
                (reason,) = struct.unpack_from("=I", state, 8)
        if reason != _EXIT_HLT:
            return f"the virtual CPU stopped for reason {reason}, not for HLT ({_EXIT_HLT})"
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


def main(arguments: list[str]) -> int:
    """0 when a guest instruction ran; else 1, and the reason on standard output."""
    reason = run_hlt(arguments[1] if len(arguments) > 1 else "/dev/kvm")
    if reason is not None:
        print(reason)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
