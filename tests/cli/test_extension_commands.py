"""Commands and environment kinds of other packages, by the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installed_extensions import install_extensions

import hpcrl as package
from hpcrl.cli.main import main

MODULES = {
    "cli_lab": '''
from typing import Annotated
import typer

tools = typer.Typer(help="Tools of the lab.", no_args_is_help=True)


@tools.command()
def polish(times: int = 1) -> None:
    """Polish it."""
    typer.echo(f"polished {times} times")


@tools.command()
def paint() -> None:
    """Paint it."""


def greet(name: Annotated[str, typer.Argument(help="Of whom.")], loud: bool = False) -> None:
    """Greet somebody
    of the lab."""
    typer.echo(f"hello {name}{'!' if loud else ''}")


def submit() -> None:
    """Never called."""
    typer.echo("not ours")


NUMBER = 3
''',
    "cli_lab_broken": "raise RuntimeError('no licence')\n",
    "cli_lab_kinds": """
from typing import Literal
from pydantic import Field
from hpcrl.config.environments import HostedEnv


class MazeEnv(HostedEnv):
    kind: Literal["maze"]
    size: int = Field(gt=1, description="Fields of a side.")
    doors: int = 2

    def call(self):
        return "cli_lab_maze:Maze", {"size": self.size}

    def variables(self):
        return {"MAZE_HOME": "/nowhere"}


class Sulky(MazeEnv):
    kind: Literal["sulky"]

    def call(self):
        raise LookupError("not today")


class NoEnv:
    pass
""",
    "cli_lab_maze": """
import os
from hpcrl.rollouts.environments import Outcome, Prompt


class Maze:
    name = "maze"

    def __init__(self, size):
        self.size = size

    def prompt(self, split, index):
        text = f"{index % self.size} {os.environ['MAZE_HOME']} {split}"
        return Prompt(split=split, index=index, messages=({"role": "user", "content": text},))

    async def rollout(self, prompt, policy):
        await policy.reply(prompt.messages)
        return Outcome(reward=0.5)

    def demonstration(self, prompt, *, correct, rng):
        raise NotImplementedError
""",
}
POINTS = {
    "command.lab": "cli_lab:tools",
    "command.greet": "cli_lab:greet",
    "command.submit": "cli_lab:submit",
    "command.number": "cli_lab:NUMBER",
    "command.broken": "cli_lab_broken:run",
    "environment.maze": "cli_lab_kinds:MazeEnv",
    "environment.sulky": "cli_lab_kinds:Sulky",
    "environment.none": "cli_lab_kinds:NoEnv",
    "environment.words": "cli_lab_kinds:NoEnv",
}
RECIPE = "extends: quickstart\nname: mine\nenvironments:\n  - {name: m, %s}\n"
Hpcrl = Callable[..., tuple[int, str]]


@pytest.fixture
def hpcrl(tmp_path: Path) -> Hpcrl:
    """Return a function that runs a command with a package of extensions: exit code and output."""
    directory = install_extensions(tmp_path / "installed", MODULES, POINTS)
    path = os.pathsep.join((str(directory), str(Path(package.__file__).parents[1])))
    environ = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "HPCRL_RUNS_ROOT": str(tmp_path / "runs")}

    def call(*arguments: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpcrl", *arguments],
            env={**environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return call


def test_they_run(hpcrl: Hpcrl) -> None:
    assert hpcrl("greet", "Ada", "--loud") == (0, "hello Ada!\n")
    assert hpcrl("lab", "polish", "--times", "3") == (0, "polished 3 times\n")
    code, out = hpcrl("greet", "--help")
    assert (code, "Greet somebody of the lab." in out) == (0, True), out


def test_the_list_of_commands_has_them_in_their_own_group(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("--help")
    assert code == 0
    own, _, theirs = out.partition("Extensions")
    for name, text in {"greet": "Greet somebody of the lab.", "lab": "Tools of the lab."}.items():
        assert any(name in line and text in line for line in theirs.splitlines()), theirs
        assert text not in own
    assert "submit" in own
    assert "Never called" not in out
    # those that cannot be used say why, and take nothing with them
    assert "module 'cli_lab_broken' cannot be imported: RuntimeError: no licence" in " ".join(theirs.split())
    assert "cli_lab:NUMBER is a int" in " ".join(theirs.split())


def test_a_broken_one_ends_nothing_but_itself(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("broken")
    assert (code, "Traceback" in out) == (2, False)
    assert "hpcrl: the command broken cannot be used: module 'cli_lab_broken' cannot be imported: RuntimeError" in out
    assert "cli_lab_broken.py:1" in out
    assert hpcrl("recipe", "list")[0] == 0
    assert hpcrl("--version") == (0, f"hpcrl {package.__version__}\n")


def test_none_replaces_one_of_hpcrl(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("submit", "--help")
    assert (code, "Start a run of a recipe" in out) == (0, True)


def test_words_that_are_none_are_still_explained(hpcrl: Hpcrl) -> None:
    code, out = hpcrl("gret")
    assert (code, "greet" in out) == (2, True), out
    code, out = hpcrl("kill")
    assert (code, "Did you mean 'cancel'" in out) == (2, True), out


@pytest.mark.parametrize(("words", "looks"), [(["recipe", "list"], False), (["--version"], False), (["x"], True)])
def test_no_command_of_hpcrl_looks_for_them(
    words: list[str], looks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("hpcrl.extend.installed_extensions", lambda kind: asked.append(kind) or {})
    monkeypatch.setattr(sys, "argv", ["hpcrl", *words])
    with contextlib.suppress(SystemExit):
        main()
    assert asked == (["command"] if looks else [])


def test_a_kind_is_a_custom_environment_from_then_on(hpcrl: Hpcrl, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE % "kind: maze, size: 7, weight: 2, turn_timeout_s: 9.0")
    code, out = hpcrl("recipe", "show", "mine.yaml")
    assert code == 0, out
    shown = dict(line.split(None, 1) for line in out.splitlines()[1:])
    values = {
        "kind": '"custom"',
        "factory": '"cli_lab_maze:Maze"',
        "args.size": "7",
        "weight": "2.0",
        "turn_timeout_s": "9.0",
        "env.MAZE_HOME": '"/nowhere"',
    }
    assert {name: shown[f"environments.0.{name}"].split()[0] for name in values} == values
    code, out = hpcrl("env", "try", "mine.yaml", "--task", "9")
    assert code == 0, out
    assert "user: 2 /nowhere train" in out


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ("kind: maze", "mine.yaml:4: environments.0.size: field required", "Fields of a side."),
        (
            "kind: maze, size: 1",
            "mine.yaml:4: environments.0.size: input should be greater than 1",
            "Fields of a side.",
        ),
        ("kind: maze, size: 3, door: 1", "environments.0.door: unknown key", "keys here: name, weight"),
        ("kind: maze, size: 3, weight: -1", "environments.0.weight: input should be greater than or equal to 0", ""),
        ("kind: maize, size: 3", "environments.0: kind must be one of words, calculator", "did you mean 'maze'?"),
        ("kind: none", "environments.0: cli_lab_kinds:NoEnv is not an environment kind", "HostedEnv"),
        ("kind: sulky, size: 3", "cli_lab_kinds:Sulky.call raised LookupError: not today", "package.module:Name"),
        ("kind: words, task: spell", "environments.0.task: must be one of 'reverse', 'sort' or 'shift'", ""),
    ],
)
def test_wrong_settings_of_a_kind_are_reported(
    hpcrl: Hpcrl, tmp_path: Path, settings: str, said: str, hint: str
) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE % settings)
    code, out = hpcrl("recipe", "check", "mine.yaml")
    assert (code, said in out, hint in out) == (2, True, True), out
