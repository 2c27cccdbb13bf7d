"""``hpcrl swe``: make and look at software-engineering tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import json_text, say, table_console

swe_app = typer.Typer(help="Software-engineering tasks: make, list, show and check them.", no_args_is_help=True)

TasksArgument = Annotated[Path, typer.Argument(metavar="TASKS", help="File of tasks, or directory with a tasks.jsonl.")]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="NAME", help="hpcrl, swe-bench, swe-gym, swe-smith, r2e-gym or harbor.")
]
TreesOption = Annotated[
    Path | None, typer.Option("--trees", metavar="DIR", help="Directory with the repositories of rows.")
]
CacheOption = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Files of packages; `cache` beside the set by default.")
]
PythonOption = Annotated[
    Path, typer.Option("--python", metavar="FILE", help="Interpreter of the tests, as sandboxes see it.")
]
IndexOption = Annotated[str, typer.Option("--index", metavar="URL", help="Package index.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Fetch nothing; the cache has all files.")]
_DEFAULT_PYTHON = "/usr/bin/python3"
_INDEX = "https://pypi.org/simple/"


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(swe_app, name="swe")


@swe_app.command("make")
def make(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the set; new, or begun.")],
    tasks: Annotated[int, typer.Option("--tasks", "-n", metavar="N", min=1, help="Number of tasks.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Equal seeds give equal tasks.")] = 0,
    packages: Annotated[
        list[str] | None,
        typer.Option("--package", metavar="NAME", help="A pinned package; all by default. Repeatable."),
    ] = None,
    held_out_share: Annotated[
        float, typer.Option("--held-out-share", metavar="SHARE", min=0, max=1, help="Share of the functions held out.")
    ] = 0.1,
    held_out_packages: Annotated[
        list[str] | None,
        typer.Option("--held-out-package", metavar="NAME", help="A package all of whose tasks are held out."),
    ] = None,
    cache: CacheOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Sandboxes at once; one a processor by default.")
    ] = None,
    python: PythonOption = Path(_DEFAULT_PYTHON),
    index: IndexOption = _INDEX,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a set of tasks: bugs in pinned packages that their own tests find.

    The files of packages are fetched once. A call that was interrupted continues where it stopped; a larger set of the
    same seed has the tasks of a smaller one.
    """
    import os

    from hpcrl.processes.daemon_threads import run_process
    from hpcrl.sandboxes.client import local_sandboxes
    from hpcrl.swe.judging.task_sandboxes import TaskSandboxes
    from hpcrl.swe.making.maker import MadeSet, SetSettings, TaskSetMaker
    from hpcrl.swe.making.packages import pinned_packages

    settings = SetSettings(
        tasks=tasks,
        seed=seed,
        packages=tuple(dict.fromkeys(packages or pinned_packages())),
        held_out_share=held_out_share,
        held_out_packages=tuple(sorted({*(held_out_packages or ())})),
        python=str(python),
    )

    async def run() -> MadeSet:
        async with local_sandboxes() as host:
            maker = TaskSetMaker(
                TaskSandboxes(host),
                settings,
                output,
                cache=cache or output.parent / "cache",
                workers=workers or len(os.sched_getaffinity(0)),
                index=index,
                offline=offline,
                progress=lambda text: say(text, err=True),
            )
            return await maker.make()

    made = run_process(run())
    counts = {split: sum(task.split == split for task in made.tasks) for split in ("train", "heldout")}
    if as_json:
        document = {
            "format_version": 1,
            "tasks": len(made.tasks),
            **counts,
            "tried": made.candidates,
            "notes": made.notes,
        }
        say(json_text(document))
        return
    for note in made.notes:
        say(f"note: {note}", err=True)
    shares = f"{counts['train']} for training, {counts['heldout']} held out"
    say(f"{output / 'tasks.jsonl'}: {len(made.tasks)} tasks ({shares}) of {made.candidates} versions")


@swe_app.command("exercises")
def exercises(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the set; new.")],
    tasks: Annotated[int, typer.Option("--tasks", "-n", metavar="N", min=1, help="Number of tasks.")] = 512,
    wrong_modules: Annotated[
        int, typer.Option("--wrong-modules", metavar="N", min=1, max=2, help="Wrong modules of a task: 1 or 2.")
    ] = 2,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Equal seeds give equal tasks.")] = 0,
    cache: CacheOption = None,
    python: PythonOption = Path(_DEFAULT_PYTHON),
    index: IndexOption = _INDEX,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make small tasks that a model of `hpcrl warmup` learns in minutes, with demonstrations.

    Only pytest and what it needs is fetched, once.
    """
    from hpcrl.swe.making.exercises import write_exercises
    from hpcrl.swe.making.packages import fetch_package, pinned_tools
    from hpcrl.swe.making.tools import build_tools

    directory = cache or output.parent / "cache"
    wheels = [fetch_package(pinned, directory, index=index, offline=offline) for pinned in pinned_tools()]
    tools = build_tools(wheels, python=python)
    wrong: Literal[1, 2] = 1 if wrong_modules == 1 else 2
    made = write_exercises(output, tasks=tasks, seed=seed, tools=tools, python=python, wrong_modules=wrong)
    counts = {split: sum(task.split == split for task in made) for split in ("train", "heldout")}
    if as_json:
        say(json_text({"format_version": 1, "tasks": len(made), **counts}))
        return
    shares = f"{counts['train']} for training, {counts['heldout']} held out"
    say(f"{output / 'tasks.jsonl'}: {len(made)} tasks ({shares})")


@swe_app.command("ls")
def ls(
    tasks: TasksArgument, kind: FormatOption = "hpcrl", trees: TreesOption = None, as_json: JsonOption = False
) -> None:
    """List the tasks of a file."""
    from rich.table import Table

    loaded = _load(tasks, kind, trees)
    for note in loaded.notes:
        say(f"note: {note}", err=True)
    rows = [
        {
            "id": task.id,
            "package": task.package,
            "split": task.split,
            "difficulty": task.difficulty if task.difficulty >= 0 else None,
            "fail_to_pass": len(task.fail_to_pass),
            "pass_to_pass": len(task.pass_to_pass),
        }
        for task in loaded.tasks
    ]
    if as_json:
        say(json_text({"format_version": 1, "tasks": rows, "notes": loaded.notes}))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "package", "split", "difficulty", "fail to pass", "pass to pass"):
        table.add_column(heading)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    table_console().print(table, markup=False)


@swe_app.command("show")
def show(
    tasks: TasksArgument,
    task: Annotated[str, typer.Argument(metavar="ID", help="Id of the task.")],
    kind: FormatOption = "hpcrl",
    trees: TreesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task: its instruction, its tests, its bug and the right patch."""
    import msgspec

    found = _find(_load(tasks, kind, trees).tasks, task)
    if as_json:
        say(json_text({"format_version": 1, **msgspec.to_builtins(found)}))
        return
    say(f"{found.id}  {found.package}  {found.split}\n\n{found.instruction}\n")
    say(f"fail to pass ({len(found.fail_to_pass)}):")
    for test in found.fail_to_pass:
        say(f"  {test}")
    say(f"pass to pass: {len(found.pass_to_pass)} tests")
    for heading, diff in (("bug", found.bug), ("solution", found.solution)):
        if diff:
            say(f"\n{heading}:\n{diff}", nl=False)


@swe_app.command("check")
def check(
    tasks: TasksArgument,
    task: Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of a task; the first ones by default.")] = None,
    count: Annotated[int, typer.Option("--tasks", "-n", metavar="N", min=1, help="Number of tasks.")] = 8,
    kind: FormatOption = "hpcrl",
    trees: TreesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge the right patch and no patch of tasks in sandboxes of this machine.

    Exit code: 0 where the right patches get 1 and the others 0, 1 otherwise.
    """
    from hpcrl.errors import ExitCode
    from hpcrl.processes.daemon_threads import run_process
    from hpcrl.swe.checking import check_swe_tasks

    loaded = _load(tasks, kind, trees)
    chosen = loaded.tasks[:count] if task is None else [_find(loaded.tasks, task)]
    found = run_process(check_swe_tasks(chosen, loaded.directory))
    if as_json:
        say(json_text({"format_version": 1, "tasks": [each.document() for each in found]}))
    else:
        for each in found:
            say(f"{each.id}: {'; '.join(each.problems) or 'right patch 1, no patch 0'} ({each.wall_s:.1f} s)")
    raise typer.Exit(ExitCode.FAILED if any(each.problems for each in found) else ExitCode.OK)


def _load(tasks: Path, kind: str, trees: Path | None) -> Any:
    from hpcrl.swe.sources import load_tasks

    path = tasks / "tasks.jsonl" if kind == "hpcrl" and tasks.is_dir() else tasks
    return load_tasks(path, kind, trees=trees)


def _find(tasks: list[Any], name: str) -> Any:
    from hpcrl.errors import UsageError

    for task in tasks:
        if task.id == name:
            return task
    raise UsageError(f"there is no task {name!r}\n    hint: `hpcrl swe ls` lists them")
