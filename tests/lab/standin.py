"""A stand-in for accelvisord on a laboratory host, as far as migration goes: runs there, as root.

It serves the admin socket for the hook, and one domain's bus and private monitor by our own
modules. What it answers is in BEHAVE, read anew for each question; what it was asked is appended to
LOG, a JSON object a line. The functions' processes are started beside it.
"""

from __future__ import annotations

import asyncio
import grp
import json
import os
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelvisor.errors import StateError
from accelvisor.function import state as function_state
from accelvisor.hypervisor import context
from accelvisor.hypervisor.companions import Companions
from accelvisor.hypervisor.private import Private
from accelvisor.hypervisor.qmp import Event
from accelvisor.hypervisor.rewrite import rewrite
from accelvisor.hypervisor.vmstate import Bus

RUN = Path("/run/accelvisor")
BEHAVE, LOG, CONTEXTS = (RUN / f"standin.{word}" for word in ("json", "log", "contexts"))
HERE = str(uuid4())
FACE = "io.accelvisor.Admin."


def behaviour() -> dict[str, Any]:
    return dict(json.loads(BEHAVE.read_text())) if BEHAVE.exists() else {}


def say(what: str, **more: object) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps({"what": what, **more}) + "\n")


def state_of(function: str) -> bytes:
    """The configuration space in the holder's state memfd."""
    unit = f"accelvisor-function@{function}.service"
    pid = os.popen(f"systemctl show --property=MainPID --value {unit}").read().strip()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "state" in os.readlink(link) and "memfd" in os.readlink(link):
            with link.open("rb") as memfd:
                memfd.seek(function_state.PCI_AT)
                return memfd.read(context.CONFIG_BYTES)
    raise FileNotFoundError("no state memfd")


class Standin:
    """One domain's handler, and the admin socket's four methods."""

    def __init__(self, domain: str, functions: list[str]) -> None:
        self.functions = functions
        paths = Companions.of(RUN, domain)
        self.bus = Bus(paths.bus, domain, self)
        self.monitor = Private(paths.monitor, domain, self.event, on_connect=self.connected)
        self._paths = paths
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        group = grp.getgrnam("libvirt-qemu").gr_gid
        await self.bus.start(group=group)
        await self.monitor.start(group=group)
        (RUN / "admin").unlink(missing_ok=True)
        await asyncio.start_unix_server(self.admin, RUN / "admin", limit=1 << 23)
        say("ready")

    # --- Handler ---------------------------------------------------------------------------------

    async def owners(self, domain: str) -> bool:
        answer = bool(behaviour().get("owners", True))
        say("owners", answer=answer)
        return answer

    async def save(self, domain: str) -> bytes:
        say("save")
        return str(behaviour().get("token", "a token")).encode()

    async def load(self, domain: str, token: bytes) -> None:
        say("load", token=token.decode())
        await asyncio.sleep(float(behaviour().get("hold", 0)))
        refusal = behaviour().get("refuse")
        if refusal:
            raise StateError(refusal)

    # --- monitor ---------------------------------------------------------------------------------

    def event(self, domain: str, event: Event) -> None:
        say("event", name=event.name, data=dict(event.data))

    def connected(self, domain: str) -> None:
        say("connected")
        if not self.bus.connected:
            task = asyncio.ensure_future(self.again())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def again(self) -> None:
        # A QEMU that starts connects both: the bus is given the time that it may be behind.
        status = await self.monitor.execute("query-status")
        if not self.bus.connected and status["status"] != "prelaunch":
            await self.monitor.reattach(self._paths.bus)
            say("reattached", connected=self.bus.connected)

    # --- admin -----------------------------------------------------------------------------------

    async def admin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = json.loads((await reader.readuntil(b"\0"))[:-1])
                method = request["method"].removeprefix(FACE)
                answer = await self.answer(method, request["parameters"])
                writer.write(json.dumps(answer).encode() + b"\0")
        except asyncio.IncompleteReadError:
            writer.close()

    async def answer(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        say("hook", method=method, reason=given.get("reason", ""))
        refusal = behaviour().get(method)
        if refusal:
            told = {"code": "a-code", "message": refusal, "where": "", "hint": ""}
            return {"error": f"{FACE}Conflict", "parameters": told}
        if method == "AdmitDomain":
            domain = given["domain_uuid"]
            socket = f"{RUN}/function/{given['function']}/libvirt-{domain}"
            return {"parameters": {"function": {"domain_uuid": domain, "domain_socket": socket}}}
        if method in ("ReserveMigration", "PrepareRestore"):
            return {"parameters": {"xml": rewrite(given["xml"], host=HERE)}}
        if method == "Contexts":  # not of the hook: what the source's contexts are
            return {"parameters": {name: await self.context(name) for name in self.functions}}
        if method == "RestoreContext" and CONTEXTS.exists():
            return await self.restore()
        return {"parameters": {}}

    async def context(self, function: str) -> str:
        return (await context.observe(self.monitor, function, state_of(function))).hex()

    async def restore(self) -> dict[str, Any]:
        try:
            await self.monitor.wait_connected(10)
            status = await self.monitor.execute("query-status")
            for function, config in json.loads(CONTEXTS.read_text()).items():
                # The source's may change meanwhile, so it is done more than once: first another.
                other = context.with_bars(bytes.fromhex(config), elsewhere(function), function)
                await context.restore(self.monitor, function, other)
                await context.restore(self.monitor, function, bytes.fromhex(config))
            say("restored", status=status["status"])
        except Exception as error:
            say("not restored", error=repr(error))
            told = {"code": "x", "message": str(error), "where": "", "hint": ""}
            return {"error": f"{FACE}Conflict", "parameters": told}
        return {"parameters": {}}


def elsewhere(function: str) -> list[Any]:
    """A reply to ``query-pci`` with BAR0 at another address."""
    region = {"bar": 0, "type": "memory", "address": 0xFC00_0000}
    return [{"devices": [{"qdev_id": f"accel-{function}", "regions": [region]}]}]


async def main() -> None:
    standin = Standin(sys.argv[1], sys.argv[2:])
    await standin.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
