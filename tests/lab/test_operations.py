"""A function's whole life on an installed host, as its users see it: one VM, all that goes wrong.

The tests of the first half go in this order and share one VM; each says in what state it leaves it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelvisor.lab import Guest, LabHost, Laboratory
from tests.amount import by_night
from tests.lab.user import accelctl, define, seen, selftest, start, state, wait_for_state

NAME = "walk"
DIGITS = Path(__file__).resolve().parents[2] / "fixtures" / "digits" / "digits.npz"
#: Long enough for three disturbances: the device trains some 80 of them in ten seconds here.
EPOCHS = 240


def unit_pid(host: LabHost, unit: str) -> int:
    said = host.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout
    return int(said)


def function_unit(function: dict[str, Any]) -> str:
    return f"accelvisor-function@{function['uuid']}.service"


def launches(host: LabHost) -> int:
    told = accelctl(host, "function", "statistics", NAME)
    return int(told["statistics"]["launches"])


def computes_on(host: LabHost, what: str) -> None:
    """Wait until the function has done more than it had now."""
    before = launches(host)
    host.wait(lambda: launches(host) > before + 5, deadline_s=60, what=f"more work {what}")


def answers(host: LabHost) -> bool:
    return host.run(["accelctl", "host", "show"], check=False, timeout=30).returncode == 0


@pytest.fixture(scope="module")
def function(lab: Laboratory) -> Iterator[dict[str, Any]]:
    """The function of the walk."""
    host = lab.hosts[0]
    made = accelctl(host, "function", "create", "small", "--name", NAME)["function"]
    assert made["state"] == "ready"
    yield made
    host.run(["accelctl", "function", "delete", made["uuid"], "--force"], check=False)


@pytest.fixture(scope="module")
def vm(lab: Laboratory, function: dict[str, Any]) -> Iterator[Guest]:
    """Its VM, running, with a panic device so that libvirt hears of a crash and keeps the VM."""
    host = lab.hosts[0]
    define(host, NAME)
    stored = accelctl(host, "vm", "xml", NAME)["xml"]
    stored = stored.replace("<on_crash>destroy", "<on_crash>preserve")
    stored = stored.replace("</devices>", "<panic model='isa'/></devices>")
    accelctl(host, "vm", "define", "--xml", "-", input=stored)
    accelctl(host, "attach", NAME, NAME)
    assert state(host, NAME) == "attached"
    yield start(host, NAME)
    for verb in ("destroy", "undefine"):
        host.virsh(verb, NAME, check=False)


# --- the walk ------------------------------------------------------------------------------------


def test_a_vm_with_a_function_computes(host: LabHost, vm: Guest) -> None:
    assert state(host, NAME) == "running"
    assert len(seen(vm)) == 1
    selftest(vm)


def test_a_training_is_undisturbed_by_a_killed_worker_restarts_of_the_daemon_and_other_sizes(
    host: LabHost, vm: Guest, function: dict[str, Any]
) -> None:
    vm.push(DIGITS, "/root/digits.npz")
    words = ["train", "/root/digits.npz", "--epochs", str(EPOCHS)]
    idle = launches(host)
    pid = vm.start(["accelguest", *words, "--json"])
    host.wait(lambda: launches(host) > idle + 20, deadline_s=120, what="the training to begin")

    holder = unit_pid(host, function_unit(function))
    workers = host.run(["pgrep", "--parent", str(_zygote(host, holder))]).stdout.split()
    assert len(workers) == 1
    host.run(["kill", "-KILL", *workers])
    computes_on(host, "after the worker was killed")

    grown = accelctl(host, "function", "resize", NAME, "--cores", "3", "--memory", "96MiB")
    assert (grown["function"]["cores"], grown["function"]["memory_bytes"]) == (3, 96 << 20)
    computes_on(host, "with more of the card")

    host.run(["systemctl", "restart", "accelvisor"])
    host.wait(lambda: answers(host), deadline_s=30, what="accelvisord after a restart")
    assert state(host, NAME) == "running"
    computes_on(host, "after accelvisord was restarted")

    daemon = unit_pid(host, "accelvisor")
    host.run(["kill", "-KILL", str(daemon)])
    host.wait(
        lambda: unit_pid(host, "accelvisor") not in (0, daemon) and answers(host),
        deadline_s=30,
        what="accelvisord after it was killed",
    )
    assert state(host, NAME) == "running"
    computes_on(host, "after accelvisord was killed")

    shrunk = accelctl(host, "function", "resize", NAME, "--cores", "1", "--memory", "64MiB")
    assert shrunk["plan"]["scrub_bytes"] == 32 << 20
    assert shrunk["function"]["epoch"] == grown["function"]["epoch"] + 1
    computes_on(host, "with less of it")

    trained = json.loads(vm.finish(pid, timeout=300).stdout)
    assert unit_pid(host, function_unit(function)) == holder, "the same process, adopted twice"
    host.push(DIGITS, "/var/tmp/walk.npz")
    reference = ["python3", "-m", "accelvisor.embedded.reference"]
    said = host.run([*reference, "train", "/var/tmp/walk.npz", *words[2:]], timeout=300)
    wanted = json.loads(said.stdout)
    assert trained["weights_sha256"] == wanted["weights_sha256"]
    assert trained["losses"] == wanted["losses"]


def test_a_guest_that_writes_everywhere_harms_only_itself(host: LabHost, vm: Guest) -> None:
    """Registers and window get anything, for seconds, while a neighbour is tested through and
    through; after a reset the guest's own function is as good as new.
    """
    script = Path(__file__).with_name("hostile.py")
    vm.push(script, "/root/hostile.py")
    neighbour = accelctl(host, "function", "create", "small", "--name", "neighbour")["function"]
    try:
        pid = vm.start(["python3", "/root/hostile.py", *seen(vm), "10"])
        accelctl(host, "function", "selftest", "neighbour")  # says so if one check fails
        assert int(vm.finish(pid, timeout=120).stdout) > 1000
        assert state(host, NAME) == "running"
    finally:
        accelctl(host, "function", "delete", neighbour["uuid"])
    accelctl(host, "function", "reset", NAME)
    selftest(vm)


def test_a_function_is_revoked_under_a_running_vm(host: LabHost, vm: Guest) -> None:
    """It is plugged in, taken away in place, and goes when it is unplugged."""
    before = seen(vm)
    accelctl(host, "function", "create", "small", "--name", "brief")
    accelctl(host, "attach", "brief", NAME, "--live")
    host.wait(lambda: len(seen(vm)) == 2, deadline_s=60, what="the second function in the guest")
    (address,) = set(seen(vm)) - set(before)
    free = accelctl(host, "card", "show", "card0")["card"]["cores_free"]
    plan = accelctl(host, "function", "revoke", "brief", "--dry-run")["plan"]
    assert plan["scrub_bytes"] == 64 << 20
    assert state(host, "brief") == "running"
    assert accelctl(host, "function", "revoke", "brief")["function"]["revoked"]
    assert accelctl(host, "card", "show", "card0")["card"]["cores_free"] == free + 1
    said = vm.run(["accelguest", "selftest", "--device", address, "--json"], check=False)
    assert said.returncode != 0
    assert "device-revoked" in said.stdout + said.stderr
    selftest(vm, "--device", *before)
    accelctl(host, "detach", "brief", NAME, "--live")
    host.wait(
        lambda: "brief" not in {f["name"] for f in accelctl(host, "function", "list")["functions"]},
        deadline_s=30, what="the end of what was revoked",
    )  # fmt: skip


def _zygote(host: LabHost, holder: int) -> int:
    """The holder's child that forks the workers."""
    (child,) = host.run(["pgrep", "--parent", str(holder)]).stdout.split()
    return int(child)


@pytest.mark.parametrize("verb", by_night(["reboot", "reset"], ["reset"]))
def test_a_guest_that_boots_again_finds_its_function(host: LabHost, vm: Guest, verb: str) -> None:
    address = seen(vm)
    before = vm.boot_id
    accelctl(host, "vm", verb, NAME)
    host.wait(
        lambda: vm.ready and vm.boot_id != before, deadline_s=120, what=f"the guest after {verb}"
    )
    assert state(host, NAME) == "running"
    assert seen(vm) == address
    if verb == "reset":  # for both: it takes as long as the boot
        selftest(vm)


def test_a_crashed_guest_keeps_its_function_until_it_is_destroyed(host: LabHost, vm: Guest) -> None:
    vm.run(["modprobe", "pvpanic-mmio"])
    vm.run(["sh", "-c", "(sleep 0.2; echo c > /proc/sysrq-trigger) >/dev/null 2>&1 &"])
    vm.wait_state("crashed")
    assert accelctl(host, "vm", "show", NAME)["domain"]["state"] == "crashed"
    assert state(host, NAME) == "running"
    accelctl(host, "vm", "destroy", NAME)
    wait_for_state(host, NAME, "attached")


def test_after_a_crash_the_vm_starts_again_with_its_function(host: LabHost, vm: Guest) -> None:
    assert len(seen(start(host, NAME))) == 1
    selftest(vm)
    accelctl(host, "vm", "stop", NAME)
    wait_for_state(host, NAME, "attached")


def test_a_detached_function_is_ready_and_leaves_nothing_in_the_definition(
    host: LabHost, vm: Guest
) -> None:
    refused = accelctl(host, "function", "delete", NAME, check=False)
    assert refused["parameters"]["code"] == "function-in-use"
    accelctl(host, "detach", NAME)
    assert state(host, NAME) == "ready"
    assert "accelvisor" not in host.virsh("dumpxml", NAME, "--inactive").stdout.replace(
        "/accelvisor-lab/", ""
    )


def test_a_deleted_function_leaves_nothing_on_the_host(
    host: LabHost, function: dict[str, Any]
) -> None:
    accelctl(host, "function", "delete", NAME)
    refused = accelctl(host, "function", "show", NAME, check=False)
    assert refused["parameters"]["code"] == "function-not-found"
    active = host.run(["systemctl", "is-active", function_unit(function)], check=False)
    assert active.stdout.strip() == "inactive"
    left = host.run(["find", "/run/accelvisor", "-name", f"*{function['uuid']}*"]).stdout
    assert left == ""
    failed = accelctl(host, "events")["events"]
    assert [e for e in failed if e["subject"] == function["uuid"] and "fail" in e["kind"]] == []


# --- the admin socket ----------------------------------------------------------------------------

ADMIN = "/run/accelvisor/admin"


def varlinkctl(host: LabHost, *words: str) -> Any:
    return host.run(["varlinkctl", *words], check=False, timeout=20)


def test_plain_varlinkctl_can_do_all(host: LabHost) -> None:
    about = varlinkctl(host, "info", ADMIN).stdout
    assert "accelvisord" in about
    assert "io.accelvisor.Admin" in about
    # systemd's parser reads the interface, and prints it again.
    told = varlinkctl(host, "introspect", ADMIN, "io.accelvisor.Admin").stdout
    assert "method CreateFunction(" in told

    create = '{"profile": "small", "name": "plain"}'
    made = varlinkctl(host, "call", ADMIN, "io.accelvisor.Admin.CreateFunction", create)
    uuid = json.loads(made.stdout)["function"]["uuid"]
    one = json.dumps({"function": uuid})
    gone = varlinkctl(host, "call", ADMIN, "io.accelvisor.Admin.DeleteFunction", one)
    assert gone.returncode == 0
    refused = varlinkctl(host, "call", ADMIN, "io.accelvisor.Admin.GetFunction", one)
    assert refused.returncode != 0
    assert "io.accelvisor.Admin.NotFound" in refused.stderr
    assert json.loads(refused.stdout)["code"] == "function-not-found"
    wrong = varlinkctl(host, "call", ADMIN, "io.accelvisor.Admin.GetFunction", '{"function": 5}')
    assert "org.varlink.service.InvalidParameter" in wrong.stderr


def test_varlinkctl_follows_events(host: LabHost) -> None:
    steps = ("creating", "created", "deleting", "deleted")
    last = max((e["id"] for e in accelctl(host, "events")["events"]), default=0)
    watch = ["varlinkctl", "call", "--more", "--json=short", ADMIN]
    watch += ["io.accelvisor.Admin.WatchEvents", json.dumps({"after": last})]
    log = "/var/tmp/watch-events.log"
    unit = ["systemd-run", "--quiet", "--collect", "--unit=watch-events"]
    host.run([*unit, f"--property=StandardOutput=truncate:{log}", *watch])
    try:
        host.wait(lambda: _events(host, log) == [None], what="the sign of life")
        accelctl(host, "function", "create", "small", "--name", "watched")
        accelctl(host, "function", "delete", "watched")

        def told() -> bool:
            kinds = [event["kind"] for event in _events(host, log) if event]
            return kinds == [f"function-{step}" for step in steps]

        host.wait(told, what="creation and deletion")
    finally:
        host.run(["systemctl", "stop", "watch-events"], check=False)


def _events(host: LabHost, log: str) -> list[Any]:
    text = host.run(["cat", log], check=False).stdout.replace("\x1e", "")
    return [json.loads(line)["event"] for line in text.splitlines()]


# --- who may do what -----------------------------------------------------------------------------

PEOPLE = {
    "test-stranger": (),
    "test-reader": ("accelvisor",),
    "test-operator": ("accelvisor", "accelvisor-operate"),
    "test-manager": ("accelvisor", "accelvisor-admin"),
}


@pytest.fixture(scope="module")
def people(lab: Laboratory) -> Iterator[None]:
    """One account for each level."""
    host = lab.hosts[0]
    for name, groups in PEOPLE.items():
        more = ["--groups", ",".join(groups)] if groups else []
        host.run(["useradd", "--no-create-home", *more, name])
    yield
    for name in PEOPLE:
        host.run(["userdel", name], check=False)


def as_user(host: LabHost, name: str, *words: str) -> tuple[int, Any]:
    """accelctl's exit code and JSON for that account."""
    command = ["runuser", "-u", name, "--", "accelctl", *words, "--json"]
    said = host.run(command, check=False, timeout=60)
    return said.returncode, json.loads(said.stdout) if said.stdout.strip() else {}


def test_each_group_may_do_its_part_and_no_more(host: LabHost, people: None) -> None:
    assert as_user(host, "test-manager", "function", "create", "small", "--name", "shared")[0] == 0
    try:
        for name, words, allowed in (
            ("test-reader", ("function", "list"), True),
            ("test-reader", ("function", "reset", "shared"), False),
            ("test-reader", ("function", "create", "small"), False),
            ("test-operator", ("function", "list"), True),
            ("test-operator", ("function", "reset", "shared"), True),
            ("test-operator", ("function", "delete", "shared"), False),
            ("test-operator", ("function", "create", "small"), False),
            ("test-manager", ("function", "reset", "shared"), True),
        ):
            code, told = as_user(host, name, *words)
            assert code == (0 if allowed else 4), (name, words, told)
        code, told = as_user(host, "test-stranger", "function", "list")
        assert code == 4
        assert "functions" not in told
    finally:
        assert as_user(host, "test-manager", "function", "delete", "shared")[0] == 0


_TRY = """\
import os, socket, sys
directory, spec = sys.argv[1:]
def attempt(what, call):
    try:
        call()
        print(what, "done")
    except OSError as error:
        print(what, type(error).__name__)
for name in ("vfio.sock", "holder.sock", "control.sock"):
    attempt(name, lambda: socket.socket(socket.AF_UNIX).connect(f"{directory}/{name}"))
attempt("create", lambda: open(f"{directory}/new", "w"))
attempt("unlink", lambda: os.unlink(f"{directory}/vfio.sock"))
attempt("spec", lambda: open(spec))
"""


@pytest.mark.parametrize("name", PEOPLE)
def test_nobody_reaches_a_functions_own_sockets(host: LabHost, people: None, name: str) -> None:
    made = accelctl(host, "function", "create", "small")["function"]
    try:
        where = os.path.dirname(made["socket"])
        spec = f"/run/accelvisor/spec/{made['uuid']}.json"
        command = ["runuser", "-u", name, "--", "python3", "-c", _TRY, where, spec]
        said = host.run(command).stdout.splitlines()
        assert len(said) == 6
        assert [line for line in said if not line.endswith(" PermissionError")] == []
    finally:
        accelctl(host, "function", "delete", made["uuid"])


# --- wrong input, wrong configuration, a full host -----------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("frobnicate", 2, "invalid choice"),
        ("function create", 2, "PROFILE"),
        ("function create gigantic", 1, "gigantic"),
        ("function create small --card card9", 1, "card9"),
        ("vm define x --memory 5", 2, "memory"),
        ("vm define x --memory much", 2, "is not a size"),
        ("vm define x --disk relative.img", 2, "absolute"),
        ("vm define x --disk /x.img,ro", 2, "'ro' is no option of a disk"),
        ("vm stop x --timeout 0", 2, "is not a time"),
        ("vm start nobody", 1, "nobody"),
        ("attach nothing nobody", 1, "nothing"),
        ("--socket /nowhere function list", 2, "usage"),
        ("function list --socket /nowhere", 3, "cannot reach the daemon"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    host: LabHost, words: str, code: int, told: str
) -> None:
    said = host.run(["accelctl", *words.split()], check=False)
    assert (said.returncode, said.stdout) == (code, "")
    assert told in said.stderr
    assert "Traceback" not in said.stderr


EXTRA = "/etc/accelvisor/conf.d/50-test.toml"
#: Its second card has cores for one small function, and too little memory for it.
TWO_CARDS = b"""\
[cards.card0]
[cards.tight]
chips = 1
cores_per_chip = 1
memory = "16MiB"
"""


@pytest.fixture
def configured(host: LabHost) -> Iterator[None]:
    """The configuration may be changed, and is the packaged one afterwards."""
    yield
    host.run(["rm", "-f", EXTRA])
    host.run(["systemctl", "reload", "accelvisor"])


def cards(host: LabHost) -> list[str]:
    return [card["name"] for card in accelctl(host, "card", "list")["cards"]]


def test_a_wrong_configuration_is_told_whole_and_leaves_the_old_one(
    host: LabHost, configured: None
) -> None:
    host.push(b'[daemon]\nsupervisor = "none"\n\n[cards.card0]\nchip = 3\n', EXTRA)
    said = host.run(["accelvisord", "--check-config"], check=False)
    assert said.returncode == 2
    assert f'{EXTRA}:5: unknown key "chip"' in said.stderr
    assert f"{EXTRA}:2: daemon.supervisor" in said.stderr
    daemon = unit_pid(host, "accelvisor")
    host.run(["systemctl", "reload", "accelvisor"])
    told = lambda: "the old configuration stays" in host.journal("accelvisor", 20)  # noqa: E731
    host.wait(told, what="the refusal in the journal")
    assert cards(host) == ["card0"]
    assert unit_pid(host, "accelvisor") == daemon
    assert accelctl(host, "function", "create", "small", "--name", "after")
    accelctl(host, "function", "delete", "after")


def test_a_full_host_refuses_with_a_reason_for_each_card(host: LabHost, configured: None) -> None:
    host.push(TWO_CARDS, EXTRA)
    host.run(["accelvisord", "--check-config"])
    host.run(["systemctl", "reload", "accelvisor"])
    host.wait(lambda: cards(host) == ["card0", "tight"], what="the second card")
    made: list[str] = []
    try:
        refused: dict[str, Any] = {}
        for profile in ("large", "medium", "small"):
            while len(made) < 32:
                told = accelctl(host, "function", "create", profile, check=False)
                if "error" in told:
                    refused = told["parameters"]
                    break
                made.append(told["function"]["uuid"])
        assert refused["code"] == "no-room"
        assert "card0: 0 of 4 chips have 1 core free, 1 wanted" in refused["message"]
        assert "tight: " in refused["message"]
        assert "memory" in refused["message"] or "MiB" in refused["message"]
        assert "accelctl profiles" in refused["hint"]
        fits = {item["name"]: item["fits"] for item in accelctl(host, "profiles")["profiles"]}
        assert set(fits.values()) == {0}
    finally:
        for uuid in made:
            accelctl(host, "function", "delete", uuid, check=False)


# --- host CPUs -----------------------------------------------------------------------------------

SURE = """[profiles.small]
[profiles.sure]
policy = "guaranteed"
[profiles.least]
policy = "best-effort"
"""


def test_units_follow_the_policies_of_their_functions(host: LabHost) -> None:
    """A guaranteed function takes a CPU from the others, and gives it back."""

    def unit(name: str) -> dict[str, str]:
        uuid = accelctl(host, "function", "show", name)["function"]["uuid"]
        words = ["systemctl", "show", "--property=AllowedCPUs,CPUWeight"]
        said = host.run([*words, f"accelvisor-function@{uuid}.service"]).stdout
        return dict(line.split("=", 1) for line in said.splitlines())

    ended: list[dict[str, Any]] = []
    host.push(SURE.encode(), "/etc/accelvisor/conf.d/90-policies.toml")
    host.run(["systemctl", "reload", "accelvisor"])
    try:
        for profile, name in (("small", "usual"), ("sure", "sure")):
            ended.append(
                accelctl(host, "function", "create", profile, "--name", name)["function"]
            )
        assert ended[1]["policy"] == "guaranteed"
        shares = accelctl(host, "card", "show", "card0")["card"]["shares"]
        (cpu,) = next(share["cpus"] for share in shares if share["name"] == "sure")
        assert unit("sure")["AllowedCPUs"] == str(cpu)
        assert unit("usual")["AllowedCPUs"] == str(1 - cpu)
        refused = accelctl(host, "function", "create", "sure", check=False)
        assert refused["parameters"]["code"] == "no-room"
        assert "CPUs" in refused["parameters"]["message"]
        accelctl(host, "function", "delete", "sure")
        assert unit("usual")["AllowedCPUs"] == "0-1"
        made = accelctl(host, "function", "create", "least", "--name", "least")
        ended.append(made["function"])
        assert unit("least")["CPUWeight"] in ("idle", "0")
    finally:
        for name in ("usual", "sure", "least"):
            host.run(["accelctl", "function", "delete", name], check=False)
        units = host.run(["ls", "/run/systemd/system.control"], check=False).stdout
        assert not [made["uuid"] for made in ended if made["uuid"] in units], "of ended units"
        host.run(["rm", "/etc/accelvisor/conf.d/90-policies.toml"])
        host.run(["systemctl", "reload", "accelvisor"])
