"""accelctl(1) and accelvisord(8) against the parsers: nothing missing, nothing invented."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelvisor.cli import parser
from accelvisor.cli.commands import COMMANDS
from accelvisor.daemon.main import parser as daemon_parser

MAN = Path(__file__).parents[2] / "docs/man"
COMMON = {"-h", "--help", "--json", "--socket"}


def leaves(
    found: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    subparsers = [
        action for action in found._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not subparsers:
        yield words, found
    for action in subparsers:
        for name, inner in action.choices.items():
            yield from leaves(inner, (*words, name))


def options(found: argparse.ArgumentParser) -> set[str]:
    return {text for action in found._actions for text in action.option_strings}


def documented() -> dict[tuple[str, ...], set[str]]:
    """Commands of accelctl(1), each with the options that are described below it."""
    commands: dict[tuple[str, ...], set[str]] = {}
    current: set[str] = set()
    section = ""
    for line in (MAN / "accelctl.1").read_text().replace("\\-", "-").splitlines():
        if line.startswith(".SH"):
            section = line[4:]
        if section != "COMMANDS":
            continue
        if match := re.match(r'\.BI? "?accelctl ([a-z ]+[a-z])', line):
            current = commands[tuple(match[1].split())] = set()
        elif match := re.match(r"\.BI?R? (-.*)", line):
            current.update(re.findall(r"(?<!\S)-{1,2}[a-z-]+", match[1].replace('"', " ")))
    return commands


def test_every_command_and_option_is_in_the_man_page() -> None:
    built = {words: options(leaf) - COMMON for words, leaf in leaves(parser.build())}
    assert documented() == built


def test_every_command_does_something() -> None:
    chosen = {
        (words[0], words[1] if len(words) > 1 else None) for words, _ in leaves(parser.build())
    }
    assert chosen == set(COMMANDS)


def test_a_known_first_word_changes_nothing_but_the_time() -> None:
    """Its own commands are all there, and the help still names the others."""
    whole = parser.build()
    for words, leaf in leaves(whole):
        partial = parser.build(words[0])
        same = dict(leaves(partial))[words]
        assert options(same) == options(leaf)
    assert parser.build("vm").format_help() == whole.format_help()
    assert parser.build("--help").format_help() == whole.format_help()


def test_every_command_has_help_and_the_common_options() -> None:
    for words, leaf in leaves(parser.build()):
        assert options(leaf) >= COMMON, words
        assert leaf.description


def test_the_daemons_options_are_in_its_man_page() -> None:
    text = (MAN / "accelvisord.8").read_text().replace("\\-", "-")
    section = text.split(".SH OPTIONS")[1].split(".SH")[0]
    described = set(re.findall(r"^\.BI? (--[a-z-]+)", section, re.MULTILINE))
    assert described == options(daemon_parser()) - COMMON


@pytest.mark.parametrize("variable", ["RUN_DIR", "STATE_DIR", "CONFIG"])
def test_environment_variables_are_documented(variable: str) -> None:
    assert f"ACCELVISOR_{variable}" in (MAN / "accelvisord.8").read_text()


@pytest.mark.parametrize(
    ("text", "value"), [("512MiB", 512 << 20), ("2gib", 2 << 30), ("4096", 4096), ("1 KiB", 1024)]
)
def test_sizes(text: str, value: int) -> None:
    assert parser.size(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1TB", "1.5GiB", "MiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parser.size(text)


@pytest.mark.parametrize("text", ["0", "-1", "601", "nan", "x", "inf"])
def test_what_is_no_deadline(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parser.seconds(text)
