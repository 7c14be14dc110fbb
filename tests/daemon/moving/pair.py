"""Two daemons in the test's loop that trust each other; what libvirt does is up to the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from accelvisor.daemon.config import HostConfig, MigrationConfig
from accelvisor.daemon.daemon import Daemon
from accelvisor.embedded.host import free_port
from tests.daemon.harness import Harness


@dataclass
class Pair:
    """``a`` has the VMs, ``b`` is where they go."""

    a: Harness
    b: Harness
    daemon_a: Daemon
    daemon_b: Daemon


def configured(root: Path, name: str, **changes: Any) -> Harness:
    """A host of that name with an address of its own."""
    harness = Harness(root)
    migration = MigrationConfig(
        listen=f"127.0.0.1:{free_port()}", libvirt_uri="fake+tcp://{address}/system", **changes
    )
    harness.config = msgspec.structs.replace(
        harness.config, host=HostConfig(name=name), migration=migration
    )
    return harness


@asynccontextmanager
async def pair(*, trust: bool = True, **changes: Any) -> AsyncIterator[Pair]:
    """Both daemons, up; ``changes`` of the second host's [migration]."""
    roots = [Path(tempfile.mkdtemp(prefix="a")) for _ in range(2)]
    a, b = configured(roots[0], "hosta"), configured(roots[1], "hostb", **changes)
    try:
        async with AsyncExitStack() as stack:
            daemon_a = await stack.enter_async_context(a.daemon())
            daemon_b = await stack.enter_async_context(b.daemon())
            if trust:
                code = (await a.call("InviteHost"))["code"]
                await b.call("JoinHost", code=code)
            yield Pair(a, b, daemon_a, daemon_b)
    finally:
        for harness, root in zip((a, b), roots, strict=True):
            harness.clean_up()
            shutil.rmtree(root)
