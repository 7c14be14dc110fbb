"""Tables and words for people. Plain text: it looks the same in a terminal, a pipe and a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_RIGHT = (
    "CORES",
    "CHIPS",
    "FREE",
    "MEMORY",
    "MEMORY FREE",
    "WINDOW",
    "QUEUES",
    "FITS",
    "VCPUS",
    "ID",
)


def size(count: int) -> str:
    """Bytes in the largest unit that leaves a short number."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            text = f"{count / factor:.1f}".removesuffix(".0")
            return f"{text} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    """A length of time with two or three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def moment(seconds: float) -> str:
    """Seconds since 1970 as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(rows: Sequence[Mapping[str, str]], empty: str) -> str:
    """Columns under capital heads; numbers to the right; ``empty`` is said when there is no row."""
    if not rows:
        return empty
    heads = list(rows[0])
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}

    def line(cells: Mapping[str, str]) -> str:
        return "  ".join(
            cells[head].rjust(widths[head]) if head in _RIGHT else cells[head].ljust(widths[head])
            for head in heads
        ).rstrip()

    return "\n".join([line({head: head for head in heads}), *map(line, rows)])


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """One object: names to the left, values aligned, further lines of a value below its first."""
    shown = list(pairs)
    width = max(len(name) for name, _ in shown) + 2
    lines = (
        f"{name + ':' if number == 0 else '':<{width}}{line}".rstrip()
        for name, value in shown
        for number, line in enumerate(value.split("\n"))
    )
    return "\n".join(lines)


def named(function: Mapping[str, Any]) -> str:
    """A function's own name, or a dash when it has none but its UUID."""
    return "-" if function["name"] == function["uuid"] else str(function["name"])


def state(function: Mapping[str, Any]) -> str:
    """What it is in, and what lies over that."""
    over = "revoked" if function["revoked"] else "quarantined" if function["quarantine"] else ""
    return f"{function['state']} ({over})" if over else str(function["state"])


def functions(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "NAME": named(item),
            "UUID": item["uuid"],
            "PROFILE": item["profile"],
            "CARD": item["card"] or "-",
            "CORES": str(item["cores"]),
            "MEMORY": size(item["memory_bytes"]),
            "STATE": state(item),
            "VM": item["domain"] or "-",
        }
        for item in items
    ]
    return table(rows, "no functions; accelctl function create PROFILE makes one")


def function(item: Mapping[str, Any]) -> str:
    places = "; ".join(
        f"chip {place['chip']}: {numbers(place['cores'])}" for place in item["placement"]
    )
    pairs = [
        ("name", named(item)),
        ("uuid", item["uuid"]),
        ("state", state(item)),
        ("profile", item["profile"]),
        ("card", item["card"]),
        ("cores", f"{item['cores']} ({places})"),
        ("links", numbers(item["links"]) or "-"),
        ("memory", size(item["memory_bytes"])),
        ("epoch", str(item["epoch"])),
        ("policy", f"{item['policy'].replace('_', '-')}, weight {item['weight']}"),
        ("window", f"{size(item['window_bytes'])}, {item['queues']} queues"),
        ("vm", item["domain"] or "-"),
        ("vm socket", item["domain_socket"] or "-"),
        ("socket", item["socket"]),
        ("created", moment(item["created"])),
    ]
    reason = item["reason"] or item["quarantine"]
    if reason:
        pairs.insert(3, ("reason", reason))
    return fields(pairs)


def host(item: Mapping[str, Any]) -> str:
    huge = "none"
    if item["huge_pages"]:
        huge = f"{size(item['huge_pages_free'])} of {size(item['huge_pages'])} free"
    shared = f"{numbers(item['shared_cpus'])} of them shared"
    return fields(
        [
            ("host", item["name"]),
            ("uuid", item["uuid"]),
            ("accelvisord", f"{item['version']}, since {moment(item['started'])}"),
            ("abi", item["abi_version"]),
            ("kernel", item["kernel"]),
            ("machine", f"{item['cpus']} CPUs, {size(item['memory_bytes'])}"),
            ("memory", f"{size(item['memory_available'])} available, huge pages: {huge}"),
            ("for functions", f"CPUs {numbers(item['function_cpus'])}, {shared}"),
            ("hypervisor", item["hypervisor"] or "not reachable"),
            ("supervisor", item["supervisor"]),
            ("cards", str(item["cards"])),
            ("functions", str(item["functions"])),
            ("spare processes", str(item["spares"])),
        ]
    )


def domains(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "NAME": item["name"],
            "STATE": item["state"],
            "VCPUS": str(item["vcpus"]),
            "MEMORY": size(item["memory_bytes"]),
            "FUNCTIONS": str(len({*item["live_functions"], *item["persistent_functions"]})),
            "UUID": item["uuid"],
        }
        for item in items
    ]
    return table(rows, "no VMs; accelctl vm define makes one")


def domain(item: Mapping[str, Any]) -> str:
    return fields(
        [
            ("name", item["name"]),
            ("uuid", item["uuid"]),
            ("state", item["state"]),
            ("persistent", "yes" if item["persistent"] else "no"),
            ("vcpus", str(item["vcpus"])),
            ("memory", size(item["memory_bytes"])),
            ("live functions", ", ".join(item["live_functions"]) or "-"),
            ("stored functions", ", ".join(item["persistent_functions"]) or "-"),
        ]
    )


def event(item: Mapping[str, Any]) -> str:
    return f"{item['id']:>6}  {moment(item['time'])}  {item['kind']:<20}  {item['message']}"


def checks(items: Sequence[Mapping[str, Any]]) -> str:
    """One finding a line, its hint below."""
    width = max(len(item["name"]) for item in items)
    lines = []
    for item in items:
        lines.append(f"{item['severity']:<8} {item['name']:<{width}}  {item['found']}")
        if item["hint"] and item["severity"] != "ok":
            lines.append(f"{'':<8} {'':<{width}}  -> {item['hint']}")
    return "\n".join(lines)


def tree(value: object, indent: str = "") -> str:
    """Any JSON object, one member a line."""
    if not isinstance(value, dict):
        return f"{indent}{value}"
    lines = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            lines += [f"{indent}{name}:", tree(inner, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {_value(inner)}")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def numbers(values: Sequence[int]) -> str:
    """Ascending numbers, runs as ranges."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
