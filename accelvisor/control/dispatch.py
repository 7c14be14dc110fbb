"""From a call to its replies: look-up, validation, authorisation. Knows no socket.

A service is an object with one coroutine method per Varlink method (``create_function`` for
``CreateFunction``); it takes the call's parameters as keywords and returns the reply's parameters.
A streaming one is an async generator that yields them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from accelvisor.control import admin, idl
from accelvisor.control.codec import Call, Reply
from accelvisor.errors import AccelvisorError, SystemFailure

LOG = logging.getLogger(__name__)
VARLINK = "org.varlink.service"


class Refused(Exception):  # noqa: N818 - an answer of the protocol, not a failure
    """One of org.varlink.service's own errors."""

    def __init__(self, name: str, **parameters: str) -> None:
        super().__init__(name)
        self.reply = Reply(dict(parameters), f"{VARLINK}.{name}")


@lru_cache(maxsize=1)
def varlink_interface() -> idl.Interface:
    """The parsed ``org.varlink.service.varlink``."""
    return idl.parse(Path(__file__).with_name(f"{VARLINK}.varlink").read_text())


class Dispatcher:
    """Answers calls.

    Args:
        service: the object with the methods.
        policy: who may do what.
        version: of the product, for GetInfo.
    """

    def __init__(self, service: object, policy: admin.Policy, version: str) -> None:
        self.policy = policy
        self._service = service
        self._version = version

    async def answer(self, call: Call, peer: admin.Peer) -> AsyncGenerator[Reply, None]:
        """All replies to one call; the last one does not continue. Never raises but for
        cancellation."""
        try:
            async for reply in self._answer(call, peer):
                yield reply
        except Refused as refused:
            yield refused.reply
        except AccelvisorError as error:
            yield Reply(dict(error.to_dict()), admin.error_name(error))
        except Exception as error:
            # A bug. The caller gets a stable code; the traceback goes to the log, not to the wire.
            LOG.exception("%s failed", call.method)
            failure = SystemFailure(
                f"{call.member} failed with an internal error ({type(error).__name__})",
                code="internal",
                where="accelvisord",
                hint="the daemon's log has the traceback: please report it",
            )
            yield Reply(dict(failure.to_dict()), admin.error_name(failure))

    async def _answer(self, call: Call, peer: admin.Peer) -> AsyncGenerator[Reply, None]:
        interface = self._interface(call)
        if call.member not in interface.methods:
            raise Refused("MethodNotFound", method=call.method)
        if call.upgrade:
            raise Refused("InvalidParameter", parameter="upgrade")
        if interface.name != VARLINK:  # before anything that the caller sent is looked at
            admin.authorise(self.policy, peer, call.member)
        try:
            interface.check_call(call.member, call.parameters)
        except idl.MismatchError as error:
            raise Refused("InvalidParameter", parameter=error.parameter) from error
        if interface.name != VARLINK:
            admin.authorise(self.policy, peer, call.member, call.parameters)
        if interface.name == VARLINK:
            yield Reply(self._about(call))
            return
        method = getattr(self._service, method_name(call.member))
        if not inspect.isasyncgenfunction(method):
            yield Reply(await method(**call.parameters))
            return
        if not call.more:
            raise Refused("ExpectedMore")
        async for parameters in method(**call.parameters):
            yield Reply(parameters, continues=True)
        yield Reply({})

    def _interface(self, call: Call) -> idl.Interface:
        for interface in (admin.interface(), varlink_interface()):
            if interface.name == call.interface:
                return interface
        raise Refused("InterfaceNotFound", interface=call.interface)

    def _about(self, call: Call) -> dict[str, Any]:
        known: Mapping[str, idl.Interface] = {
            item.name: item for item in (varlink_interface(), admin.interface())
        }
        if call.member == "GetInfo":
            return {
                "vendor": "accelvisor",
                "product": "accelvisord",
                "version": self._version,
                "url": "https://accelvisor.io",
                "interfaces": list(known),
            }
        wanted = call.parameters["interface"]
        if wanted not in known:
            raise Refused("InterfaceNotFound", interface=wanted)
        return {"description": known[wanted].text}


def method_name(member: str) -> str:
    """``CreateFunction`` -> ``create_function``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", member).lower()
