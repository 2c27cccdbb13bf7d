"""``hpcrl resume``: go on with a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, follow_or_tell
from hpcrl.cli.options import SetOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.start.restart import ResumePoint
    from hpcrl.runs.start.resume import ResumeFrom

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resume")(resume)


def resume(
    run: RunArgument,
    overrides: SetOption = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Begin at step 0 with the start model; what there is is put aside."),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", metavar="STEP", help="Go on from this checkpoint; later ones are put aside."),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With job.on_change: stop, run what is there now all the same."),
    ] = False,
    follow: FollowOption = False,
    in_job: InJobOption = False,
    root: RunsRootOption = None,
) -> None:
    """Go on with a run that has ended, from its newest joint checkpoint that is found good.

    With --set its recipe changes first, for example to another number of trainer.ranks, or to more trainer.steps, also
    of a run that is completed. Model, data and seed stay. The trainer compares checkpoints with their manifests and
    says what it restored (hpcrl status). A run that has saved checkpoints never begins again by itself. With --in-job
    it goes on inside of the allocation of this shell, wherever it was before.

    Exit code: 2 the run is alive, another resume is at it, or there is nothing to do; 94 no checkpoint can be restored;
    in these cases nothing was changed. With --follow also 0 completed, 1 failed, 93 given up without progress, 130
    cancelled.
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
    """What a resume can say before the trainer has verified anything."""
    from hpcrl.runs.registry import reference

    if begin.scratch:
        return f"resumed {run.name}: it begins again at step 0, and what it has saved is put aside"
    if point.step is None:
        return f"resumed {run.name}: it begins at step 0, as it has saved no checkpoint yet"
    return (
        f"resumed {run.name}: the trainer verifies the checkpoint of step {point.step} and goes on from it; "
        f"what it restored: hpcrl status {reference(run)}"
    )
