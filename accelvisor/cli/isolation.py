"""``accelctl card``, ``accelctl profiles``, ``accelctl function resize`` and ``revoke``: who has
how much of a card, what would still fit, and changing that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelvisor.cli import render
from accelvisor.cli.commands import LONG_S, Session, attachment
from accelvisor.errors import UsageError


def card_list(session: Session) -> int:
    reply = session.call("ListCards")
    session.show(reply, lambda: _cards(reply["cards"]))
    return 0


def card_show(session: Session) -> int:
    options = session.options
    if options.config_space:
        space = session.call("GetCardConfigSpace", card=options.card)
        session.show(space, lambda: str(space["hexdump"]).rstrip())
        return 0
    reply = session.call("GetCard", card=options.card)
    session.show(reply, lambda: _card(reply["card"]))
    return 0


def card_set(session: Session) -> int:
    options = session.options
    reply = session.call(
        "SetCardFunctions", reply_s=LONG_S, card=options.card, number=options.functions
    )
    session.show(reply, lambda: _card(reply["card"]))
    return 0


def card_chip(session: Session) -> int:
    options = session.options
    mode = {"enable": "enabled", "disable": "disabled"}.get(options.mode, "pass_through")
    reply = session.call("SetChip", card=options.card, chip=options.chip, mode=mode)
    session.show(reply, lambda: _card(reply["card"]))
    return 0


def attach(session: Session) -> int:
    """``accelctl attach VM --card``: a static function of its own for a VM."""
    options = session.options
    if options.domain is not None or options.print:
        raise UsageError(
            "with --card the function is made for the VM, and is not named",
            where="accelctl",
            hint="accelctl attach VM --card CARD",
        )
    given = {
        "domain": options.function,
        "card": options.card,
        "on_exhaustion": options.on_exhaustion,
        "timeout": options.timeout,
        "live": options.live,
        "persistent": options.persistent,
    }
    # One that waits hears of it now and then.
    for reply in session.client.stream("AttachPartition", given, gap_s=LONG_S):
        if options.json:
            print(json.dumps(reply), flush=True)
        elif reply["assigned"] is not None:
            print(_assigned(options.function, reply["assigned"]))
        else:
            print(_underway(reply), file=sys.stderr, flush=True)
    return 0


def profiles(session: Session) -> int:
    reply = session.call("ListProfiles")
    session.show(reply, lambda: _profiles(reply["profiles"]))
    return 0


def plan(session: Session) -> int:
    """``accelctl function create --dry-run``."""
    options = session.options
    reply = session.call("PlanFunction", profile=options.profile, card=options.card)
    session.show(reply, lambda: _planned(reply["plan"], "a function", options.profile, True))
    return 0


def resize(session: Session) -> int:
    options = session.options
    reply = session.call(
        "ResizeFunction",
        reply_s=LONG_S,
        function=options.function,
        cores=options.cores,
        memory_bytes=options.memory,
        dry_run=options.dry_run,
    )
    session.show(reply, lambda: _changed(reply, options.dry_run))
    return 0


def revoke(session: Session) -> int:
    options = session.options
    reply = session.call(
        "RevokeFunction", reply_s=LONG_S, function=options.function, dry_run=options.dry_run
    )
    session.show(reply, lambda: _changed(reply, options.dry_run))
    return 0


# --- how it looks ---------------------------------------------------------------------------------


def _cards(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "CARD": item["name"],
            "MODE": _mode(item),
            "CHIPS": str(item["chips"]),
            "CORES": str(item["cores"]),
            "FREE": str(item["cores_free"]),
            "MEMORY": render.size(item["memory_bytes"]),
            "MEMORY FREE": render.size(item["memory_free"]),
            "FUNCTIONS": f"{len(item['functions'])} of {item['vectors']}",
        }
        for item in items
    ]
    return render.table(rows, "no cards are configured")


def _card(item: Mapping[str, Any]) -> str:
    free = ", ".join(f"chip {chip}: {count}" for chip, count in enumerate(item["free_by_chip"]))
    port = f"{render.size(item['host_port'])}/s" if item["host_port"] else "not limited"
    memory = f"{render.size(item['memory_free'])} of {render.size(item['memory_bytes'])}"
    modes = [
        f"chip {chip}: {mode.replace('_', '-')}"
        for chip, mode in enumerate(item["modes"]) if mode != "enabled"
    ]  # fmt: skip
    pairs = [
        ("card", item["name"]),
        ("mode", _mode(item)),
        ("partitions free", _free(item)),
        ("table", item["table_digest"]),
        ("problem", item["problem"]),
        ("waiting", ", ".join(item["waiting"])),
        ("chips", f"{item['chips']} with {item['cores_per_chip']} cores each{_grid(item)}"),
        ("switched", ", ".join(modes)),
        ("links free", f"{len(item['links_free'])} of {len(item['links'])}{_links(item)}"),
        ("cores free", f"{item['cores_free']} of {item['cores']} ({free})"),
        ("memory free", f"{memory}, in {item['banks']} banks"),
        ("free pieces", "\n".join(map(_range, item["free_ranges"]))),
        ("queues free", f"{item['queues_free']} of {item['queues']}"),
        ("vectors free", f"{item['vectors_free']} of {item['vectors']}"),
        ("host port", port),
    ]
    shown = render.fields(pair for pair in pairs if pair[1])
    tables = [shown, _shares(item["shares"])]
    if item["holders"]:
        tables.append(_holders(item["holders"]))
    return "\n\n".join(tables)


def _grid(item: Mapping[str, Any]) -> str:
    if item["chips"] == item["columns"]:
        return ""
    rows = f"{item['rows']} rows of {item['columns']}"
    return f", in {rows}" if item["boards"] == 1 else f", on {item['boards']} boards with {rows}"


def _links(item: Mapping[str, Any]) -> str:
    """Which are free, by their ends."""
    ends = {link["number"]: f"{link['one']}-{link['other']}" for link in item["links"]}
    free = ", ".join(ends[number] for number in item["links_free"])
    return f" ({free})" if free else ""


def _mode(item: Mapping[str, Any]) -> str:
    return f"static {item['partitions']}" if item["mode"] == "static" else "dynamic"


def _free(item: Mapping[str, Any]) -> str:
    if item["mode"] != "static":
        return ""
    which = render.numbers(item["partitions_free"])
    return f"{which} (of {item['partitions']})" if which else f"none of {item['partitions']}"


def _holders(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "PARTITION": str(item["partition"]),
            "VM": item["domain"] or item["domain_uuid"],
            "FUNCTION": item["function"] or "being made",
        }
        for item in items
    ]
    return render.table(rows, "no VM has a partition")


def _assigned(domain: str, item: Mapping[str, Any]) -> str:
    place = f"partition {item['partition']} of card {item['card']}"
    if item["attachment"] is None:
        return f"VM {domain} runs on host {item['host']}, with function {item['function']}, {place}"
    return f"{attachment(item['attachment'], 'attached to')}, {place}"


def _underway(reply: Mapping[str, Any]) -> str:
    if reply["waiting"] is not None:
        return f"waiting for a static function, number {reply['waiting']} in the queue"
    if reply["progress"] is not None:
        progress = reply["progress"]
        return f"moving: {progress['phase']}, {progress['seconds']:.0f} s"
    report = reply["report"]
    return f"move to host {report['host']}: {report['outcome']}"


def _shares(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "FUNCTION": item["name"],
            "CORES": " ".join(
                f"{place['chip']}:{render.numbers(place['cores'])}" for place in item["cores"]
            ),
            "LINKS": render.numbers(item["links"]) or "-",
            "MEMORY": ", ".join(map(_range, item["ranges"])) or "-",
            "QUEUES": render.numbers(item["queues"]) or "-",
            "VECTOR": str(item["vector"]),
            "POLICY": item["policy"].replace("_", "-"),
            "WEIGHT": str(item["weight"]),
            "HOST CPUS": render.numbers(item["cpus"]) or "shared",
        }
        for item in items
    ]
    return render.table(rows, "no function is on it")


def _range(item: Mapping[str, Any]) -> str:
    return f"bank {item['bank']}: {render.size(item['bytes'])} at {render.size(item['start'])}"


def _profiles(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "PROFILE": item["name"],
            "CORES": str(item["cores"]),
            "CHIPS": str(item["chips"]),
            "LINKS": item["links"] if item["chips"] > 1 else "-",
            "MEMORY": render.size(item["memory_bytes"]),
            "WINDOW": render.size(item["window_bytes"]),
            "QUEUES": str(item["queues"]),
            "POLICY": item["policy"].replace("_", "-"),
            "WEIGHT": str(item["weight"]),
            "FITS": str(item["fits"]),
            "LIMITED BY": ", ".join(item["limited_by"]),
            "WHY NOT ONE MORE": item["limit"],
        }
        for item in items
    ]
    return render.table(rows, "no profiles are configured")


def _changed(reply: Mapping[str, Any], dry_run: bool | None) -> str:
    plan, name = reply["plan"], reply["function"]["name"]
    if plan["same"]:
        return f"{name} has that size already; nothing to do"
    return _planned(plan, name, "", dry_run)


def _planned(plan: Mapping[str, Any], name: str, profile: str, dry_run: bool | None) -> str:
    steps = [
        {
            "STEP": str(number),
            "ACTION": step["action"],
            "WHAT": step["text"],
            "ABOUT": f"{step['estimate_ms']} ms",
        }
        for number, step in enumerate(plan["steps"], 1)
    ]
    moved = "".join(f"\ncore {a} becomes core {b}" for a, b in map(str.split, plan["moves"]))
    size = f"{plan['cores']} cores and {render.size(plan['memory_bytes'])}"
    to = f"of profile {profile}: {size}" if profile else f"to {size}, epoch {plan['epoch']}"
    count = len(plan["quiesce"])
    still = f"{count or 'no'} function{'' if count == 1 else 's'} stand{'s' if count == 1 else ''}"
    still += f" still, about {plan['estimate_ms']} ms in all"
    tail = "nothing was changed (--dry-run)" if dry_run else "done, and read back"
    return f"{plan['verb']} {name} {to}\n\n{render.table(steps, '')}{moved}\n\n{still}; {tail}"
