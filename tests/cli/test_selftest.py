"""accelctl function selftest on a real function process."""

from __future__ import annotations

import asyncio
import json

import pytest

from accelvisor.cli import main as main_module
from accelvisor.daemon.supervisor import SubprocessSupervisor
from accelvisor.vfio_user.client import Client
from tests.daemon.harness import Harness


@pytest.fixture
def real(harness: Harness) -> Harness:
    """The daemon with the function processes of the product."""
    harness.supervisor = SubprocessSupervisor(harness.paths)
    return harness


async def selftest(harness: Harness, *extra: str) -> int:
    argv = ["function", "selftest", "nn0", *extra, "--socket", str(harness.paths.admin_socket)]
    return await asyncio.to_thread(main_module.main, argv)


def test_all_checks_pass(real: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with real.daemon():
            made = await real.create("nn0")
            try:
                assert await selftest(real) == 0
                out = capsys.readouterr().out
                assert out.splitlines()[-1].endswith("0 failed")
                assert "failed " not in out
                assert await selftest(real, "--json") == 0
                checks = json.loads(capsys.readouterr().out)["checks"]
                assert {item["state"] for item in checks} == {"ok"}
                statistics = (await real.call("FunctionStatistics", function="nn0"))["statistics"]
                assert statistics["commands"] > 1000
            finally:
                await real.call("DeleteFunction", function="nn0")
            assert real.processes() == set()
            assert made["state"] == "ready"

    asyncio.run(scenario())


def test_a_function_that_serves_somebody_is_refused(
    real: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with real.daemon():
            made = await real.create("nn0")
            try:
                with Client(made["socket"]):
                    assert await selftest(real) == 1
                assert "[function-in-use]" in capsys.readouterr().err
            finally:
                await real.call("DeleteFunction", function="nn0")

    asyncio.run(scenario())


def test_a_real_function_is_followed_and_ends(real: Harness) -> None:
    """Its process is adopted by the next daemon, watched, started again, and deleted whole."""

    async def scenario() -> None:
        async with real.daemon():
            uuid = (await real.create("nn0"))["uuid"]
            pid = await real.supervisor.pid(uuid)
        async with real.daemon():
            assert await real.supervisor.pid(uuid) == pid
            real.kill(uuid)
            async with asyncio.timeout(20):
                while await real.supervisor.pid(uuid) in (None, pid):
                    await asyncio.sleep(0.01)
                while await real.state("nn0") != "ready":
                    await asyncio.sleep(0.01)
            await real.call("ResetFunction", function="nn0")
            await real.call("DeleteFunction", function="nn0")
            assert await real.supervisor.pid(uuid) is None

    asyncio.run(scenario())
