"""What people type who know other tools, and what a recipe says that comes from another trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cli.main import main

Hpcrl = Callable[..., tuple[int, str]]


@pytest.fixture
def hpcrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return code, "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *[(word, "submit") for word in ("launch", "run", "start", "exec")],
        *[(word, "cancel") for word in ("stop", "kill")],
        *[(word, "ls") for word in ("queue", "list", "ps")],
        *[
            ("describe", "status"),
            ("delete", "rm"),
            ("attach", "status"),
            ("version", "--version"),
            ("sumbit", "submit"),
        ],
    ],
)
def test_commands_of_other_tools(hpcrl: Hpcrl, word: str, meant: str) -> None:
    code, said = hpcrl(word)
    assert (code, f"Did you mean '{meant}'" in said) == (2, True), said


def test_help_is_a_command_too(hpcrl: Hpcrl) -> None:
    code, said = hpcrl("help")
    assert (code, "submit" in said, "devcluster" in said) == (0, True, True)
    code, said = hpcrl("help", "submit")
    assert (code, "Start a run of a recipe" in said) == (0, True)


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hpcrl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hpcrl ")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("algorithm.loss.kind", "grpo", "'grpo' is a value of algorithm.advantage"),
        ("algorithm.loss.kind", "ppo", "did you mean 'ppo_clip'?"),
        ("algorithm.advantage", "gspo", "'gspo' is a value of algorithm.loss.kind"),
        ("algorithm.advantage", "gae", "there is no critic"),
        ("algorithm.loss.kind", "cipso", "did you mean 'cispo'?"),
    ],
)
def test_values_of_other_trainers(hpcrl: Hpcrl, key: str, value: str, hint: str) -> None:
    code, said = hpcrl("recipe", "check", "quickstart", "--set", f"{key}={value}")
    assert (code, hint in said) == (2, True), said


def test_unknown_keys_do_not_hide_rules(hpcrl: Hpcrl, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "extends: quickstart\nname: mine\nwandb: {project: x}\nrollouts: {rollouts_per_step: 60, grop_size: 8}\n"
    )
    code, said = hpcrl("recipe", "check", str(recipe))
    assert code == 2
    assert "wandb: unknown key" in said
    assert "rollouts.grop_size: unknown key" in said
    assert "60 is no multiple of group_size 8 [batch-of-groups]" in said
    # a profile that is wrong as well is said with them
    site = tmp_path / "site.yaml"
    site.write_text("extends: local\nname: site\npaths: {runs_root: CHANGE_ME}\nnowhere: 1\n")
    code, said = hpcrl("recipe", "check", str(recipe), "-c", str(site))
    assert code == 2
    for what in ("wandb", "rollouts.grop_size", "paths.runs_root", "nowhere"):
        assert f": {what}: " in said
    # rules about what a wrong value would have been are not guessed
    recipe.write_text("extends: quickstart\nname: mine\nrollouts: {rollouts_per_step: many, group_size: 7}\n")
    assert "batch-of-groups" not in hpcrl("recipe", "check", str(recipe))[1]
