"""One-time tickets of bulk connections."""

from __future__ import annotations

import os
from dataclasses import replace
from uuid import UUID

import pytest

from accelvisor.errors import CapacityError, PermissionDenied
from accelvisor.limits import LIMITS
from accelvisor.migration.tickets import Tickets

HOST, OTHER = UUID(int=1), UUID(int=2)


def refused(tickets: Tickets[str], ticket: bytes, host: UUID = HOST, now: float = 0.0) -> None:
    with pytest.raises(PermissionDenied) as caught:
        tickets.redeem(ticket, host, now)
    assert caught.value.code == "peer-ticket"


def test_a_ticket_is_good_once() -> None:
    tickets: Tickets[str] = Tickets(os.urandom)
    first, second = tickets.issue(HOST, "one", 0), tickets.issue(HOST, "two", 0)
    assert tickets.redeem(second, HOST, 1) == "two"
    assert tickets.redeem(first, HOST, 1) == "one"
    refused(tickets, first)


def test_another_hosts_ticket_is_refused_and_used_up() -> None:
    tickets: Tickets[str] = Tickets(os.urandom)
    ticket = tickets.issue(HOST, "one", 0)
    refused(tickets, ticket, OTHER)
    refused(tickets, ticket)


def test_an_old_unknown_or_withdrawn_ticket_is_refused() -> None:
    tickets: Tickets[str] = Tickets(os.urandom)
    refused(tickets, tickets.issue(HOST, "one", 0), now=LIMITS.ticket_s)
    refused(tickets, bytes(32))
    session = "two"
    ticket = tickets.issue(HOST, session, 0)
    tickets.withdraw(session)
    refused(tickets, ticket)


def test_few_tickets_wait_and_old_ones_make_room() -> None:
    tickets: Tickets[str] = Tickets(os.urandom, limits=replace(LIMITS, tickets=2))
    for _ in range(2):
        tickets.issue(HOST, "x", 0)
    with pytest.raises(CapacityError) as caught:
        tickets.issue(HOST, "x", 1)
    assert caught.value.code == "peer-tickets"
    tickets.issue(HOST, "x", LIMITS.ticket_s)
