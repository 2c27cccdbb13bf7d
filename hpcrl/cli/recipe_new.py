"""``hpcrl recipe new``: a first recipe from six answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.completion import complete_clusters
from hpcrl.cli.configuration import recipe_app
from hpcrl.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrl.errors import Finding
    from hpcrl.submit.prepare import PreparedRun

_SITE = ("cluster.", "job", "model.path")
"""Beginnings of keys of problems that another machine, or a download, solves: they do not make a recipe wrong."""
_TRIED = "environments"
"""Beginning of keys of problems that make a recipe wrong, of those that only programs of roles find."""


def register(app: typer.Typer) -> None:
    """Add the command to the group of recipes."""
    recipe_app.command("new")(recipe_new)


def recipe_new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; its stem is the name of the recipe.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Directory, OWNER/NAME of a published model, or tiny."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="words, calculator, a file of questions, MODULE:NAME of an environment, or gym:TASK.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            metavar="NAME",
            help="Cluster profile: a name or a file.",
            autocompletion=complete_clusters,
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", min=0, help="Nodes on Slurm, else GPUs of this machine.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps.")] = None,
    goal: Annotated[str | None, typer.Option("--goal", metavar="GOAL", help="try, train or compare.")] = None,
) -> None:
    """Write a first recipe. It asks for what the options do not say: model, task, cluster, size, length, goal.

    The file is written when all answers are there and no rule refuses the recipe; Ctrl-C before leaves nothing.
    """
    from hpcrl.config.load import load_cluster
    from hpcrl.errors import ConfigError, UsageError
    from hpcrl.jobplan.recipe_draft import GOALS, TASKS, TINY, RecipeAnswers, draft_recipe
    from hpcrl.runs.registry import check_name

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file} is not a name of a recipe file\n    hint: {file.with_suffix('.yaml')}")
    if file.exists():
        raise UsageError(f"{file} exists; nothing was changed\n    hint: name another file")
    name = check_name(file.stem)
    words = [model, task, cluster, size, steps, goal]
    if None in words:
        _check_terminal(words)
    model = model or _ask(
        "Model: a directory, OWNER/NAME of a published model, or tiny, which hpcrl warmup makes", TINY
    )
    task = task or _ask("Task:\n" + "".join(f"  {form}: {text}\n" for form, text in TASKS.items()) + "Task", "words")
    cluster = cluster or _ask("Cluster profile (hpcrl cluster ls)", "local")
    profile = load_cluster(cluster).value
    unit = "Nodes" if profile.uses_slurm else "GPUs of this machine"
    size = size if size is not None else _ask_number(unit, 2 if profile.uses_slurm else 0, least=0)
    steps = steps or _ask_number("Optimizer steps", 80, least=1)
    goal = goal or _ask("Goal:\n" + "".join(f"  {each}: {text}\n" for each, text in GOALS.items()) + "Goal", "try")
    answers = RecipeAnswers(model=model, task=task, cluster=profile, size=size, steps=steps, goal=goal)
    text = draft_recipe(name, answers)
    prepared, problems, wrong = _tried(file, text, cluster)
    if wrong:
        raise ConfigError(wrong)
    _write(file, text)
    for note in (*prepared.notes, *map(str, problems)):
        say(f"note: {note}", err=True)
    say(str(file))
    for command in _next(file, answers.goal, profile.name, tiny=model == TINY):
        say(f"  {command}", err=True)


def _check_terminal(words: Sequence[object]) -> None:
    """Refuse to ask where there is no terminal (UsageError naming the options that are missing)."""
    from hpcrl.errors import UsageError

    if not sys.stdin.isatty():
        options = ("--model", "--task", "--cluster", "--size", "--steps", "--goal")
        missing = [option for option, word in zip(options, words, strict=True) if word is None]
        raise UsageError(f"there is no terminal to ask on; nothing was written\n    hint: add {' '.join(missing)}")


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default, err=True)).strip()


def _ask_number(question: str, default: int, *, least: int) -> int:
    while (number := int(typer.prompt(question, default=default, type=int, err=True))) < least:
        say(f"at least {least}", err=True)
    return number


def _tried(file: Path, text: str, cluster: str) -> tuple[PreparedRun, list[Finding], list[Finding]]:
    """Return the recipe as a submit would take it, all of its problems, and those that make it wrong.

    They have the name of the file that it will have.
    """
    import os
    import tempfile
    from dataclasses import replace

    from hpcrl.cli.progress import working
    from hpcrl.errors import ConfigError
    from hpcrl.submit.prepare import prepare, try_programs

    with tempfile.TemporaryDirectory() as directory:
        draft = Path(directory) / file.name
        draft.write_text(text)
        try:
            with working("checking whether it would start"):
                ruled = prepare(str(draft), cluster, environ=os.environ, cwd=Path.cwd(), programs=False)
                prepared = try_programs(ruled)
        except ConfigError as error:
            raise ConfigError([_named(each, draft, file) for each in error.findings]) from None
    tried = prepared.problems[len(ruled.problems) :]
    wrong = [each for each in ruled.problems if not each.key.startswith(_SITE)]
    wrong += [each for each in tried if each.key.startswith(_TRIED)]
    named = [[_named(each, draft, file) for each in findings] for findings in (prepared.problems, wrong)]
    return replace(prepared, problems=()), named[0], named[1]


def _named(finding: Finding, draft: Path, file: Path) -> Finding:
    from dataclasses import replace

    parts = {key: getattr(finding, key).replace(str(draft), str(file)) for key in ("where", "what", "hint")}
    return replace(finding, **parts)


def _write(file: Path, text: str) -> None:
    """Make the file, whole or not at all (UsageError where it was made meanwhile)."""
    from hpcrl.errors import UsageError
    from hpcrl.storage.files import atomic_create

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_create(file, text.encode())
    except FileExistsError:
        raise UsageError(f"{file} exists; nothing was changed\n    hint: name another file") from None


def _next(file: Path, goal: str, cluster: str, *, tiny: bool) -> list[str]:
    import shlex

    named, where = shlex.quote(str(file)), "" if cluster == "local" else f" -c {cluster}"
    first = [f"hpcrl warmup {named}"] if tiny else []
    grid = " --grid trainer.optimizer.learning_rate=1e-6,3e-6 --seeds 2" if goal == "compare" else ""
    return [
        *first,
        f"hpcrl recipe check {named}{where}",
        f"hpcrl plan {named}{where}",
        f"hpcrl submit {named}{where}{grid}",
    ]
