"""Planning a resume: which checkpoint it will try, and whether there is anything left to do."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger
from hpcrl.errors import CheckpointError, RunDirError
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import user_name
from hpcrl.runs.registry import reference
from hpcrl.runs.resume_request import ResumePoint, ResumeRequest, find_resume_point, nothing_to_restore
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.quarantine import list_asides


class ResumeFrom(NamedTuple):
    """Start of a resume: the newest good checkpoint unless one of the two fields is set."""

    scratch: bool = False
    step: int | None = None


def plan_resume(run: RunDir, begin: ResumeFrom, *, completed: bool, steps: int | None = None) -> ResumePoint:
    """Return where a run that has ended resumes. Nothing is changed.

    Parameters
    ----------
    begin:
        Requested start.
    completed:
        Whether the run did all its steps.
    steps:
        Optimizer steps of the recipe to resume with; those of the run by default.

    Raises
    ------
    RunDirError
        The checkpoint does not exist, or all of these steps are done.
    NothingToRestoreError
        The run has saved checkpoints, and none is left whose files have the recorded sizes.
    """
    point = find_resume_point(run)
    if begin.step is not None:
        point = _at(run, point, begin.step)
    elif begin.scratch:
        point = ResumePoint(None, [], point.saved)
    elif point.step is None and point.saved:
        raise nothing_to_restore(run, point.saved, point.skipped)
    total = run.recipe().trainer.steps
    completed = completed and not begin.scratch and begin.step is None
    if steps is not None and not begin.scratch and begin.step is None:
        _check_not_behind(run, steps)
    _check_steps(run, point, completed=completed, steps=total if steps is None else steps, before=total)
    return point


def request_restart(run: RunDir, begin: ResumeFrom) -> None:
    """Write down where the next attempts begin, for their trainer."""
    kind: Literal["newest", "scratch", "step"] = "scratch" if begin.scratch else "newest"
    ResumeRequest(
        begin="step" if begin.step is not None else kind,
        step=begin.step,
        after_attempt=(run.attempts() or [0])[-1],
        time_s=time.time(),
        by=user_name(),
    ).write(run)


def _at(run: RunDir, point: ResumePoint, step: int) -> ResumePoint:
    """Return the resume point of a named checkpoint, in the ledger or quarantined.

    Raises
    ------
    RunDirError
        The checkpoint does not exist.
    NothingToRestoreError
        The files of the checkpoint are damaged.
    """
    paths = {aside.number: aside.path for aside in list_asides(run.checkpoints_dir, "step-")}
    ledger = CheckpointLedger(run.checkpoints_dir)
    paths |= {number: ledger.path_of(number) for number in ledger.steps()}
    if step not in paths:
        there = f"there are {', '.join(map(str, sorted(paths)))}" if paths else "there are none"
        raise RunDirError(f"{step} is not a checkpoint of {run.name}\n    hint: {there}")
    try:
        CheckpointEntry.open(paths[step]).verify(content=False)
    except CheckpointError as error:
        raise nothing_to_restore(run, point.saved, [(step, str(error))], wanted=step) from error
    return ResumePoint(step, [], point.saved)


def _check_not_behind(run: RunDir, steps: int) -> None:
    """Refuse an end that the run has passed already, though its newest checkpoint has not."""
    metrics = read_metrics(run)
    reached = metrics[-1].step if metrics else 0
    if steps >= reached:
        return
    behind = [step for step in CheckpointLedger(run.checkpoints_dir).steps() if step < steps]
    again = f"hpcrl resume {reference(run)} --from-step {behind[-1]} --set trainer.steps={steps}" if behind else ""
    back = f"    hint: discard the later ones: {again}\n" if behind else ""
    raise RunDirError(
        f"the run {run.name} has done {reached} steps, trainer.steps={steps} asks for fewer; nothing was changed\n"
        f"    hint: more steps: hpcrl resume {reference(run)} --set trainer.steps={2 * reached}\n{back}"
        f"    hint: export it as it is: hpcrl checkpoint export {reference(run)} --output DIRECTORY"
    )


def _check_steps(run: RunDir, point: ResumePoint, *, completed: bool, steps: int, before: int) -> None:
    """Refuse a resume without remaining steps."""
    # an attempt that failed after its last step must repeat the end of the run
    done = max(point.step or 0, before if completed else 0)
    if steps > done or (steps == done and not completed):
        return
    asked = "" if steps == before else f", trainer.steps={steps} asks for no more"
    raise RunDirError(
        f"the run {run.name} {'is completed: it' if completed else ''} has done {done} steps{asked}; "
        "there is nothing to resume, and nothing was changed\n"
        f"    hint: more steps: hpcrl resume {reference(run)} --set trainer.steps={2 * done}\n"
        f"    hint: look at it: hpcrl report {reference(run)}\n"
        f"    hint: a new run with its weights: hpcrl submit RECIPE --from {reference(run)}"
    )
