from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.daemon import config
from accelvisor.daemon.card_config import Size, card_of
from accelvisor.errors import ConfigError
from accelvisor.limits import GIB, LIMITS, MIB

ROOT = Path(__file__).parents[2]


def write(directory: Path, text: str | bytes, name: str = "accelvisor.toml") -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory / "accelvisor.toml"


def refused(directory: Path, text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.load(write(directory, text))
    return caught.value


def test_an_absent_file_works(tmp_path: Path) -> None:
    loaded = config.load(tmp_path / "accelvisor.toml")
    assert list(loaded.cards) == ["card0"]
    small = loaded.profiles["small"]
    assert (small.cores, small.memory, small.window, small.queues) == (1, 64 * MIB, 16 * MIB, 8)
    assert list(loaded.profiles) == ["small", "medium", "large"]


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_builtin_profiles_fit_the_builtin_card(tmp_path: Path) -> None:
    """They pass the rules that a person's profiles must pass."""
    lines = []
    for name, item in config.BUILTIN_PROFILES.items():
        lines.append(f"[profiles.{name}]")
        lines += [f"{key} = {_toml(getattr(item, key))}" for key in item.__struct_fields__]
    assert config.load(write(tmp_path, "\n".join(lines))).profiles == dict(config.BUILTIN_PROFILES)


def test_values_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [host]
        name = "alpha"
        [cards.big]
        chips = 2
        cores_per_chip = 8
        memory = "8GiB"
        [profiles.one]
        cores = 4
        chips = 2
        memory = 1048576
        window = "1MiB"
        queues = 1
        ring_entries = 16
        [daemon]
        supervisor = "subprocess"
        socket_group = "kvm"
        [admin]
        read = ["users", "staff"]
        [libvirt]
        uri = ""
        """,
    )
    loaded = config.load(path)
    assert loaded.host.name == "alpha"
    assert loaded.cards["big"].memory == 8 * GIB
    assert loaded.profiles["one"].memory == MIB
    assert list(loaded.profiles) == ["one"]
    assert loaded.daemon.supervisor == "subprocess"
    assert loaded.admin.read == ("users", "staff")
    assert loaded.libvirt.uri == ""


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("", (1, 1, 4)),
        ("chips = 6", (1, 1, 6)),
        ("chips = 6\nrows = 2", (1, 2, 3)),
        ("rows = 2\ncolumns = 4", (1, 2, 4)),
        ("boards = 2\nrows = 2\ncolumns = 4\nchips = 16", (2, 2, 4)),
        ("boards = 4\ncolumns = 1", (4, 1, 1)),
    ],
)
def test_a_card_is_a_grid(tmp_path: Path, text: str, grid: tuple[int, int, int]) -> None:
    loaded = config.load(write(tmp_path, f"[cards.a]\n{text}\n"))
    card = card_of("a", loaded.cards["a"])
    assert (card.boards, card.rows, card.columns) == grid
    assert card.chips == grid[0] * grid[1] * grid[2]
    assert card.functions == 4 * card.chips


def test_conf_d_wins_key_by_key_in_name_order(tmp_path: Path) -> None:
    path = write(tmp_path, '[cards.a]\nchips = 1\ncores_per_chip = 2\n[host]\nname = "one"\n')
    write(tmp_path, "[cards.a]\nchips = 3\n", "conf.d/20-more.toml")
    write(tmp_path, '[cards.a]\nchips = 2\n[host]\nname = "two"\n', "conf.d/10-some.toml")
    write(tmp_path, "chips = ", "conf.d/ignored.toml.bak")
    loaded = config.load(path)
    assert (loaded.cards["a"].chips, loaded.cards["a"].cores_per_chip) == (3, 2)
    assert loaded.host.name == "two"


@pytest.mark.parametrize(
    ("text", "message", "line", "hint"),
    [
        ('[cards.a]\nmemmory = "1GiB"\n', 'unknown key "memmory" in [cards.a]', 2, '"memory"'),
        ("[demon]\nx = 1\n", 'unknown key "demon"', 1, '"daemon"'),
        ("[daemon]\nzzz = 1\n", 'unknown key "zzz" in [daemon]', 2, "supervisor"),
        ('[cards.a]\n\nchips = "x"\n', "cards.a.chips: expected `int`, got `str`", 3, ""),
        ("[cards.a]\nchips = 0\n", "cards.a.chips: expected `int` >= 1", 2, ""),
        ('[cards.a]\nmemory = "4GB"\n', 'cards.a.memory: "4GB" is not a size', 2, ""),
        ("[cards.a]\nmemory = -1\n", "cards.a.memory: a size cannot be negative", 2, ""),
        ("[cards.a]\nmemory = true\n", "cards.a.memory: expected a size", 2, ""),
        ("[cards.a]\nmemory = 1000000\n", "cards.a.memory: at least 1 MiB", 2, ""),
        ('[daemon]\nsupervisor = "sys"\n', "daemon.supervisor: invalid enum value 'sys'", 2, ""),
        ("cards = 3\n", "cards: expected tables [cards.NAME]", 1, ""),
        ("[cards]\na = 3\n", "cards.a: expected a table", 2, ""),
        ("host = 3\n", "host: expected a table", 1, ""),
        ('[cards."a b"]\n', "cards.a b: a name is", 1, ""),
        ('[admin]\nread = ["a b"]\n', "admin.read: expected a plain name", 2, ""),
        ("[profiles.p]\ncores = 3\nchips = 2\n", "profiles.p.cores: 3 cores do not spread", 2, ""),
        ("[cards.a]\nrows = 3\n", "cards.a.rows: 4 chips do not spread evenly", 2, "columns"),
        ("[cards.a]\nboards = 3\n", "cards.a.boards: 4 chips do not spread evenly", 2, "columns"),
        ("[cards.a]\nchips = 9\nrows = 2\ncolumns = 4\n", "cards.a.chips: 9 chips, but 1 boards", 2,
         "leave chips out"),
        ("[cards.a]\nrows = 64\ncolumns = 64\n", "cards.a.columns: 1 boards with 64 rows", 3, ""),
        ("[cards.a]\ncolumns = 257\n", "cards.a.columns: expected `int` <= 256", 2, ""),
        ("[profiles.p]\ncores = 32\nchips = 32\n", "profiles.p.chips: expected `int` <= 16", 3, ""),
        ('[profiles.p]\nlinks = "all"\n', "profiles.p.links: invalid enum value 'all'", 2, ""),
        ('[profiles.p]\ncores = 3\nchips = 3\nlinks = "ring"\n', "profiles.p: fits on no card", 1,
         "no 3 chips with 1 core free are in a ring"),
        ('[profiles.p]\nmemory = "1MiB"\nwindow = "3MiB"\n', "profiles.p.window: must be", 3, ""),
        ('[profiles.p]\nwindow = "64KiB"\n', "profiles.p.window: must be a power of two", 2, ""),
        ("[profiles.p]\nring_entries = 100\n", "profiles.p.ring_entries: must be", 2, ""),
        ('[profiles.p]\nmemory = "5GiB"\n', "profiles.p: fits on no card", 1, "shrink"),
        ("[profiles.p]\ncores = 5\n", "profiles.p: fits on no card", 1, "shrink"),
    ],
)
def test_wrong_values_say_where_and_what(
    tmp_path: Path, text: str, message: str, line: int, hint: str
) -> None:
    error = refused(tmp_path, text)
    assert error.message.startswith(message)
    assert error.where == f"config:{tmp_path}/accelvisor.toml:{line}"
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("a = \nb", "config-syntax", ":1"),
        (b"\xff\xfe", "config-syntax", ""),
        ("[" * 5000, "config-syntax", ""),
        ("x = " + "[" * 5000, "config-syntax", ""),
        ("#" * (LIMITS.config_bytes + 1), "config-invalid", ""),
    ],
)
def test_what_is_no_toml(tmp_path: Path, text: str | bytes, code: str, where: str) -> None:
    error = refused(tmp_path, text)
    assert error.code == code
    assert re.fullmatch(re.escape(f"config:{tmp_path}/accelvisor.toml") + r"(:\d+)?", error.where)
    assert error.where.endswith(where)


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "accelvisor.toml").mkdir()
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "accelvisor.toml")
    assert caught.value.code == "config-unreadable"


def test_an_error_in_conf_d_names_that_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[host]\n")
    write(tmp_path, "[host]\nnam = 1\n", "conf.d/a.toml")
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert caught.value.where == f"config:{tmp_path}/conf.d/a.toml:2"
    assert caught.value.hint == 'did you mean "name"?'


def test_all_problems_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, "[host]\nx = 1\n[cards.a]\nchips = 0\ny = 1\n[daemon]\nz = 1\n")
    _, problems = config.check(path)
    assert len(problems) == 4
    with pytest.raises(ConfigError, match=r"and 3 more"):
        config.load(path)


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_a_config_error(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("c") / "accelvisor.toml"
    path.write_bytes(data)
    _, problems = config.check(path)
    assert all(problem.where.startswith(f"config:{path}") for problem in problems)


@given(st.integers(0, 1 << 40), st.sampled_from(["", "B", "KiB", "MiB", "GiB"]))
def test_sizes(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert Size.parse(f"{number}{unit}") == Size.parse(f" {number} {unit} ") == number * factor


def test_every_key_is_in_the_man_page() -> None:
    """accelvisor.toml(5) has one ``.B key`` paragraph for each key, in order, and no other."""
    page = (ROOT / "docs/man/accelvisor.toml.5").read_text()
    documented: list[str] = []
    section = ""
    for line in page.splitlines():
        if match := re.match(r"\.SS \[(.+)\]", line):
            section = match[1]
        elif line.startswith(".SH"):
            section = ""
        elif section and (match := re.match(r"\.B ([a-z_]+)$", line)):
            documented.append(f"[{section}] {match[1]}")
    assert documented == config.keys()


def test_the_example_in_the_man_page_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs/man/accelvisor.toml.5").read_text()
    examples = re.findall(r"\.EX\n(.*?)\.EE", page, re.DOTALL)
    assert examples
    for example in examples:
        config.load(write(tmp_path, example.replace("\\-", "-")))
