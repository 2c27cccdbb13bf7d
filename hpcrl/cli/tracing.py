"""``hpcrl trace``: a run as a trace for Perfetto."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcrl.cli.output import say
from hpcrl.cli.output_file import output_file
from hpcrl.cli.selection import OptionalRunArgument, RunsRootOption, find


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("trace")(trace)


def trace(
    run: OptionalRunArgument = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            callback=output_file,
            metavar="FILE",
            help="Output file, compressed where it ends in .gz. Default: trace.json in the run directory.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only these steps, both included. Default: all.")
    ] = None,
    most: Annotated[
        int, typer.Option("--max-events", min=1, help="Maximum number of events; older steps are left out first.")
    ] = 300_000,
    root: RunsRootOption = None,
) -> None:
    """Write a run as a trace in Chrome's trace event format, for https://ui.perfetto.dev or chrome://tracing.

    Roles are processes; they have the phases of steps, weight updates, rollouts with their requests and versions,
    checkpoints and evaluations, and faults as instants.
    """
    from pathlib import Path

    from hpcrl.analysis.trace.run_trace import parse_steps, run_trace
    from hpcrl.analysis.trace.trace_writer import write_trace
    from hpcrl.cli.progress import working

    first, last = (1, None) if steps is None else parse_steps(steps)
    found = find(run, root)
    path = found.path / "trace.json" if output is None else Path(output)
    with working(f"tracing {found.name}"):
        made = run_trace(found, first=first, last=last, most_events=most)
        size = write_trace(path, made.events, made.about)
    if made.left_out:
        say(
            f"{made.left_out:,} older steps are left out: a trace has at most {most:,} events "
            "(--steps A:B, --max-events)",
            err=True,
        )
    say(f"{path}: steps {made.first} to {made.last} of {made.steps}, {len(made.events):,} events, {size / 1e6:.1f} MB")
