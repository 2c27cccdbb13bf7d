"""``hpcrl resume``: go on with a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, follow_or_tell
from hpcrl.cli.options import SetOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.resume_request import ResumePoint
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.start.resume import ResumeFrom


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resume")(resume)


def resume(
    run: RunArgument,
    overrides: SetOption = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Restart at step 0 with the start model; existing checkpoints and weights are put aside.",
        ),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", metavar="STEP", help="Continue from this checkpoint; later ones are put aside."),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Accept changes of code or environments although job.on_change is `stop`."
        ),
    ] = False,
    follow: FollowOption = False,
    in_job: InJobOption = False,
    root: RunsRootOption = None,
) -> None:
    """Continue a run that has ended, from its newest valid joint checkpoint.

    --set changes the recipe first, for example trainer.ranks, or trainer.steps of a completed run. Model, data and seed
    stay. The trainer compares checkpoints with their manifests; hpcrl status shows the restored one. A run that has
    saved checkpoints never restarts at step 0 by itself. With --in-job it continues inside the allocation of this
    shell, also if it ran elsewhere before.

    Exit code: 2 the run is alive, another resume is running, or there is nothing to do; 94 no checkpoint can be
    restored; in these cases nothing was changed. With
    --follow also 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    from hpcrl.cli.progress import working
    from hpcrl.runs.start.resume import ResumeFrom
    from hpcrl.submit.resume import resume as resume_run

    found, begin = find(run, root), ResumeFrom(scratch=from_scratch, step=from_step)
    point = resume_run(
        found,
        begin,
        overrides or (),
        accept_changes=accept_changes,
        in_job=in_job,
        say=lambda text: say(text, err=True),
        working=working,
    )
    say(_what_it_tries(found, begin, point), err=True)
    follow_or_tell(found, follow)


def _what_it_tries(run: RunDir, begin: ResumeFrom, point: ResumePoint) -> str:
    """Return the notice of a resume before the trainer has verified a checkpoint."""
    from hpcrl.runs.registry import reference

    if begin.scratch:
        return f"resumed {run.name}: it restarts at step 0; what it has saved is put aside"
    if point.step is None:
        return f"resumed {run.name}: it starts at step 0, because no checkpoint is saved yet"
    return (
        f"resumed {run.name}: the trainer verifies the checkpoint of step {point.step} and continues from it; "
        f"what it restored: hpcrl status {reference(run)}"
    )
