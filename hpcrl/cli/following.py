"""After a submit or a resume: follow the run to its end, or say what to call next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.output import say, screen

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.runs.observe import RunView
    from hpcrl.runs.rundir import RunDir

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Show progress until the run has ended; Ctrl-C cancels the run.")
]

InJobOption = Annotated[
    bool,
    typer.Option(
        "--in-job", help="Run inside the allocation of this shell (salloc), not as a new job; the run is not requeued."
    ),
]


NewNameOption = Annotated[str | None, typer.Option("--name", "-n", metavar="RUN", help="Name of the run.")]

QueueAnywayOption = Annotated[
    bool, typer.Option("--queue-anyway", help="Submit even if Slurm could not start the job now.")
]


def follow_or_tell(run: RunDir, follow: bool) -> None:
    """Follow a run to its end, and end with its exit code; or say which commands come next."""
    from hpcrl.runs.registry import reference

    if follow:
        raise typer.Exit(_follow(run, screen(err=True)))
    say(run.name)
    named = reference(run)
    for command in ("status", "logs", "cancel"):
        extra = {"status": " --watch", "logs": " -f", "cancel": ""}[command]
        say(f"  hpcrl {command} {named}{extra}", err=True)


def _follow(run: RunDir, console: Console) -> int:
    """Follow a run to its end and print the summary; returns the exit code."""
    from hpcrl.errors import UsageError
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.record import RunRecord
    from hpcrl.runs.run_progress import read_progress
    from hpcrl.runs.status import RunState
    from hpcrl.runs.views.follow import follow
    from hpcrl.runs.views.liveview import summary
    from hpcrl.runs.views.report import write_report
    from hpcrl.submit.submission import interrupt

    before = RunRecord.read(run).submissions[-1].after_attempt
    view = follow(run, console, on_interrupt=lambda count: interrupt(run, count), after_attempt=before)
    metrics = read_metrics(run)
    picture = ""
    if metrics:
        try:
            picture = str(write_report(run))
        except UsageError as error:
            picture = f"none: {error}"
    screen().print(summary(view, read_progress(run), metrics, picture=picture))
    if view.state is not RunState.COMPLETED:
        tell_what_failed(run)
    return exit_code(view)


def tell_what_failed(run: RunDir) -> None:
    """Print the commands that can follow an end other than completion."""
    from hpcrl.runs.registry import reference

    named = reference(run)
    say(f"  hpcrl why {named}\n  hpcrl resume {named}", err=True)


def exit_code(view: RunView) -> int:
    """Return the exit code for a run that has ended: 0 completed, 130 cancelled, else as its cause has it."""
    from hpcrl.errors import ExitCode
    from hpcrl.runs.status import RunState

    if view.state is RunState.COMPLETED:
        return ExitCode.OK
    if view.state is RunState.CANCELLED:
        return ExitCode.CANCELLED
    return view.cause.kind.exit_code if view.cause is not None else ExitCode.FAILED
