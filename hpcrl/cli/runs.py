"""``hpcrl status``, ``ls``, ``logs``, ``why`` and ``report``: what reads runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.completion import complete_clusters, complete_roles, complete_states
from hpcrl.cli.options import JsonOption, TagFilterOption
from hpcrl.cli.output import say, screen, table_console
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import (
    OptionalRunArgument,
    OptionalRunsArgument,
    RunsRootOption,
    ask_slurm,
    find,
    for_each_run,
    runs_in_sight,
    runs_root,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrl.runs.rundir import RunDir

_REFRESH_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("ls")(list_runs)
    app.command("logs")(logs)
    app.command("why")(why)
    app.command("report")(report)


def status(
    runs: OptionalRunsArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow one run until it has ended.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All runs, a line each.")] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show where runs stand: state, roles, step, reward, version, staleness, last checkpoint, GPU-hours,
    and how each engine is.

    With --json several runs are a list of the documents of those that were found.
    """
    if everything:
        if runs:
            raise typer.BadParameter("RUN and --all exclude each other")
        _status_of_all(watch, as_json, root)
        return
    several = len(runs or ()) > 1
    if several and watch:
        raise typer.BadParameter("--watch follows one run; --all --watch shows all of them")
    if as_json and several:
        _documents_of(runs or [], root)
    else:
        for_each_run(runs or [None], root, lambda run: _status(run, watch, as_json))


def _documents_of(runs: list[str], root: str | None) -> None:
    import json

    from hpcrl.runs.views.usage import status_document

    documents: list[object] = []
    try:
        for_each_run(runs, root, lambda run: documents.append(json.loads(status_document(run))))
    finally:
        say(json.dumps(documents, indent=2))


def _status(run: RunDir, watch: bool, as_json: bool) -> None:
    import msgspec

    from hpcrl.runs.fleet import read_fleet
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.observe import observe
    from hpcrl.runs.registry import reference
    from hpcrl.runs.run_progress import read_progress
    from hpcrl.runs.views.late_sinks import sink_warnings
    from hpcrl.runs.views.liveview import render, summary
    from hpcrl.runs.views.unsent_notices import notice_warnings
    from hpcrl.runs.views.usage import read_usage, status_document

    if as_json:
        say(status_document(run))
    elif watch:
        from hpcrl.runs.views.follow import follow

        try:
            view = follow(run, screen())
        except KeyboardInterrupt:
            say(f"{run.name} continues; hpcrl cancel {reference(run)} ends it", err=True)
            raise typer.Exit from None
        screen().print(summary(view, read_progress(run), read_metrics(run)))
    else:
        view = observe(run)
        view = msgspec.structs.replace(view, warnings=[*view.warnings, *notice_warnings(run), *sink_warnings(run)])
        fleet = read_fleet(run, view.attempt, view.components)
        console, metrics = table_console(), read_metrics(run)
        usage, progress = read_usage(run, view), read_progress(run, metrics)
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
    # only the newest that fit on the screen: lines below its last one cannot be seen
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
    newest: Annotated[int, typer.Option("--newest", "-n", min=0, help="Maximum number of runs; 0 lists all.")] = 0,
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
    tags: TagFilterOption = None,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """List your runs, newest first, wherever they are; with --runs-root those of this directory.

    Runs whose files cannot be read are named on standard error, with the reason.
    """
    from hpcrl.errors import UsageError
    from hpcrl.runs.status import RunState
    from hpcrl.runs.views.listing import list_rows, listing_document, listing_table

    wanted = [state.upper() for state in states or ()]
    if unknown := [state for state in wanted if state not in RunState.__members__]:
        raise UsageError(f"{unknown[0]} is not a state of a run\n    hint: {', '.join(RunState.__members__)}")
    ask_slurm()
    unread: list[str] = []
    rows = list_rows(
        runs_in_sight(root),
        states=wanted,
        cluster=cluster,
        newest=newest,
        tags=tags or (),
        left_out=lambda run, why: unread.append(f"{run.name} is left out: {why}"),
    )
    for line in unread:
        say(line, err=True)
    console = table_console()
    if as_json:
        say(listing_document(rows))
    elif rows:
        console.print(listing_table(rows, console.width, cut=console.is_terminal), soft_wrap=True)
    elif wanted or cluster or tags:
        say("no run matches; hpcrl ls lists all", err=True)
    elif not unread:
        say(f"there is no run in {runs_root(root)}; hpcrl submit RECIPE starts one", err=True)


def logs(
    run: OptionalRunArgument = None,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            "-r",
            metavar="ROLE[/REPLICA]",
            help="Only this role, such as `trainer`, or one replica of it, such as `engine/0`; also `supervisor`.",
            autocompletion=complete_roles,
        ),
    ] = None,
    replica: Annotated[int | None, typer.Option(help="Only this replica.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Attempt; the newest by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run has ended.")] = False,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only lines after a time: an age as `90s`, `10m`, `2h`, `1d`, or a time."),
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
        bool, typer.Option("--events", "-e", help="Show all events with their times, and the complete final log lines.")
    ] = False,
    slow: Annotated[
        bool, typer.Option("--slow", help="Say what bounds a step, over the run and now, and what would change it.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Show why a run ended: the first cause, how to continue, the last log lines; with --events all later events.

    --slow shows which part of a step takes the time: engines, environments, sandboxes, judge, phases of the trainer,
    hand-off, checkpoint, staleness bound. It also shows the plan's prediction, and the effect of other settings,
    simulated with the measured durations of the run.
    """
    if slow:
        if events:
            raise typer.BadParameter("--slow and --events exclude each other")
        _why_slow(find(run, root), as_json)
        return
    from hpcrl.runs.views.diagnosis import diagnose, diagnosis_document, print_diagnosis

    diagnosis = diagnose(find(run, root))
    if as_json:
        say(diagnosis_document(diagnosis))
    else:
        print_diagnosis(diagnosis, screen(), events=events)


def _why_slow(run: RunDir, as_json: bool) -> None:
    from hpcrl.analysis.bounds.slow_report import slow_document, slow_lines, slow_report
    from hpcrl.cli.output import json_text
    from hpcrl.cli.progress import working

    with working(f"simulating changes of {run.name}") as told:
        found = slow_report(run, told.share)
    if as_json:
        say(json_text(slow_document(found)))
        return
    for line in slow_lines(found):
        say(line)


def report(
    runs: OptionalRunsArgument = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            callback=output_file,
            metavar="FILE",
            help="Output file: a picture (PNG, SVG, PDF), or with the suffix .html a page. "
            "Default: report.png in the run directory.",
        ),
    ] = None,
    root: RunsRootOption = None,
) -> None:
    """Draw a picture of each run: reward, staleness and the phases of each step; or make a page of runs.

    A page (`-o report.html`) is one file that opens without network: all curves with their definitions, a timeline of
    roles, faults and restarts, rollouts to read, and the recipe. Several runs are drawn over each other.
    """
    if output is not None and output.lower().endswith((".html", ".htm")):
        _page(runs or [None], output, root)
        return
    if output is not None and len(set(runs or ())) > 1:
        raise typer.BadParameter("--output is the file of one picture; a page, FILE.html, can have several runs")
    for_each_run(runs or [None], root, lambda run: _report(run, output))


def _page(runs: Sequence[str | None], output: str, root: str | None) -> None:
    from pathlib import Path

    from hpcrl.analysis.page.plotly_program import read_plotly
    from hpcrl.cli.progress import working

    read_plotly()  # before what needs arrays, which the same extra brings
    from hpcrl.analysis.page.write_html import write_page

    found = [find(run, root) for run in dict.fromkeys(runs)]
    with working(f"reading {', '.join(run.name for run in found)}"):
        written = write_page(found, Path(output))
    say(str(written))


def _report(run: RunDir, output: str | None) -> None:
    from pathlib import Path

    from hpcrl.cli.progress import working
    from hpcrl.runs.views.report import write_report

    with working(f"reading and plotting the steps of {run.name}"):
        written = write_report(run, None if output is None else Path(output))
    say(str(written))
