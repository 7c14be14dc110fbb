"""``accelctl function selftest``: accelctl takes the VM's place on a function's socket.

The guest's own checks (:mod:`accelvisor.guest.selftest`) run here through the in-tree client. That
needs the right to open the socket, and nobody else on it: a function serves one client at a time,
so a VM that has the function cannot be disturbed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any

from accelvisor.errors import ConflictError, DeadlineError, PermissionDenied
from accelvisor.guest import selftest
from accelvisor.guest.function import Function
from accelvisor.vfio_user.client import Client
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.transport import ClientTransport


def run(function: Mapping[str, Any], *, as_json: bool) -> int:
    """Run all checks and print each as it ends; 1 when one failed.

    Raises:
        ConflictError: ``function-in-use`` or another that names the state.
        PermissionDenied: ``socket-permission``.
    """
    outcomes = []
    with Function(ClientTransport(connect(function)), name="accelctl selftest") as opened:
        for outcome in selftest.run(opened):
            outcomes.append(outcome)
            if not as_json:
                print(f"{outcome.state:<7} {outcome.name:<24} {outcome.detail}", flush=True)
    failed = sum(outcome.state == "failed" for outcome in outcomes)
    if as_json:
        print(json.dumps({"checks": [outcome.to_dict() for outcome in outcomes]}, indent=2))
    else:
        print(f"{len(outcomes)} checks, {failed} failed")
    return int(failed > 0)


def connect(function: Mapping[str, Any]) -> Client:
    """The only client of the function, or a refusal that says why not."""
    if function["state"] != "ready":
        place = f" (VM {function['domain']})" if function["domain"] else ""
        raise ConflictError(
            f'function "{function["name"]}" is {function["state"]}{place},'
            " the selftest needs one that is ready and that no VM has",
            code="function-in-use" if function["domain"] else "function-state",
            where="accelctl",
            hint="run accelguest selftest inside the VM, or create a function for the test",
        )
    path = function["socket"]
    if not os.access(path, os.R_OK | os.W_OK):
        raise PermissionDenied(
            "no permission to open the function's socket",
            code="socket-permission",
            where=path,
            hint="only functions and root may: use sudo",
        )
    try:
        return Client(path)
    except (Refusal, DeadlineError) as error:
        if isinstance(error, Refusal) and error.errno != errno.EBUSY:
            raise
        # A function has one client; others wait at its door, or are told so.
        raise ConflictError(
            f'function "{function["name"]}" does not take a second client',
            code="function-in-use",
            where=path,
            hint="end the other client; if there is none, accelctl function reset helps",
        ) from error
