"""Going on with a run that has ended: its next attempt is prepared as a new run is, and handed over."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.joined import for_job
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.table import check_rules
from hpcrl.config.user_file import with_user_notifiers
from hpcrl.errors import RunDirError, UsageError
from hpcrl.jobplan import change_recipe, make_plan
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.planning.memory.sandbox_notes import with_sandbox_limit
from hpcrl.runs.contents import RunContents
from hpcrl.runs.copies import original_of
from hpcrl.runs.record import user_name
from hpcrl.runs.registry import reference
from hpcrl.runs.resume_request import ResumePoint
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.start.resume import ResumeFrom, request_restart
from hpcrl.runs.start.snapshot import changes_since_submit, keep_snapshot, take_snapshot
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.in_job import find_allocation
from hpcrl.slurm.reach import reach_slurm_of, reachable_slurm
from hpcrl.submit.prepare import examine_attempt
from hpcrl.submit.submission import end_leftovers, prepare_resume, submit_attempt

_RENEWED = "plan: servers of the run accept only requests with its token"


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """Configuration with which a run continues.

    Attributes
    ----------
    changes:
        Differences from the files in the run directory, a line each; None: no difference, and nothing is written.
    """

    recipe: Loaded[Recipe]
    site: Loaded[ClusterProfile]
    plan: Plan
    changes: tuple[str, ...] | None = None

    def write(self, run: RunDir) -> None:
        """Write what has changed into the run directory."""
        if self.changes is not None:
            run.write_configuration(self.recipe.value, self.site.value, self.plan)


def plan_attempt(run: RunDir, overrides: Sequence[str] = ()) -> NextAttempt:
    """Plan the next attempt of a run. Nothing is written.

    Without changes it has the plan that it had; a run that was planned before its servers wanted its token is planned
    anew.

    Raises
    ------
    ConfigError
        The changes are wrong, or rules do not hold with them.
    """
    cluster = Loaded(run.cluster(), run.cluster_path, {})
    if not overrides and (run.path / TOKEN_FILE).exists():
        return NextAttempt(recipe=Loaded(run.recipe(), run.recipe_path, {}), site=cluster, plan=run.plan())
    loaded, lines = change_recipe(run.recipe_path, overrides)
    site = for_job(loaded, cluster)
    check_rules(loaded, site)
    plan = with_user_notifiers(make_plan(loaded.value, site.value, run.name, run.path))
    plan = with_sandbox_limit(plan, loaded.value, site.value)
    return NextAttempt(recipe=loaded, site=site, plan=plan, changes=tuple(lines) if overrides else (_RENEWED,))


def resume(
    run: RunDir,
    begin: ResumeFrom | None = None,
    overrides: Sequence[str] = (),
    *,
    accept_changes: bool = False,
    in_job: bool = False,
    after: Sequence[int] = (),
    say: Callable[[str], None] = lambda text: None,
    working: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> ResumePoint:
    """Start the next attempt of a run that has ended.

    Parameters
    ----------
    begin:
        Checkpoint from which it continues; the newest good one by default.
    overrides:
        Changes of its recipe, ``key=value``.
    accept_changes:
        With ``job.on_change: stop``, run what is there now all the same.
    in_job:
        Inside of the allocation of this shell.
    after:
        Slurm jobs that it waits for.
    say:
        Called with reports of findings and actions, a sentence each.
    working:
        Entered while programs of roles are tried, with what is done.

    Returns
    -------
    ResumePoint
        The checkpoint that the trainer will verify and take.

    Raises
    ------
    RunDirError
        The run is alive, another resume is at it, or there is nothing to do. Nothing was changed.
    NothingToRestoreError
        It has saved checkpoints, and none can be restored. Nothing was changed.
    ConfigError
        The changes are wrong, or the attempt has problems. Nothing was changed.
    """
    begin = begin or ResumeFrom()
    if begin.scratch and begin.step is not None:
        raise UsageError("--from-scratch and --from-step exclude each other")
    reach_slurm_of(run)
    try:
        with claimed(run, user=user_name()):
            attempt = plan_attempt(run, overrides)
            allocation = find_allocation(attempt.plan, os.environ, SlurmClient()) if in_job else None
            if not in_job and attempt.plan.layout.kind != "local":
                reachable_slurm()  # this site may differ from the one that had the run before
            point = prepare_resume(run, begin, steps=attempt.recipe.value.trainer.steps if overrides else None)
            for step, reason in point.skipped:
                say(f"checkpoint of step {step} is skipped: {reason}")
            _say_changes(run, accept=accept_changes, say=say)
            with working("checking whether it would start"):
                prepared = examine_attempt(attempt.recipe, attempt.site, attempt.plan)
            prepared.refuse()
            for note in prepared.notes:
                say(f"note: {note}")
            attempt.write(run)
            for line in attempt.changes or ():
                say(f"changed {line}")
            contents = RunContents.read(run)
            if (original := original_of(run, contents.record)) is not None:
                say(f"{run.name} is a copy of {original}: it continues as a separate run")
            keep_snapshot(run, take_snapshot(run, run.recipe(), contents.plan, with_data=True))
            request_restart(run, begin)
            if swept := end_leftovers(run):
                say(f"ended {swept} leftover processes of an earlier attempt")
            submit_attempt(contents, in_job=allocation, after=after)
    except RunDirError as error:
        if not overrides:
            raise
        raise RunDirError(f"{error}\n    changed nothing: --set {' --set '.join(overrides)}") from error
    return point


def _say_changes(run: RunDir, *, accept: bool, say: Callable[[str], None]) -> None:
    """Say what the run would run that it did not before; refuse where the recipe says so (RunDirError)."""
    changes = changes_since_submit(run)
    if changes and run.recipe().job.on_change == "stop" and not accept:
        raise RunDirError(
            f"{run.name} would run other code or environments than before, and job.on_change is stop; nothing "
            "was changed\n"
            + "".join(f"  {change}\n" for change in changes)
            + f"    hint: restore the previous state (copies and the diff are in {run.snapshots_dir})\n"
            f"    hint: hpcrl resume {reference(run)} --accept-changes"
        )
    for change in changes:
        say(f"changed since it was last submitted: {change}")
