"""Who has a domain: the host that was named first, and all others when it is not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelvisor.daemon.moving.neighbours import Neighbours
from accelvisor.errors import AccelvisorError, NotFoundError, UnavailableError


class Answers(Neighbours):
    """Each host says yes or no, or cannot be asked (None); or one after the other."""

    def __init__(self, **says: Any) -> None:
        hosts = [SimpleNamespace(uuid=name, name=name) for name in says]
        keys: Any = SimpleNamespace(peers=lambda: list(hosts))
        super().__init__(keys)
        self.says = says
        self.asked: list[str] = []

    async def _has_it(self, host: Any, domain_uuid: str) -> bool:
        self.asked.append(host.uuid)
        answer = self.says[host.uuid]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if answer is None:
            raise UnavailableError(f"{host.uuid} is down", code="peer-lost", where="peer")
        return answer

    def find(self, hint: str) -> str:
        return asyncio.run(self.source_of("domain", hint)).uuid


def test_a_named_host_that_has_it_is_asked_alone() -> None:
    answers = Answers(a=True, b=True)
    assert answers.find("b") == "b"
    assert answers.asked == ["b"]


def test_a_domain_whose_definition_names_its_former_host_is_found_where_it_is() -> None:
    assert Answers(a=False, b=True, c=False).find("a") == "b"
    assert Answers(a=None, b=True).find("a") == "b"


def test_a_host_that_nobody_knows_names_nobody() -> None:
    assert Answers(a=False, b=True).find("elsewhere") == "b"


@pytest.mark.parametrize(
    ("hint", "code"),
    [("a", "peer-lost"), ("b", "migration-no-source"), ("", "migration-no-source")],
)
def test_when_nobody_has_it_the_named_host_s_error_counts(hint: str, code: str) -> None:
    answers = Answers(a=None, b=False)
    with pytest.raises(AccelvisorError) as caught:
        answers.find(hint)
    assert caught.value.code == code
    assert isinstance(caught.value, NotFoundError) == (code == "migration-no-source")


def test_a_connection_that_breaks_once_does_not_hide_the_domain() -> None:
    assert Answers(a=[None, True], b=False).find("") == "a"


def test_a_host_that_does_not_answer_is_named() -> None:
    with pytest.raises(NotFoundError, match="no answer from a"):
        Answers(a=None, b=False).find("")
