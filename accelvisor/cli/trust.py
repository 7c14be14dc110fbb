"""``accelctl trust``: whom this host trusts with its functions, and whose it takes."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from typing import Any

from accelvisor.cli import render
from accelvisor.cli.commands import Session
from accelvisor.errors import UsageError
from accelvisor.limits import LIMITS

_WHERE = "accelctl"


def init(session: Session) -> int:
    """The keys are made by the daemon's first start: say what they are, and what comes next."""
    reply = session.call("GetTrust")
    trust = reply["trust"]
    others = sum(host["uuid"] != trust["host"] for host in trust["hosts"])
    steps = [
        "this host has its keys, and trusts " + (f"{others} other hosts" if others else "nobody"),
        "to let two hosts trust each other: accelctl trust invite on one of them,",
        "then accelctl trust join CODE on the other, with the code that the first one printed",
    ]
    session.show(reply, lambda: "\n".join([render.fields(_own(trust)), "", *steps]))
    return 0


def show(session: Session) -> int:
    reply = session.call("GetTrust")
    session.show(reply, lambda: _trust(reply["trust"]))
    return 0


def invite(session: Session) -> int:
    options = session.options
    reply = session.call("InviteHost", address=options.address, again=options.again)
    until = render.moment(reply["expires"])
    session.show(reply, lambda: f"{reply['code']}\n(good for one host, until {until})")
    return 0


def join(session: Session) -> int:
    reply = session.call("JoinHost", code=session.options.code, reply_s=4 * LIMITS.peer_handshake_s)
    host = reply["host"]
    session.show(
        reply, lambda: f"this host and {host['name']} ({host['uuid']}) trust each other now"
    )
    return 0


def remove(session: Session) -> int:
    reply = session.call("RemoveHost", host=session.options.host)
    host = reply["host"]
    session.show(
        reply,
        lambda: f"host {host['name']} is trusted no more\n"
        f"it still trusts this one: accelctl trust remove there ends that",
    )
    return 0


def revoke(session: Session) -> int:
    reply = session.call("RevokeKey", key=session.options.key)
    session.show(reply, lambda: f"key {session.options.key} counts no more")
    return 0


def rotate(session: Session) -> int:
    """1 when some host could not be told."""
    reply = session.call("RotateKeys", reply_s=60.0)

    def words() -> str:
        lines = [f"this host signs with key {reply['key']} now"]
        if reply["told"]:
            lines.append(f"told: {', '.join(reply['told'])}")
        if reply["missed"]:
            lines += [
                f"not reached: {', '.join(reply['missed'])}",
                "those know only the old keys: rotate again when they are there, or join anew",
            ]
        return "\n".join(lines)

    session.show(reply, words)
    return int(bool(reply["missed"]))


def export(session: Session) -> int:
    reply = session.call("ExportTrust")
    path = session.options.file
    data = base64.b64decode(reply["document"])
    if path == "-":
        sys.stdout.buffer.write(data)
        return 0
    try:
        with open(path, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=_WHERE) from error
    session.show(reply, lambda: f"the trust document is in {path}")
    return 0


def import_(session: Session) -> int:
    options = session.options
    try:
        if options.file == "-":
            data = sys.stdin.buffer.read(LIMITS.trust_bytes + 1)
        else:
            with open(options.file, "rb") as stream:
                data = stream.read(LIMITS.trust_bytes + 1)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise UsageError(f"cannot read {options.file}: {reason}", where=_WHERE) from error
    roots = [word for word in options.roots.split(",") if word] if options.roots else None
    document = base64.b64encode(data).decode()
    reply = session.call("ImportTrust", document=document, roots=roots)
    session.show(reply, lambda: _trust(reply["trust"]))
    return 0


def _own(trust: Mapping[str, Any]) -> list[tuple[str, str]]:
    mine = _mine(trust)
    return [
        ("host", f"{mine['name']} ({trust['host']})" if mine else str(trust["host"])),
        ("address", str(mine["address"]) if mine else "-"),
        ("key", str(trust["key"])),
    ]


def _mine(trust: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((host for host in trust["hosts"] if host["uuid"] == trust["host"]), None)


def _trust(trust: Mapping[str, Any]) -> str:
    roots = trust["roots"]
    count = f"{trust['root_threshold']} of {len(roots)} root keys"
    signs = "this host alone" if trust["own_roots"] else count
    text = render.fields(
        [
            *_own(trust),
            ("document", f"version {trust['version']}, signed by {signs}"),
            ("roots", "\n".join(roots)),
            ("signatures", f"{trust['manifest_threshold']} for each checkpoint"),
            ("revoked", "\n".join(trust["revoked"]) or "-"),
        ]
    )
    others = [host for host in trust["hosts"] if host["uuid"] != trust["host"]]
    rows = [
        {
            "HOST": host["name"],
            "ADDRESS": host["address"],
            "KEY": key["id"],
            "STATUS": key["status"]
            + (f" until {render.moment(key['not_after'])}" if key["not_after"] else ""),
            "UUID": host["uuid"],
        }
        for host in others
        for key in host["keys"]
    ]
    table = render.table(rows, "no other host is trusted; accelctl trust invite makes a join code")
    if _mine(trust) is None:
        table += "\nthis host itself is not in the document: no other host takes what it signs"
    return f"{text}\n\n{table}"
