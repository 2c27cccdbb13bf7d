"""``hpcrl resume``: go on with a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hpcrl.cli.following import FollowOption, InJobOption, follow_or_tell
from hpcrl.cli.options import SetOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe
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
    import os

    from hpcrl.cli.slurm import reach_slurm_of, reachable_slurm
    from hpcrl.errors import RunDirError, UsageError
    from hpcrl.runs.contents import RunContents
    from hpcrl.runs.copies import original_of
    from hpcrl.runs.record import user_name
    from hpcrl.runs.start.claim import claimed
    from hpcrl.runs.start.resume import ResumeFrom, request_restart
    from hpcrl.runs.start.snapshot import keep_snapshot, take_snapshot
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation
    from hpcrl.submit.submission import end_leftovers, prepare_resume, submit_attempt

    if from_scratch and from_step is not None:
        raise UsageError("--from-scratch and --from-step exclude each other")
    found, begin = find(run, root), ResumeFrom(scratch=from_scratch, step=from_step)
    reach_slurm_of(found)
    try:
        with claimed(found, user=user_name()):
            change = _plan_change(found, overrides) if overrides else _renewal(found)
            wanted = found.plan() if change is None else change.plan
            allocation = find_allocation(wanted, os.environ, SlurmClient()) if in_job else None
            if not in_job and wanted.layout.kind != "local":
                reachable_slurm()  # which need not be the one that had the run before
            point = prepare_resume(found, begin, steps=change.recipe.trainer.steps if change and overrides else None)
            for step, reason in point.skipped:
                say(f"checkpoint of step {step} is skipped: {reason}", err=True)
            _say_changes(found, accept=accept_changes)
            _try_programs(found, change)
            if change is not None:
                change.write(found)
            contents = RunContents.read(found)
            if (original := original_of(found, contents.record)) is not None:
                say(f"{found.name} is a copy of {original}: it goes on as a run of its own", err=True)
            keep_snapshot(found, take_snapshot(found, found.recipe(), contents.plan))
            request_restart(found, begin)
            if swept := end_leftovers(found):
                say(f"ended {swept} processes that an earlier attempt had left behind", err=True)
            submit_attempt(contents, in_job=allocation)
    except RunDirError as error:
        if not overrides:
            raise
        raise RunDirError(f"{error}\n    changed nothing: --set {' --set '.join(overrides)}") from error
    say(_what_it_tries(found, begin, point), err=True)
    follow_or_tell(found, follow)


def _try_programs(run: RunDir, change: _Change | None) -> None:
    """Try what roles of the next attempt execute (ConfigError with all that cannot be started)."""
    from hpcrl.cli.progress import working
    from hpcrl.config.load import Loaded
    from hpcrl.submit.prepare import check_programs

    recipe, cluster, plan = (run.recipe(), run.cluster(), run.plan()) if change is None else change[:3]
    with working("looking whether it would start"):
        notes = check_programs(Loaded(recipe, run.recipe_path, {}), Loaded(cluster, run.cluster_path, {}), plan)
    for note in notes:
        say(f"note: {note}", err=True)


def _say_changes(run: RunDir, *, accept: bool) -> None:
    """Say what the run would run that it did not before; refuse where the recipe says so (RunDirError)."""
    from hpcrl.errors import RunDirError
    from hpcrl.runs.registry import reference
    from hpcrl.runs.start.snapshot import changes_since_submit

    changes = changes_since_submit(run)
    if changes and run.recipe().job.on_change == "stop" and not accept:
        raise RunDirError(
            f"{run.name} would run something else than before, and job.on_change is stop; nothing was changed\n"
            + "".join(f"  {change}\n" for change in changes)
            + f"    hint: bring back what it was (copies and the diff are in {run.snapshots_dir})\n"
            f"    hint: hpcrl resume {reference(run)} --accept-changes"
        )
    for change in changes:
        say(f"changed since it was last submitted: {change}", err=True)


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


class _Change(NamedTuple):
    """The configuration of a run anew, before it is written."""

    recipe: Recipe
    cluster: ClusterProfile
    plan: Plan
    lines: list[str]

    def write(self, run: RunDir) -> None:
        run.write_configuration(self.recipe, self.cluster, self.plan)
        for line in self.lines:
            say(f"changed {line}", err=True)


def _plan_change(run: RunDir, overrides: list[str]) -> _Change:
    """The configuration of a run with changes of its recipe; nothing is written."""
    from hpcrl.config.joined import for_job
    from hpcrl.config.load import Loaded
    from hpcrl.config.rules.table import check_rules
    from hpcrl.jobplan import change_recipe, make_plan

    loaded, lines = change_recipe(run.recipe_path, overrides)
    site = for_job(loaded, Loaded(run.cluster(), run.cluster_path, {}))
    check_rules(loaded, site)
    return _Change(loaded.value, site.value, make_plan(loaded.value, site.value, run.name, run.path), lines)


def _renewal(run: RunDir) -> _Change | None:
    """A new plan for a run that was planned before servers were told to want the run's token; None for others."""
    from hpcrl.credentials import TOKEN_FILE

    if (run.path / TOKEN_FILE).exists():
        return None
    change = _plan_change(run, [])
    return change._replace(lines=["plan: servers of the run answer those alone who bring its token"])
