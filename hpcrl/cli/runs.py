"""``hpcrl status``, ``ls``, ``logs``, ``why`` and ``report``: what reads runs."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.completion import complete_clusters, complete_roles, complete_states
from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import say, screen, table_console
from hpcrl.cli.selection import (
    OptionalRunArgument,
    RunsRootOption,
    ask_slurm,
    find,
    runs_in_sight,
    runs_root,
)

__all__ = ["register"]

_REFRESH_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("ls")(list_runs)
    app.command("logs")(logs)
    app.command("why")(why)
    app.command("report")(report)


def status(
    run: OptionalRunArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow until the run has ended.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All runs, a line each.")] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show where a run stands: state, roles, step, reward, version, staleness, last checkpoint, GPU-hours,
    and how each engine is."""
    from hpcrl.runs.fleet import read_fleet
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.observe import observe
    from hpcrl.runs.registry import reference
    from hpcrl.runs.run_progress import read_progress
    from hpcrl.runs.views.follow import follow
    from hpcrl.runs.views.liveview import render, summary
    from hpcrl.runs.views.usage import read_usage, status_document

    if everything:
        if run is not None:
            raise typer.BadParameter("RUN and --all exclude each other")
        _status_of_all(watch, as_json, root)
        return
    found = find(run, root)
    if as_json:
        say(status_document(found))
    elif watch:
        try:
            view = follow(found, screen())
        except KeyboardInterrupt:
            say(f"{found.name} goes on; hpcrl cancel {reference(found)} ends it", err=True)
            raise typer.Exit from None
        screen().print(summary(view, read_progress(found), read_metrics(found)))
    else:
        view = observe(found)
        fleet = read_fleet(found, view.attempt, view.components)
        console, metrics = table_console(), read_metrics(found)
        usage, progress = read_usage(found, view), read_progress(found, metrics)
        console.print(render(view, progress, metrics, usage, fleet, width=console.width))


def _status_of_all(watch: bool, as_json: bool, root: str | None) -> None:
    import time

    from rich.live import Live

    from hpcrl.runs.views.listing import list_rows, listing_table

    if as_json or not watch:
        list_runs(as_json=as_json, root=root)
        return
    ask_slurm()
    console = table_console()
    # the newest that a screen has room for: what is below its last line cannot be seen
    room = max(1, console.height - 2)
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(listing_table(list_rows(runs_in_sight(root), newest=room), console.width), refresh=True)
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            raise typer.Exit from None


def list_runs(
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help="Only runs in this state. Repeatable.", autocompletion=complete_states
        ),
    ] = None,
    newest: Annotated[int, typer.Option("--newest", "-n", min=0, help="At most so many; 0 lists all.")] = 0,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            metavar="NAME",
            help="Only runs that were submitted with this profile.",
            autocompletion=complete_clusters,
        ),
    ] = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """List your runs, newest first, wherever they are; with --runs-root those of this directory."""
    from hpcrl.errors import UsageError
    from hpcrl.runs.status import RunState
    from hpcrl.runs.views.listing import list_rows, listing_document, listing_table

    wanted = [state.upper() for state in states or ()]
    if unknown := [state for state in wanted if state not in RunState.__members__]:
        raise UsageError(f"{unknown[0]} is no state of a run\n    hint: {', '.join(RunState.__members__)}")
    ask_slurm()
    rows = list_rows(runs_in_sight(root), states=wanted, cluster=cluster, newest=newest)
    console = table_console()
    if as_json:
        say(listing_document(rows))
    elif rows:
        console.print(listing_table(rows, console.width, cut=console.is_terminal), soft_wrap=True)
    elif wanted or cluster:
        say("no run is like that; hpcrl ls lists all", err=True)
    else:
        say(f"there is no run in {runs_root(root)}; hpcrl submit RECIPE starts one", err=True)


def logs(
    run: OptionalRunArgument = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE[/REPLICA]",
            help="Only this role, such as `trainer`, or one replica of it, such as `engine/0`; also `supervisor`.",
            autocompletion=complete_roles,
        ),
    ] = None,
    replica: Annotated[int | None, typer.Option(help="Only this replica.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt; the newest by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only lines from then on: an age as `90s`, `10m`, `2h`, `1d`, or a time."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Newest lines to show first; 0 shows all.")] = 200,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show the logs of a run's roles, merged in time order."""
    from hpcrl.runs.views.logs import LogFilter, follow_logs, format_line, iterate_logs

    found = find(run, root)
    wanted = LogFilter.make(found, role=role, replica=replica, rank=rank, attempt=attempt, grep=grep, since=since)
    source = (follow_logs if follow else iterate_logs)(found, wanted, lines=lines)
    try:
        for line in source:
            say(format_line(line, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit from None


def why(
    run: OptionalRunArgument = None,
    events: Annotated[
        bool, typer.Option("--events", "-e", help="All that followed, each with its time, and the whole last words.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Say what ended a run: the first cause, how to go on, its last words; and with --events all that followed."""
    from hpcrl.runs.views.diagnosis import diagnose, diagnosis_document, print_diagnosis

    diagnosis = diagnose(find(run, root))
    if as_json:
        say(diagnosis_document(diagnosis))
    else:
        print_diagnosis(diagnosis, screen(), events=events)


def report(
    run: OptionalRunArgument = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.png in the run.")
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Draw a picture of a run: reward, staleness and the phases of each step."""
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.runs.views.report import write_report

    found = find(run, root)
    with working(f"reading the steps of {found.name} and drawing them"):
        written = write_report(found, None if output is None else Path(output))
    say(str(written))
