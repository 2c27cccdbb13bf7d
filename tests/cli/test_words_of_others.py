"""What people type who know other tools, and what a recipe says that comes from another trainer."""

from __future__ import annotations

import re
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
    ("command", "refusal"),
    [
        ("site install --role agent --prefix x", "'agent' is not one of 'login', 'env', 'trainer', 'vllm'."),
        ("site bundle --role agent", "'agent' is not one of 'login', 'env', 'trainer', 'vllm'."),
        ("weights prune RUN --keep two", "must be a whole number"),
        ("weights prune RUN --keep 0", "input should be greater than or equal to 1"),
        ("wait RUN --timeout soon", "must be a number"),
        ("weights show RUN five", "'five' is not a version: a whole number, also as v000080"),
    ],
)
def test_wrong_values_of_options_are_refused_in_plain_words(hpcrl: Hpcrl, command: str, refusal: str) -> None:
    code, said = hpcrl(*command.split())
    assert code == 2
    assert re.search(rf"Invalid value for '[^:]*': {re.escape(refusal)} *│", said), said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *[(word, "submit") for word in ("launch", "run", "start", "sbatch", "sumbit")],
        *[(word, "cancel") for word in ("stop", "kill", "scancel", "down")],
        *[(word, "ls") for word in ("queue", "ps", "squeue", "sacct")],
        *[(word, "status --watch") for word in ("attach", "top", "watch")],
        *[(word, "rm") for word in ("delete", "remove")],
        ("describe", "status"),
        ("exec", "shell"),
        ("verify", "recipe check"),
        ("download", "model get"),
        ("version", "--version"),
        ("checkpoint delete", "prune"),
        ("weights rm", "prune"),
        ("recipe validate", "check"),
        ("recipe describe", "show"),
        ("cluster new", "init"),
        ("env validate", "check"),
        ("model pull", "get"),
        ("devcluster create", "up"),
        ("devcluster stop", "down"),
    ],
)
def test_commands_of_other_tools(hpcrl: Hpcrl, word: str, meant: str) -> None:
    code, said = hpcrl(*word.split())
    assert (code, f"Did you mean '{meant}'" in said) == (2, True), said


def test_help_is_a_command_too(hpcrl: Hpcrl) -> None:
    code, said = hpcrl("help")
    assert (code, "submit" in said, "devcluster" in said) == (0, True, True)
    code, said = hpcrl("help", "submit")
    assert (code, "Start a run of a recipe" in said) == (0, True)
    code, said = hpcrl("recipe", "help")
    assert (code, "schema" in said) == (0, True)
    code, said = hpcrl("recipe", "help", "check")
    assert (code, "Check all that `hpcrl submit` checks" in said) == (0, True)


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
    assert "60 is not a multiple of group_size 8 [batch-of-groups]" in said
    # a profile that is wrong as well is said with them
    site = tmp_path / "site.yaml"
    site.write_text("extends: local\nname: site\npaths: {runs_root: CHANGE_ME}\nnowhere: 1\n")
    code, said = hpcrl("recipe", "check", str(recipe), "-c", str(site))
    assert code == 2
    for what in ("wandb", "rollouts.grop_size", "paths.runs_root", "nowhere"):
        assert f": {what}: " in said


def test_wrong_settings_do_not_hide_rules(hpcrl: Hpcrl) -> None:
    """Settings without ``=``, unknown keys, wrong values of any depth, and rules that read none of these."""
    wrong = ["broken", "nosuch.key=1", "trainer.steps=abc", "engine=3", "algorithm.loss.kind=cipso", "name.x=1"]
    rule = ["rollouts.rollouts_per_step=60", "rollouts.group_size=8"]
    code, said = hpcrl("recipe", "check", "quickstart", *(word for each in wrong + rule for word in ("--set", each)))
    assert code == 2
    assert "7 problems" in said
    for what in (
        "broken: has no key",
        "nosuch: unknown key",
        "trainer.steps: must be a whole number",
        "engine: must be",
    ):
        assert what in said
    assert "did you mean 'cispo'?" in said
    assert "60 is not a multiple of group_size 8 [batch-of-groups]" in said


def test_rules_about_a_wrong_value_are_not_guessed(hpcrl: Hpcrl) -> None:
    settings = ["--set", "rollouts.rollouts_per_step=many", "--set", "rollouts.group_size=7"]
    code, said = hpcrl("recipe", "check", "quickstart", *settings)
    assert (code, "1 problem\n" in said, "batch-of-groups" in said) == (2, True, False), said
