"""Hosts that ask one etcd: it decides, whoever of the two is cut off, stopped or gone for good."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from accelvisor.daemon.etcd import EtcdClient
from accelvisor.daemon.ledger_etcd import EtcdLedger
from accelvisor.migration.ledger import Standing
from tests.daemon.private_etcd import PrivateEtcd, private_etcd
from tests.migration.ledgers import TestSigner

from .case import Case, a_case, uuid_of
from .moving import wait_for
from .pausing import PausingHost


class FleetCase(Case):
    """Both hosts ask the same etcd."""

    url: str

    def owner(self) -> str | None:
        ledger = EtcdLedger(EtcdClient([self.url]), "nobody", TestSigner(), lambda: 0)

        async def newest() -> str | None:
            found = await ledger.get(self.function)
            await ledger.close()
            if found is None:
                return None
            assert found.record.state is Standing.COMMITTED or found.record.state is Standing.OWNED
            return found.record.owner

        return asyncio.run(newest())


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    with private_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def case(etcd: PrivateEtcd) -> Iterator[Case]:
    FleetCase.url = etcd.url
    more = f'[ledger]\nkind = "etcd"\nendpoints = ["{etcd.url}"]\n'
    with a_case(FleetCase, more) as made:
        yield made


def test_moves_there_and_back_are_decided_by_etcd(case: Case) -> None:
    for _ in range(2):
        there = case.destination
        case.vm.migrate(there)
        case.settled()
        assert case.owner() == uuid_of(there)
    case.end()


def test_source_that_is_gone_after_the_seal_is_not_waited_for(case: Case) -> None:
    def kill(source: PausingHost, _: object) -> None:
        source.stop(signal.SIGKILL)

    def computes() -> None:
        case.guest.wait_rounds(2)
        assert [host.alive for host in case.hosts].count(False) == 1

    assert case.move("destination:loaded", kill, computes) == "moved"
    case.end()


def test_source_that_comes_back_late_does_not_compute(case: Case) -> None:
    """It stood still while the other one was given the function; then it must give it away."""
    stopped = []

    def stop(source: object, _: object) -> None:
        stopped.append(case.source.daemon_pid)
        os.kill(stopped[0], signal.SIGSTOP)

    def computes() -> None:
        case.guest.wait_rounds(2)
        os.kill(stopped[0], signal.SIGCONT)

    assert case.move("destination:loaded", stop, computes) == "moved"
    case.end()


def test_etcd_that_is_away_is_waited_for(case: Case, etcd: PrivateEtcd) -> None:
    def away() -> None:
        rounds = len(case.guest.work.digests)
        wait_for(lambda: any("etcd" in host.log() for host in case.hosts), "nobody notices")
        # Who owns it is not known: nobody computes.
        assert len(case.guest.work.digests) <= rounds + 1
        etcd.start()

    assert case.move("destination:loaded", lambda *_: etcd.stop(), away) == "moved"
    case.end()
