"""One word for one thing: ``ls`` and ``prune``, and the second names that other tools have for them."""

from __future__ import annotations

import re

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.cli.overview import GROUPS, overview

HPCRL = get_command(app)
assert isinstance(HPCRL, TyperGroup)
COMMANDS = dict.fromkeys(HPCRL.commands, "text")
SECOND_NAMES = {"list": "ls", "gc": "prune"}


@pytest.mark.parametrize("group", ["recipe", "cluster", "devcluster"])
def test_list_is_ls(group: str) -> None:
    shown = [CliRunner().invoke(app, [group, name]) for name in ("list", "ls")]
    assert [result.exit_code for result in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout


def test_second_names_are_accepted_everywhere_and_shown_nowhere() -> None:
    found = set()
    for name, group in {"": HPCRL, **HPCRL.commands}.items():
        if not isinstance(group, TyperGroup):
            continue
        # a command of its own comes first: `hpcrl gc` is for runs
        assert not set(SECOND_NAMES) & set(group.commands) - ({"gc"} if not name else set()), name
        for second, first in SECOND_NAMES.items():
            if first in group.commands:
                found.add(second)
                result = CliRunner().invoke(app, [*([name] if name else []), second, "--help"])
                assert result.exit_code == 0, (name, second)
    assert found == set(SECOND_NAMES)


def test_all_commands_are_in_one_group_and_fit_a_screen() -> None:
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(COMMANDS)
    lines = overview(COMMANDS, 80).splitlines()
    # the prompt is below them
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(re.search(rf"^(.* )?{title}$|^{title} ", text, re.MULTILINE) for title in GROUPS)
    assert all(re.search(rf"(^| ) {name} +[a-zS]", text, re.MULTILINE) for name in COMMANDS)


def test_help_is_the_list_of_commands() -> None:
    shown = CliRunner().invoke(app, ["--help"], prog_name="hpcrl").stdout
    assert [title for title in GROUPS if title in shown] == list(GROUPS)
    assert overview(COMMANDS, 80) == shown.rstrip("\n")
    assert CliRunner().invoke(app, ["help"], prog_name="hpcrl").stdout == shown


def test_a_narrow_terminal_gets_one_column() -> None:
    lines = overview(COMMANDS, 60).splitlines()
    assert all(len(line.split("  ")) <= 3 or line.startswith("  ") for line in lines)
    assert sum(line.startswith("  ") for line in lines) == len(COMMANDS)


def test_commands_of_other_packages_have_a_group_of_their_own() -> None:
    lines = overview({**COMMANDS, "lab": "show the\nlab"}, 80).splitlines()
    assert lines[lines.index("Extensions") + 1] == "  lab        show the lab"
