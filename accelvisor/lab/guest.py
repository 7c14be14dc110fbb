"""A guest of the laboratory: programs and files in it, by QEMU's guest agent.

No network and no login: everything goes through ``virsh qemu-agent-command`` on the host, which is
there in every guest that a lab host can run, also while it is being migrated.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelvisor.errors import DeadlineError, SystemFailure
from accelvisor.lab.process import kill_group, readable, shorten, wait_until

if TYPE_CHECKING:
    from accelvisor.lab.host import LabHost

# One argument of a program may be 128 KiB; this is 88 KiB in base64 plus its JSON.
_CHUNK = 64 * 1024


class Guest:
    """The guest in one domain of one host."""

    def __init__(self, host: LabHost, domain: str) -> None:
        self.host = host
        self.domain = domain

    def on(self, host: LabHost) -> Guest:
        """The same guest where it has been migrated to."""
        return Guest(host, self.domain)

    def agent(
        self, command: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = 20.0
    ) -> Any:
        """One command to the agent and what it returned."""
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = dict(arguments)
        reply = self.host.run(
            [
                "virsh",
                "qemu-agent-command",
                "--timeout",
                str(max(1, int(timeout))),
                self.domain,
                json.dumps(request),
            ],
            timeout=timeout + 10,
        )
        try:
            return json.loads(reply.stdout)["return"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemFailure(
                f"the guest agent answered {reply.stdout[:200]!r}", where=self.domain
            ) from error

    @property
    def ready(self) -> bool:
        """Whether the agent answers now."""
        argv = ["virsh", "qemu-agent-command", "--timeout", "2", self.domain]
        reply = self.host.run([*argv, '{"execute":"guest-ping"}'], timeout=15, check=False)
        return reply.returncode == 0

    def wait_ready(self, *, deadline_s: float = 120.0) -> None:
        """Wait until programs can be run in it; on failure the error shows its console.

        libvirt tells when the agent comes: asking all the time costs what the guest boots with.
        """
        watch = ["virsh", "event", "--domain", self.domain, "--event", "agent-lifecycle", "--loop"]
        watch += ["--timeout", str(int(deadline_s) + 1)]
        with subprocess.Popen(
            self.host.enter(watch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as watching:
            try:
                assert watching.stdout is not None
                self._wait_ready(watching.stdout.fileno(), deadline_s)
            finally:
                kill_group(watching)

    def _wait_ready(self, told: int, deadline_s: float) -> None:
        sources = [told]
        end = time.monotonic() + deadline_s
        while not self.ready:
            if time.monotonic() > end:
                raise DeadlineError(
                    f"not within {deadline_s:g} s: guest {self.domain} ready",
                    where="lab",
                    hint=f"its console ends with: {self.console()[-600:]}",
                )
            # Asked now and then all the same: what came before virsh listened it does not tell.
            if readable(sources, 1.0) and not os.read(told, 4096):
                sources = []  # it has ended: asking is what is left

    def console(self) -> str:
        """What the guest has printed on its serial console."""
        path = f"/var/log/libvirt/qemu/{self.domain}-console.log"
        return self.host.run(["cat", path], check=False).stdout

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        input: str | bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the guest as root, and wait for its end."""
        data = input.encode() if isinstance(input, str) else input
        pid = self.start(argv, input=data, env=env)
        result = self._finish(pid, argv, timeout)
        if check and result.returncode != 0:
            said = (result.stderr or result.stdout).strip()[-1500:]
            raise SystemFailure(
                f"exit status {result.returncode} from: {shorten(argv)}\n  {said}",
                code="command-failed",
                where=f"guest {self.domain}",
            )
        return result

    def start(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Start a program and leave it running; returns its pid in the guest."""
        path, *words = argv
        arguments: dict[str, Any] = {"path": path, "arg": words, "capture-output": True}
        if input is not None:
            arguments["input-data"] = base64.b64encode(input).decode("ascii")
        if env:
            arguments["env"] = [f"{name}={value}" for name, value in env.items()]
        return int(self.agent("guest-exec", arguments)["pid"])

    def finish(self, pid: int, *, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end of a program that ``start`` has started."""
        return self._finish(pid, [f"pid {pid}"], timeout)

    def _finish(
        self, pid: int, argv: Sequence[str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        status: dict[str, Any] = {}
        end = time.monotonic() + timeout

        def ended() -> bool:
            left = max(1.0, min(20.0, end - time.monotonic()))
            status.update(self.agent("guest-exec-status", {"pid": pid}, timeout=left))
            return bool(status.get("exited"))

        try:
            wait_until(ended, deadline_s=timeout, what=f"{self.domain}: {shorten(argv)}")
        except DeadlineError:
            # Its session, if it has one, so that its children go as well.
            kill = f"kill -KILL -- -{pid} || kill -KILL {pid}"
            self.agent("guest-exec", {"path": "sh", "arg": ["-c", kill]})
            raise
        # Ended by a signal it has no exit code: told the way a shell does.
        code = int(status.get("exitcode", 128 + int(status.get("signal", 0))))
        return subprocess.CompletedProcess(
            list(argv), code, _text(status.get("out-data")), _text(status.get("err-data"))
        )

    def push(self, local: Path | bytes, remote: str, *, mode: int = 0o644) -> None:
        """Copy a file or its bytes into the guest."""
        data = local if isinstance(local, bytes) else local.read_bytes()
        handle = self.agent("guest-file-open", {"path": remote, "mode": "w"})
        try:
            for offset in range(0, len(data), _CHUNK):
                block = base64.b64encode(data[offset : offset + _CHUNK]).decode("ascii")
                self.agent("guest-file-write", {"handle": handle, "buf-b64": block})
        finally:
            self.agent("guest-file-close", {"handle": handle})
        self.run(["chmod", f"{mode:o}", remote])

    def pull(self, remote: str, local: Path | None = None) -> bytes:
        """The bytes of a file in the guest; written to ``local`` as well when given."""
        handle = self.agent("guest-file-open", {"path": remote, "mode": "r"})
        data = b""
        try:
            while True:
                reply = self.agent("guest-file-read", {"handle": handle, "count": 1 << 20})
                data += base64.b64decode(reply["buf-b64"])
                if reply["eof"]:
                    break
        finally:
            self.agent("guest-file-close", {"handle": handle})
        if local is not None:
            local.write_bytes(data)
        return data

    @property
    def boot_id(self) -> str:
        """Another one after each boot."""
        return self.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()

    @property
    def state(self) -> str:
        """What libvirt says of the domain, e.g. ``running`` or ``shut off``."""
        return self.host.virsh("domstate", self.domain).stdout.strip()

    def wait_state(self, wanted: str, *, deadline_s: float = 60.0) -> None:
        """Wait until libvirt says so."""
        what = f"domain {self.domain} {wanted}"
        wait_until(lambda: self.state == wanted, deadline_s=deadline_s, what=what)


def _text(block: str | None) -> str:
    return base64.b64decode(block).decode(errors="replace") if block else ""
