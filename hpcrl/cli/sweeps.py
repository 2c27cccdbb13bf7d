"""``hpcrl sweep``: watch, continue and end sweeps; `hpcrl submit --grid` starts one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import JsonOption, confirm
from hpcrl.cli.output import fits, json_text, say, screen, table_console
from hpcrl.cli.selection import RunsRootOption, ask_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console, Group

    from hpcrl.sweeps.results import SweepResult
    from hpcrl.sweeps.sweep_files import SweepDir

sweep_app = typer.Typer(help="Sweeps: runs of one recipe with different values.", no_args_is_help=True)
_REFRESH_S = 2.0


def _complete_sweeps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of sweeps, for shell completion."""
    from hpcrl.sweeps.sweep_files import sweeps_below

    return [each.name for each in sweeps_below(_roots(ctx.params.get("root"))) if each.name.startswith(incomplete)]


_SweepArgument = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Name of a sweep, or its directory.", autocompletion=_complete_sweeps)
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(sweep_app, name="sweep")


@sweep_app.command("status")
def sweep_status(
    sweep: _SweepArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow it until all members have ended.")] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show the members of a sweep: state, swept values, held-out reward with its interval; and the best setting.

    Held-out rewards are those of the newest evaluation. Members that differ in their seed alone are one setting.
    """
    import msgspec

    from hpcrl.sweeps.results import RESULT_SCHEMA, read_sweep_result

    found = _find(sweep, root)
    if as_json:
        result = read_sweep_result(found)
        say(json_text({"schema": RESULT_SCHEMA, **msgspec.to_builtins(result)}))
    elif watch:
        _watch(found)
    else:
        console = table_console()
        console.print(_view(console, read_sweep_result(found)))


def _view(console: Console, result: SweepResult) -> Group:
    """Return the view of a sweep that has room on a console, or the narrowest one."""
    from hpcrl.sweeps.sweep_table import sweep_views

    views = list(sweep_views(result))
    return next((view for table, view in views if fits(console, table)), views[-1][1])


def _watch(found: SweepDir) -> None:
    import time

    from rich.live import Live

    from hpcrl.sweeps.results import read_sweep_result

    console = screen()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                result = read_sweep_result(found)
                live.update(_view(console, result), refresh=True)
                if result.ended:
                    return
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        say(f"{found.name} continues; hpcrl sweep cancel {found.name} ends it", err=True)
        raise typer.Exit from None


@sweep_app.command("ls")
def sweep_list(as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """List sweeps, newest first, with the states of their members."""
    from rich.table import Table

    from hpcrl.errors import RunDirError
    from hpcrl.sweeps.results import sweep_counts
    from hpcrl.sweeps.sweep_files import sweeps_below

    ask_slurm()
    rows = []
    for found in sweeps_below(_roots(root)):
        try:
            record = found.read()
        except RunDirError as error:
            say(f"{found.name}: {error}", err=True)
            continue
        counts = sweep_counts(found, record)
        row = {"sweep": found.name, "recipe": record.recipe, "cluster": record.cluster, "members": len(record.members)}
        rows.append({**row, "states": counts, "path": str(found.path)})
    if as_json:
        say(json_text(rows))
        return
    if not rows:
        say("there is no sweep; hpcrl submit RECIPE --grid KEY=V1,V2 starts one", err=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("sweep", "recipe", "cluster", "members"):
        table.add_column(column, no_wrap=True)
    table.add_column("states")
    for row in rows:
        states = row["states"]
        assert isinstance(states, dict)
        words = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        table.add_row(*(str(row[name]) for name in ("sweep", "recipe", "cluster", "members")), words)
    table_console().print(table)


@sweep_app.command("resume")
def sweep_resume(
    sweep: _SweepArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Also give members that failed another attempt.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Continue a sweep: start members that were not started, and resume those that were lost or cancelled with it.

    No member is started twice. Members that you cancelled by name are not resumed.
    """
    from hpcrl.sweeps.control import resume_sweep

    found = _find(sweep, root)
    resume_sweep(found, lambda text: say(text, err=True), failed=failed)
    say(f"{found.name} continues: hpcrl sweep status {found.name}", err=True)


@sweep_app.command("cancel")
def sweep_cancel(
    sweep: _SweepArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """End a sweep: start no more members, and cancel those that run."""
    from hpcrl.sweeps.control import cancel_sweep
    from hpcrl.sweeps.results import sweep_counts

    found = _find(sweep, root)
    if not yes:
        counts = sweep_counts(found, found.read())
        say(f"this ends {found.name}: {', '.join(f'{n} {state}' for state, n in sorted(counts.items()))}", err=True)
        confirm("end it?")
    cancel_sweep(found, say)


@sweep_app.command("wait")
def sweep_wait(
    sweep: _SweepArgument,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Maximum wait.")
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Wait until all members of a sweep have ended, and print the best setting.

    Exit code: 0 all completed; 1 a member did not, or the sweep has not ended in time, or nothing starts its members.
    """
    import time

    from hpcrl.errors import ExitCode
    from hpcrl.runs.views.swept_words import short_names
    from hpcrl.sweeps.results import read_sweep_result
    from hpcrl.sweeps.sweep_table import result_lines

    found = _find(sweep, root)
    end_s = None if timeout is None else time.monotonic() + timeout
    while True:
        result = read_sweep_result(found)
        if result.ended or result.idle or (end_s is not None and time.monotonic() >= end_s):
            break
        time.sleep(_REFRESH_S)
    for line in result_lines(result, short_names(result.keys)):
        say(line)
    good = result.ended and set(result.counts) == {"COMPLETED"}
    if timeout is not None and not result.ended and not result.idle:
        say(f"{found.name} has not ended within {timeout:g} s", err=True)
    raise typer.Exit(ExitCode.OK if good else ExitCode.FAILED)


def _find(name: str, root: str | None) -> SweepDir:
    from hpcrl.sweeps.sweep_files import find_sweep

    ask_slurm()
    return find_sweep(name, _roots(root))


def _roots(root: str | None) -> Iterator[Path]:
    """Return directories of runs that may have sweeps; with ``root`` that alone."""
    from hpcrl.sweeps.sweep_handle import sweep_roots

    return sweep_roots(root)
