"""accelctl trust, on two hosts: what is printed, and who trusts whom after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from accelvisor.cli import main as main_module
from tests.daemon.harness import Harness
from tests.daemon.moving.pair import Pair, pair

Ctl = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Ctl:
    async def run(host: Harness, *words: str) -> tuple[int, str, str]:
        argv = [*words, "--socket", str(host.paths.admin_socket)]
        code = await asyncio.to_thread(main_module.main, argv)
        return code, *capsys.readouterr()

    return run


def scenario(body: Callable[[Pair], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        async with pair(**options) as made:
            await body(made)

    asyncio.run(run())


def test_two_hosts_come_to_trust_each_other_with_one_command_on_each(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        code, out, _ = await ctl(made.a, "trust", "init")
        assert code == 0
        assert "trusts nobody" in out
        code, out, err = await ctl(made.a, "trust", "invite")
        assert (code, err) == (0, "")
        join, until = out.splitlines()
        assert until.startswith("(good for one host, until ")
        code, out, _ = await ctl(made.b, "trust", "join", join)
        assert code == 0
        assert out.startswith("this host and hosta (")
        for host, other in ((made.a, "hostb"), (made.b, "hosta")):
            code, out, _ = await ctl(host, "trust", "show")
            assert other in out.splitlines()[-1]
            assert "current" in out.splitlines()[-1]
        # The code was good once.
        code, _, err = await ctl(made.b, "trust", "join", join)
        assert code != 0
        assert "[join-" in err or "[peer-" in err

    scenario(body, trust=False)


def test_a_host_is_trusted_no_more(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        code, out, _ = await ctl(made.a, "trust", "remove", "hostb")
        assert (code, out.splitlines()[0]) == (0, "host hostb is trusted no more")
        code, out, _ = await ctl(made.a, "trust", "show")
        assert "no other host is trusted" in out
        assert (await ctl(made.a, "trust", "remove", "hostb"))[0] == 1

    scenario(body)


def test_new_keys_reach_the_other_host(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        before = (await made.a.call("GetTrust"))["trust"]["key"]
        code, out, _ = await ctl(made.a, "trust", "rotate")
        after = (await made.a.call("GetTrust"))["trust"]["key"]
        assert code == 0
        assert out == f"this host signs with key {after} now\ntold: hostb\n"
        hosts = (await made.b.call("GetTrust"))["trust"]["hosts"]
        keys = {key["id"]: key["status"] for host in hosts for key in host["keys"]}
        assert (keys[before], keys[after]) == ("retiring", "current")
        _, out, _ = await ctl(made.b, "trust", "show")
        assert "retiring until" in out
        assert (await ctl(made.b, "trust", "revoke", before))[0] == 0
        assert before in (await made.b.call("GetTrust"))["trust"]["revoked"]

    scenario(body)


def test_a_trusted_host_comes_with_other_keys_only_when_it_is_named(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        await ctl(made.b, "trust", "remove", "hosta")
        await ctl(made.b, "trust", "rotate")  # hosta is not told of these keys
        await ctl(made.a, "trust", "rotate")  # those before were revoked with its removal
        _, out, _ = await ctl(made.a, "trust", "invite")
        code, _, err = await ctl(made.b, "trust", "join", out.splitlines()[0])
        assert (code, "[join-refused]" in err) == (4, True), err
        assert (await made.a.call("GetTrust"))["trust"]["hosts"], "nothing changed"
        _, out, _ = await ctl(made.a, "trust", "invite", "--again", "hostb")
        code, _, err = await ctl(made.b, "trust", "join", out.splitlines()[0])
        assert code == 0, err
        kinds = [event["kind"] for event in (await made.a.call("ListEvents"))["events"]]
        assert [kind for kind in kinds if kind.startswith("trust-")] == [
            "trust-added", "trust-rotated", "trust-refused", "trust-replaced"
        ]  # fmt: skip
        assert (await ctl(made.a, "trust", "invite", "--again", "nobody"))[0] == 1

    scenario(body)


def test_a_code_of_a_host_that_says_it_is_another_one_is_not_used(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        await ctl(made.a, "trust", "remove", "hostb")
        await ctl(made.a, "trust", "rotate")
        _, out, _ = await ctl(made.a, "trust", "invite")
        code, _, err = await ctl(made.b, "trust", "join", out.splitlines()[0])
        assert (code, "[trust-host-other-key]" in err) == (1, True), err
        hosts = (await made.a.call("GetTrust"))["trust"]["hosts"]
        assert len(hosts) == 1, "the other side did not hear of it"

    scenario(body)


def test_a_host_that_could_not_be_told_is_named(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        await made.daemon_b.stop()
        code, out, _ = await ctl(made.a, "trust", "rotate")
        assert code == 1
        assert "not reached: hostb" in out

    scenario(body)


def test_a_document_goes_out_and_comes_back(ctl: Ctl, tmp_path: Path) -> None:
    async def body(made: Pair) -> None:
        file = str(tmp_path / "trust")
        code, out, _ = await ctl(made.a, "trust", "export", file)
        assert (code, out) == (0, f"the trust document is in {file}\n")
        code, out, _ = await ctl(made.a, "trust", "import", file)
        assert code == 0, "its own again changes nothing"
        code, _, err = await ctl(made.b, "trust", "import", file)
        assert code == 1
        assert "[trust-" in err
        (tmp_path / "other").write_bytes(b"no document")
        assert (await ctl(made.b, "trust", "import", str(tmp_path / "other")))[0] == 1
        assert (await ctl(made.b, "trust", "import", str(tmp_path / "none")))[0] == 2
        assert (await ctl(made.b, "trust", "export", str(tmp_path)))[0] == 2

    scenario(body)


def test_json_is_the_wire_object(ctl: Ctl) -> None:
    async def body(made: Pair) -> None:
        for verb in ("init", "show"):
            code, out, _ = await ctl(made.a, "trust", verb, "--json")
            assert code == 0
            assert json.loads(out) == await made.a.call("GetTrust")

    scenario(body)
