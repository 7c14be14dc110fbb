"""Words for people about migrations: plans, reports, the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accelvisor.cli.render import duration, fields, moment, size, table


def plan(item: Mapping[str, Any]) -> str:
    """A dry run: what stands against it with what to do, then what it would take."""
    who = f"VM {item['domain'] or '?'} to host {item['host']}"
    head = f"{who}: {'possible' if item['possible'] else 'not possible'}"
    parts = [head]
    if item["uri"]:
        parts.append(f"by {item['uri']}")
    if item["reasons"]:
        parts += ["", reasons(item["reasons"])]
    if item["prediction"]:
        parts += ["", prediction(item["prediction"])]
    return "\n".join(parts)


def reasons(items: Sequence[Mapping[str, Any]]) -> str:
    """One finding a line, what to do below it."""
    width = max(len(item["code"]) for item in items)
    lines = []
    for item in items:
        lines.append(f"{item['severity']:<8} {item['code']:<{width}}  {item['message']}")
        if item["fix"]:
            lines.append(f"{'':<8} {'':<{width}}  -> {item['fix']}")
    return "\n".join(lines)


def prediction(item: Mapping[str, Any]) -> str:
    known = "measured" if item["rate_measured"] else "assumed"
    rounds = f"{item['rounds']} round{'' if item['rounds'] == 1 else 's'}"
    slowed = f", functions slowed to {item['throttle']} %" if item["throttle"] < 100 else ""
    return fields(
        [
            (
                "predicted downtime",
                f"{duration(item['downtime'])}\n"
                f"{size(item['stop_bytes'])} are sent while the VM stands still{slowed}",
            ),
            (
                "functions in all",
                f"{size(item['total_bytes'])} in {rounds}, about {duration(item['total'])}",
            ),
            ("from: state", size(item["state_bytes"])),
            ("from: network", f"{size(int(item['rate']))}/s, {known}"),
            (
                "from: changes",
                f"{size(int(item['dirty_rate']))}/s, {size(item['working_set_bytes'])} at most",
            ),
            ("from: switch-over", duration(item["fixed"])),
        ]
    )


def report(item: Mapping[str, Any]) -> str:
    """How it ended; numbers of the steps that were reached."""
    if item["outcome"] != "moved":
        return f"VM {item['domain']} stays on this host ({item['outcome']})"
    head = f"VM {item['domain']} runs on host {item['host']}, after {duration(item['seconds'])}"
    pairs = list(numbers(item["numbers"]))
    return f"{head}\n{fields(pairs)}" if pairs else head


def numbers(item: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Of one move, as far as they are known."""
    if item["downtime"] is not None:
        yield "downtime", duration(item["downtime"])
    if item["blackout"] is not None:
        yield "blackout", f"{duration(item['blackout'])} until its functions computed again"
    steps = [
        f"{name} {duration(item[name])}"
        for name in ("freeze", "ship", "verify", "load")
        if item[name] is not None
    ]
    if steps:
        yield "of that", ", ".join(steps)
    if item["sent_bytes"]:
        slowed = f", slowed to {item['throttle']} %" if item["throttle"] < 100 else ""
        yield "sent", (
            f"{size(item['sent_bytes'])} in {item['rounds']} rounds,"
            f" {size(item['last_round_bytes'])} in the last{slowed}"
        )


def stay(item: Mapping[str, Any]) -> str:
    """What a drain leaves here."""
    kind = "VM" if item["what"] == "vm" else "function"
    text = f"{kind} {item['name']} stays: {item['reason']}"
    return f"{text}\n  -> {item['fix']}" if item["fix"] else text


def migrations(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "MIGRATION": item["id"][:12],
            "VM": item["domain"] or item["domain_uuid"],
            "WAY": _way(item),
            "STATE": item["outcome"] or item["state"],
            "BEGUN": moment(item["begun"]),
            "DOWNTIME": _known(item["numbers"]["downtime"]),
        }
        for item in items
    ]
    return table(rows, "no migrations yet")


def migration(item: Mapping[str, Any]) -> str:
    ended = "" if item["over"] else " (in progress)"
    pairs = [
        ("migration", item["id"]),
        ("vm", f"{item['domain'] or '-'} ({item['domain_uuid']})"),
        ("way", f"{_way(item)} ({item['host_uuid']})"),
        ("state", f"{item['state']}{ended}"),
        ("functions", "\n".join(item["functions"]) or "-"),
        ("begun", moment(item["begun"])),
        ("changed", moment(item["changed"])),
    ]
    if item["reason"]:
        pairs.insert(4, ("reason", item["reason"]))
    return fields([*pairs, *numbers(item["numbers"])])


def _way(item: Mapping[str, Any]) -> str:
    host = item["host"] or item["host_uuid"][:8]
    return f"to {host}" if item["role"] == "source" else f"from {host}"


def _known(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
