"""What is missing on this host beside its hypervisor: facts are gathered in one function, judged in
others. QEMU, KVM and libvirt are judged by :mod:`accelvisor.hypervisor.capabilities`.

A *problem* keeps something from working, a *warning* makes it worse, *ok* is said too, so that a
reader sees what was looked at.
"""

from __future__ import annotations

import grp
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelvisor.daemon.lifecycle import State
from accelvisor.daemon.reconcile import View
from accelvisor.daemon.store import Function
from accelvisor.errors import AccelvisorError
from accelvisor.limits import MIB

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    severity: str
    found: str
    hint: str = ""

    def to_dict(self) -> dict[str, str]:
        return {
            "name": self.name,
            "severity": self.severity,
            "found": self.found,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen. None means: not there."""

    systemd: int | None  # version, when it is pid 1
    supervisor: str
    unit: str  # the system service that the daemon itself is, or empty
    controllers: Sequence[str]  # of cgroup v2
    huge_free_bytes: int
    memory_available_bytes: int
    admin_mode: int | None
    admin_group: str
    socket_group: str  # the configured one, or empty
    socket_group_missing: str  # the configured group, when the host has none of that name


def gather(
    *,
    admin_socket: Path,
    supervisor: str,
    socket_group: str,
) -> Facts:
    """Look at the machine. Blocks for some milliseconds: use a thread."""
    mode, group = _socket(admin_socket)
    meminfo = _meminfo()
    return Facts(
        systemd=_systemd(),
        supervisor=supervisor,
        unit=_unit(_read("/proc/self/cgroup")),
        controllers=_read("/sys/fs/cgroup/cgroup.controllers").split(),
        huge_free_bytes=meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0) * 1024,
        memory_available_bytes=meminfo.get("MemAvailable", 0) * 1024,
        admin_mode=mode,
        admin_group=group,
        socket_group=socket_group,
        socket_group_missing="" if not socket_group or _has_group(socket_group) else socket_group,
    )


def memory() -> dict[str, int]:
    """Bytes of the host's memory, as ``GetHost`` tells them."""
    meminfo = _meminfo()
    page = meminfo.get("Hugepagesize", 0) * 1024
    return {
        "memory_bytes": meminfo.get("MemTotal", 0) * 1024,
        "memory_available": meminfo.get("MemAvailable", 0) * 1024,
        "huge_pages": meminfo.get("HugePages_Total", 0) * page,
        "huge_pages_free": meminfo.get("HugePages_Free", 0) * page,
    }


def judge(facts: Facts, functions: Sequence[Function]) -> list[Check]:
    """The findings, in a fixed order."""
    return [
        _judge_systemd(facts),
        _judge_cgroups(facts),
        _judge_memory(facts, functions),
        _judge_huge_pages(facts),
        _judge_admin(facts),
        _judge_group(facts),
        _judge_functions(functions),
    ]


def _judge_systemd(facts: Facts) -> Check:
    if facts.systemd is None:
        hint = "functions run as plain processes, without the units' sandbox"
        return Check("systemd", WARNING, f"not pid 1; supervisor {facts.supervisor}", hint)
    if facts.supervisor != "systemd" and facts.unit:
        hint = 'they end with it, and have its rights: set [daemon] supervisor = "systemd"'
        return Check("systemd", PROBLEM, f"functions run inside {facts.unit}", hint)
    if facts.supervisor != "systemd":
        hint = 'set [daemon] supervisor = "systemd" to sandbox the functions'
        return Check("systemd", WARNING, f"supervisor {facts.supervisor}", hint)
    return Check("systemd", OK, f"systemd {facts.systemd} supervises the functions")


def _judge_cgroups(facts: Facts) -> Check:
    missing = sorted({"cpu", "memory"} - set(facts.controllers))
    if not missing:
        return Check("cgroups", OK, "version 2 with cpu and memory")
    hint = "the units' CPU and memory limits have no effect"
    return Check("cgroups", WARNING, f"no {' and '.join(missing)} controller (version 2)", hint)


def _judge_memory(facts: Facts, functions: Sequence[Function]) -> Check:
    promised = sum(item.memory_bytes + item.window_bytes for item in functions)
    found = (
        f"{facts.memory_available_bytes // MIB} MiB available,"
        f" {promised // MIB} MiB promised to functions"
    )
    if promised > facts.memory_available_bytes:
        hint = "functions take memory as they use it: delete some, or add memory"
        return Check("memory", WARNING, found, hint)
    return Check("memory", OK, found)


def _judge_huge_pages(facts: Facts) -> Check:
    if facts.huge_free_bytes:
        return Check("huge-pages", OK, f"{facts.huge_free_bytes // MIB} MiB free")
    return Check("huge-pages", OK, "none reserved; normal pages are used")


def _judge_admin(facts: Facts) -> Check:
    if facts.admin_mode is None:
        return Check("admin-socket", PROBLEM, "not there", "systemctl restart accelvisor.socket")
    found = f"mode {stat.S_IMODE(facts.admin_mode):04o}, group {facts.admin_group}"
    if not facts.admin_mode & stat.S_IWOTH:
        found += "; others cannot connect, whatever their level"
    return Check("admin-socket", OK, found)


def _judge_group(facts: Facts) -> Check:
    if facts.socket_group_missing:
        return Check(
            "socket-group",
            PROBLEM,
            f'no group "{facts.socket_group_missing}": QEMU cannot reach its functions',
            "set [daemon] socket_group to the group that QEMU runs in",
        )
    if not facts.socket_group and facts.supervisor == "systemd":
        return Check(
            "socket-group",
            PROBLEM,
            "none: QEMU cannot reach its functions, which run in another group",
            "set [daemon] socket_group to the group that QEMU runs in (libvirt-qemu on Debian)",
        )
    return Check("socket-group", OK, "as configured")


def _judge_functions(functions: Sequence[Function]) -> Check:
    failed = [item.name for item in functions if item.state is State.FAILED]
    if failed:
        hint = "accelctl function show NAME says why, accelctl function reset NAME starts it anew"
        return Check("functions", PROBLEM, f"failed: {', '.join(failed)}", hint)
    return Check("functions", OK, f"{len(functions)}, none failed")


def judge_confinement(facts: Facts, told: Mapping[str, Mapping[str, object]]) -> Check:
    """What does not hold back a function that its guest took over.

    Args:
        told: function's name -> the measures in its ``status``; those that did not say are absent.
    """
    missing: list[str] = []
    hints: list[str] = []
    if facts.systemd is None or facts.supervisor != "systemd":
        missing.append("no ceiling on memory, processors and threads")
        missing.append("no network, mounts and devices of their own")
        hints.append('a host with systemd, and [daemon] supervisor = "systemd"')
    else:
        for controller, what in _CEILINGS:
            if controller not in facts.controllers:
                missing.append(f"no ceiling on {what}")
                hints.append(f"the {controller} controller of cgroup v2")
    for measure, (without, hint) in _MEASURES.items():
        names = [name for name, measures in told.items() if not measures.get(measure, False)]
        if names:
            missing.append(f"{without} ({', '.join(sorted(names))})")
            hints.append(hint)
    if missing:
        return Check("confinement", WARNING, "; ".join(missing), "needs " + ", ".join(hints))
    return Check("confinement", OK, f"every measure, in each of {len(told)} functions that say")


#: Controller of cgroup v2 -> what has no ceiling without it.
_CEILINGS = (("memory", "memory"), ("cpu", "processors"), ("pids", "threads"))
#: Measure of a worker -> what it may do without it, and what it needs.
_MEASURES = {
    "system_calls": ("all system calls of their user", "libseccomp (python3-seccomp)"),
    "landlock": ("all files of their user", "a kernel with Landlock switched on (lsm=)"),
    "no_new_privileges": ("privileges of programs", "a newer kernel"),
    "no_capabilities": ("capabilities", "a newer kernel"),
    "concealed": ("each other's memory", "prctl(2) in the functions"),
    "no_core_dump": ("core dumps of guests' memory", "setrlimit(2) in the functions"),
    "descriptor_limit": ("descriptors without a limit", "setrlimit(2) in the functions"),
    "resource_limits": ("locked memory and realtime", "setrlimit(2) in the functions"),
}


def judge_tables(tables: Mapping[str, AccelvisorError | None]) -> list[Check]:
    """The partition tables of the cards that are cut once, and what is wrong with each."""
    wrong = [error for error in tables.values() if error is not None]
    if wrong:
        found = "; ".join(error.message for error in wrong)
        return [Check("partitions", PROBLEM, found, wrong[0].hint)]
    if not tables:
        return []
    return [Check("partitions", OK, f"as signed: {', '.join(tables)}")]


def judge_view(view: View, functions: Sequence[Function]) -> list[Check]:
    """What libvirt says and the daemon does not follow."""
    names = {item.uuid: item.name for item in functions}
    claims = [
        f"{item.domain} names {names.get(item.function, item.function)}" for item in view.claims
    ]
    found = [Check("claims", OK, "no domain names another's function")]
    if claims:
        hint = "accelctl function show says whose it is; take it out of the other definition"
        found = [Check("claims", PROBLEM, "; ".join(claims), hint)]
    if view.unreadable:
        hint = "virsh dumpxml shows it; its functions are left as they are"
        words = f"cannot tell which functions these have: {', '.join(view.unreadable)}"
        found.append(Check("domains", WARNING, words, hint))
    return found


# --- looking ------------------------------------------------------------------------------


def _systemd() -> int | None:
    if not Path("/run/systemd/system").is_dir():
        return None
    try:
        out = subprocess.run(
            ["systemctl", "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(r"systemd (\d+)", out)
    return int(match[1]) if match else None


def _unit(cgroups: str) -> str:
    """The system service of a process, from its ``/proc/PID/cgroup``: version 2, or systemd's own
    hierarchy of version 1."""
    for line in cgroups.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (number == "0" or controllers == "name=systemd") and path.startswith("/system.slice/"):
            return next((part for part in path.split("/") if part.endswith(".service")), "")
    return ""


def _socket(path: Path) -> tuple[int | None, str]:
    try:
        status = path.stat()
        return status.st_mode, path.group()
    except FileNotFoundError:
        return None, ""
    except KeyError:
        return status.st_mode, str(status.st_gid)


def _meminfo() -> dict[str, int]:
    rows = (line.split(":") for line in _read("/proc/meminfo").splitlines() if ":" in line)
    return {name: int(value.split()[0]) for name, value in rows}


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
