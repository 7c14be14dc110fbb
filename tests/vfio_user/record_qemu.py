"""Record the golden transcripts in fixtures/vfio_user: what a real QEMU says to the sample device.

    python -m tests.vfio_user.record_qemu --qemu 'qemu-system-x86_64' --images DIR --work DIR

DIR of ``--images`` has a laboratory guest: vmlinux, initrd.img, base.squashfs. The work directory
must be seen by QEMU under the same name (bind-mount it where QEMU runs in a chroot). QEMU >= 10.1.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shlex
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from accelvisor.vfio_user.listen import listen
from accelvisor.vfio_user.record import record
from accelvisor.vfio_user.server import Server

from .sample import SampleDevice

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "fixtures" / "vfio_user"

_BOOT_S = 180.0
_KERNEL = "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check nokaslr audit=0"

#: Runs in the guest: a driver without interrupts, as accelguest's sysfs driver works.
_USE_SYSFS = """
import glob, mmap, os
device = next(d for d in glob.glob("/sys/bus/pci/devices/*")
              if open(d + "/vendor").read().strip() == "0xacce")
open(device + "/enable", "w").write("1")
with open(device + "/config", "r+b", buffering=0) as config:
    config.seek(4); command = int.from_bytes(config.read(2), "little")
    config.seek(4); config.write((command | 6).to_bytes(2, "little"))
registers = mmap.mmap(os.open(device + "/resource0", os.O_RDWR), 4096)
window = mmap.mmap(os.open(device + "/resource2", os.O_RDWR), 4096)
words = memoryview(registers).cast("I")
words[4] = 0x12345678
window[0:4] = b"seen"
assert words[4] == 0x12345678 and window[0:4] == b"seen"
"""

#: Runs in the guest: vfio-pci behind the IOMMU, interrupts, DMA through the map and by message.
_USE_VFIO = """
import glob, os, sys
sys.path.insert(0, "/root/lib")
from accelvisor.guest.vfio import VfioTransport
device = next(os.path.basename(d) for d in glob.glob("/sys/bus/pci/devices/*")
              if open(d + "/vendor").read().strip() == "0xacce")
t = VfioTransport(device)
PATTERN = b"accelvisor sample device"
t.write32(0x100, 1)
assert t.wait_interrupt(10), "no MSI"
buffer = t.allocate_dma(3 * 4096)
t.write32(0x108, buffer.address & 0xFFFFFFFF)
t.write32(0x10C, buffer.address >> 32)
t.write32(0x110, 1)
assert bytes(buffer.view[:24]) == PATTERN, bytes(buffer.view[:24])
buffer.view[:24] = bytes(range(24))
t.write32(0x114, 1)
assert t.wait_interrupt(10), "no MSI after DMA messages"
assert bytes(buffer.view[:24]) == PATTERN
assert bytes(buffer.view[24:48]) == bytes(range(24))
buffer.release()
t.close()
"""


class _Lines:
    """A JSON-lines peer on a UNIX socket (QMP, or the guest agent)."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 30
        while True:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._sock.connect(str(path))
                break
            except OSError:
                self._sock.close()
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.05)
        self._file = self._sock.makefile("rb")

    def ask(self, name: str, arguments: dict[str, Any] | None = None, wait_s: float = 30.0) -> Any:
        self._sock.settimeout(wait_s)
        request: dict[str, Any] = {"execute": name}
        if arguments:
            request["arguments"] = arguments
        self._sock.sendall(json.dumps(request).encode() + b"\n")
        while True:
            reply = json.loads(self._file.readline() or b'{"error": "closed"}')
            if "error" in reply:
                raise RuntimeError(f"{name}: {reply['error']}")
            if "return" in reply:
                return reply["return"]

    def wait_event(self, name: str, wait_s: float = 60.0) -> None:
        self._sock.settimeout(wait_s)
        while json.loads(self._file.readline()).get("event") != name:
            pass

    def close(self) -> None:
        self._file.close()
        self._sock.close()


class Vm:
    """QEMU with a guest agent and a monitor; ``devices`` are words of its command line."""

    def __init__(self, qemu: list[str], images: Path, work: Path, devices: list[str]) -> None:
        self._agent_path, self._monitor_path = work / "agent", work / "monitor"
        for stale in (self._agent_path, self._monitor_path):
            stale.unlink(missing_ok=True)
        disk = f"file={images}/base.squashfs,format=raw,if=none,id=base,readonly=on"
        words = [
            *qemu, "-nodefaults", "-display", "none", "-cpu", "max", "-m", "256",
            "-object", "memory-backend-memfd,id=ram,size=256M,share=on",
            "-kernel", f"{images}/vmlinux", "-initrd", f"{images}/initrd.img", "-append", _KERNEL,
            "-serial", f"file:{work}/console",
            "-chardev", f"socket,id=agent,path={self._agent_path},server=on,wait=off",
            "-device", "virtio-serial-pci",
            "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
            "-drive", disk, "-device", "virtio-blk-pci,drive=base,serial=base",
            "-qmp", f"unix:{self._monitor_path},server=on,wait=off", *devices,
        ]  # fmt: skip
        self._process = subprocess.Popen(words)
        self.monitor = _Lines(self._monitor_path, self._process)
        self.monitor.ask("qmp_capabilities")
        self._agent = _Lines(self._agent_path, self._process)

    def __enter__(self) -> Vm:
        self.wait_booted()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.monitor.close()
        self._agent.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def wait_booted(self) -> None:
        end = time.monotonic() + _BOOT_S
        while True:
            try:
                self._agent.ask("guest-ping", wait_s=3)
                return
            except TimeoutError:
                # What was asked too early is answered later: begin with a new connection.
                self._agent.close()
                self._agent = _Lines(self._agent_path, self._process)
                if time.monotonic() > end:
                    raise

    def push(self, path: str, data: bytes) -> None:
        handle = self._agent.ask("guest-file-open", {"path": path, "mode": "w"})
        for at in range(0, len(data), 65536):
            block = base64.b64encode(data[at : at + 65536]).decode()
            self._agent.ask("guest-file-write", {"handle": handle, "buf-b64": block})
        self._agent.ask("guest-file-close", {"handle": handle})

    def run(self, *words: str) -> None:
        """Raises RuntimeError with the program's output when it fails."""
        order = {"path": words[0], "arg": list(words[1:]), "capture-output": True}
        pid = self._agent.ask("guest-exec", order)["pid"]
        while True:
            status = self._agent.ask("guest-exec-status", {"pid": pid})
            if status["exited"]:
                break
            time.sleep(0.1)
        if status.get("exitcode"):
            said = base64.b64decode(status.get("err-data", "")).decode()
            raise RuntimeError(f"{words[0]} failed in the guest: {said}")

    def python(self, program: str) -> None:
        self.push("/root/use.py", program.encode())
        self.run("/usr/bin/python3", "/root/use.py")

    def power_off(self) -> None:
        try:
            self._agent.ask("guest-shutdown", {"mode": "powerdown"}, wait_s=1)
        except (TimeoutError, RuntimeError):
            pass
        self._process.wait(60)

    def reboot(self) -> None:
        self.monitor.ask("system_reset")
        self.monitor.wait_event("RESET")
        self.wait_booted()

    def plug(self, path: Path) -> None:
        address = {"type": "unix", "path": str(path)}
        order = {"driver": "vfio-user-pci", "id": "vf0", "bus": "port0", "socket": address}
        self.monitor.ask("device_add", order)
        wait = "test -e /sys/bus/pci/devices/0000:01:00.0 || sleep 0.2; " * 50
        self.run("/bin/sh", "-c", wait + "test -e /sys/bus/pci/devices/0000:01:00.0")

    def unplug(self) -> None:
        self.monitor.ask("device_del", {"id": "vf0"})
        self.monitor.wait_event("DEVICE_DELETED")


def _library() -> bytes:
    """What the guest needs of accelvisor, as a tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in ("__init__.py", "errors.py", "limits.py", "abi", "guest"):
            tar.add(REPOSITORY / "accelvisor" / name, f"lib/accelvisor/{name}")
    return out.getvalue()


def boot(start: Callable[[list[str]], Vm], function: Path) -> None:
    """Realize, boot, use without interrupts, power off."""
    with start(_port() + _device(function)) as vm:
        vm.python(_USE_SYSFS)
        vm.power_off()


def reset(start: Callable[[list[str]], Vm], function: Path) -> None:
    """Use, reset of the machine, boot again, use, power off."""
    with start(_port() + _device(function)) as vm:
        vm.python(_USE_SYSFS)
        vm.reboot()
        vm.python(_USE_SYSFS)
        vm.power_off()


def hotplug(start: Callable[[list[str]], Vm], function: Path) -> None:
    """Plugged into a running guest, used, unplugged, plugged again, power off."""
    with start(_port()) as vm:
        for _ in range(2):
            vm.plug(function)
            vm.python(_USE_SYSFS)
            vm.unplug()
        vm.plug(function)
        vm.power_off()


def iommu(start: Callable[[list[str]], Vm], function: Path) -> None:
    """Behind intel-iommu with the guest's vfio-pci: MSI, DMA through maps and by message."""
    machine = ["-machine", "q35,memory-backend=ram,kernel-irqchip=split"]
    viommu = ["-device", "intel-iommu,intremap=on,caching-mode=on"]
    with start(machine + viommu + _port()[2:] + _device(function)) as vm:
        vm.push("/root/lib.tar.gz", _library())
        vm.run("/bin/tar", "-C", "/root", "-xf", "/root/lib.tar.gz")
        vm.python(_USE_VFIO)
        vm.power_off()


def _port() -> list[str]:
    port = "pcie-root-port,id=port0,chassis=1,slot=1"
    return ["-machine", "q35,memory-backend=ram", "-device", port]


def _device(path: Path) -> list[str]:
    address = {"type": "unix", "path": str(path)}
    words = {"driver": "vfio-user-pci", "id": "vf0", "bus": "port0", "socket": address}
    return ["-device", json.dumps(words)]


SCENARIOS = {"boot": boot, "reset": reset, "hotplug": hotplug, "iommu": iommu}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qemu", default="qemu-system-x86_64")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FIXTURES)
    parser.add_argument("scenario", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    qemu = shlex.split(options.qemu)
    for name in options.scenario:
        begun = time.monotonic()
        device = SampleDevice()
        server = Server(device, options.work / "server.sock")
        device.defer = server.defer
        proxy = listen(options.work / "function.sock", mode=0o666)
        with open(options.out / f"{name}.jsonl", "w", encoding="utf-8") as out:
            threads = [
                threading.Thread(target=server.serve_forever),
                threading.Thread(target=record, args=(proxy, server.path, out)),
            ]
            for thread in threads:
                thread.start()

            def start(words: list[str]) -> Vm:
                return Vm(qemu, options.images, options.work, words)

            try:
                SCENARIOS[name](start, proxy.path)
                end = time.monotonic() + 10
                while server.connection is not None and time.monotonic() < end:
                    time.sleep(0.01)  # until the proxy has passed on that QEMU went
            finally:
                proxy.socket.shutdown(socket.SHUT_RDWR)
                server.stop()
                for thread in threads:
                    thread.join()
                proxy.close()
                device.close()
        print(f"{name}: {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
