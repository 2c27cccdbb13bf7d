"""Handing a run to its supervisor: submit, resume, cancel. The callers have loaded and checked everything."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.errors import RunDirError
from hpcrl.network.credentials import ensure_token
from hpcrl.processes import procfs
from hpcrl.processes.environment_marks import KIND_VARIABLE, LAUNCH_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrl.runs.contents import RunContents
from hpcrl.runs.copies import original_of, with_own_identity
from hpcrl.runs.known import remember
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import Labels, RunRecord, Submission, Withdrawal, this_process
from hpcrl.runs.registry import reference
from hpcrl.runs.reserve import keep_start_reserve, release_reserve
from hpcrl.runs.resume_request import ResumePoint
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.group_access import shared_group
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.start.origin import START_MODEL, ModelOrigin, write_start_model
from hpcrl.runs.start.privacy import check_root, protect
from hpcrl.runs.start.resume import ResumeFrom, plan_resume
from hpcrl.runs.start.snapshot import keep_snapshot, take_snapshot
from hpcrl.runs.status import ProcessId, RunState
from hpcrl.slurm.in_job import InJob
from hpcrl.slurm.scripts import JOB_FOLDER, in_job_script
from hpcrl.storage.files import StagedDirectory, atomic_write
from hpcrl.storage.trusted_paths import CLOSED_UMASK, files_as, umask_of
from hpcrl.submit.jobs import (
    cancel_jobs,
    cancel_replica_jobs,
    find_unrecorded,
    hidden_job,
    signal_job,
    submit_jobs,
    write_submission,
)
from hpcrl.submit.local_executor import DetachedLocalExecutor
from hpcrl.supervisor.job import Supervise
from hpcrl.supervisor.process.sweep import find_leftovers, sweep

_log = logging.getLogger(__name__)
_IN_JOB_SCRIPT = "in-job.sh"
_CANCEL_POLL_S = 0.1


def create_run(
    recipe: Recipe,
    cluster: ClusterProfile,
    plan: Plan,
    *,
    provenance: Mapping[str, str] | None = None,
    source: ModelOrigin | None = None,
    labels: Labels | None = None,
) -> RunContents:
    """Make the directory of a new run: complete at once, or not at all. Starts nothing.

    Parameters
    ----------
    provenance:
        Sources of the recipe's values, by key.
    source:
        Run whose weights it begins with; the recipe's ``model.path`` is then `hpcrl.runs.start.origin.START_MODEL` in
        the run.
    labels:
        Tags, and its place in a sweep.

    Raises
    ------
    RunDirError
        The directory exists, or others could replace it; the message has a hint.
    """
    target = plan.run_dir
    check_vacant(target)
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_root(target.parent)
    stage = StagedDirectory(target, token=f"{procfs.hostname()}-{os.getpid()}")
    previous = os.umask(CLOSED_UMASK)
    try:
        stage.create()
        run = RunDir(stage.path)
        protect(run, cluster.files.group)
        os.umask(umask_of(run.path))
        run.write_configuration(recipe, cluster, plan)
        ensure_token(run.path)
        origin = None if source is None else source.origin
        record = RunRecord.new(
            run, name=plan.run, provenance=provenance or {}, origin=origin, run_dir=target, labels=labels
        )
        record.write(run)
        if source is not None:
            write_start_model(source, run.path / START_MODEL)
        keep_snapshot(run, take_snapshot(run, recipe, plan, with_data=True))
        stage.commit()
    except FileExistsError:  # another process took the name meanwhile
        raise RunDirError(_occupied(target)) from None
    finally:
        os.umask(previous)
        stage.discard()
    run = RunDir(target)
    remember(run, record.run_id)
    return RunContents(run, cluster, plan, record)


def check_vacant(target: Path) -> None:
    """Refuse a directory of a new run that exists (RunDirError with what is there and what can be done)."""
    if os.path.lexists(target):
        raise RunDirError(_occupied(target))


def _occupied(target: Path) -> str:
    run = RunDir(target)
    if not run.record_path.is_file():
        return f"{target} exists and is not a run\n    hint: --name with another name"
    view, named = observe(run), reference(run)
    ways = ["--name with another name"]
    if view.state is RunState.COMPLETED:
        ways.append(f"it completed all its steps; see its report: hpcrl report {named}")
        ways.append(f"continue it: hpcrl resume {named} --set trainer.steps=...")
    elif view.state.ended:
        ways.append(f"continue it: hpcrl resume {named}")
    else:
        ways.append(f"watch it: hpcrl status {named} --watch")
        ways.append(f"end it: hpcrl cancel {named}")
    return f"the run {run.name} exists ({view.state}) in {target}\n" + "\n".join(f"    hint: {way}" for way in ways)


def submit_attempt(contents: RunContents, *, in_job: InJob | None = None, after: Sequence[int] = ()) -> Submission:
    """Hand the next attempt of a run to submitit, and write down whom it was handed to (under Slurm: `submit_jobs`).

    Inside of an allocation that is there (`hpcrl.slurm.in_job.find_allocation`), the supervisor is a process of this
    machine, as in a local run. Its (main) job waits for the end of the jobs ``after``, of whatever kind that is.

    If we die between the two, the supervisor still runs and says so in ``status.json``; a second hand-over is
    refused by `prepare_resume` and by the second supervisor itself.
    """
    with files_as(contents.run.path):  # submitit's files, and those of its controller and of the job
        keep_start_reserve(contents.run)
        record = with_own_identity(contents.run, contents.record)
        return _submit_attempt(contents._replace(record=record), in_job, after)


def _submit_attempt(contents: RunContents, in_job: InJob | None, after: Sequence[int]) -> Submission:
    run, cluster, plan, record = contents
    command = None
    if in_job is not None:
        script = run.path / _IN_JOB_SCRIPT
        assert isinstance(cluster, SlurmCluster)
        atomic_write(script, in_job_script(plan, cluster, run_id=record.run_id, run_dir=run.path).encode())
        command = ["/bin/bash", str(script)]
    elif plan.layout.kind != "local":
        return submit_jobs(contents, after)
    executor = DetachedLocalExecutor(
        run.path / JOB_FOLDER,
        time_limit_s=plan.time_limit_s,
        environment={
            RUN_ID_VARIABLE: record.run_id,
            KIND_VARIABLE: "launch",
            LAUNCH_DIR_VARIABLE: str(run.path.resolve()),
        },
        command=command,
    )
    after_attempt = (run.attempts() or [0])[-1]
    job = executor.submit(Supervise(str(run.path), len(record.submissions) + 1, in_job))
    submission = Submission(
        submitted_at_s=time.time(),
        executor="local",
        job_id=job.job_id,
        folder=str(executor.folder),
        after_attempt=after_attempt,
        process=ProcessId.of(int(job.job_id)),
        in_job="" if in_job is None else str(in_job.job_id),
        submitted_by=this_process(),
    )
    write_submission(run, record.with_submission(submission))
    return submission


def prepare_resume(run: RunDir, begin: ResumeFrom | None = None, *, steps: int | None = None) -> ResumePoint:
    """Check that a run may be resumed, and find its checkpoint. Starts, ends and changes nothing.

    Parameters
    ----------
    begin:
        Checkpoint from which it continues; the newest good one by default.
    steps:
        Optimizer steps of the recipe that it will go on with; those of the run by default.

    Raises
    ------
    RunDirError
        It is alive; or it has done all of these steps.
    NothingToRestoreError
        It has saved checkpoints, and none is there any more whose files have their sizes.
    """
    protect(run, shared_group(run) or run.cluster().files.group)
    record = find_unrecorded(run)
    view = observe(run)
    if not view.state.ended:
        facts: list[str] = [view.state]
        if view.pid is not None:
            facts.append(f"supervisor pid {view.pid} on {view.host}")
        if record.submissions and (who := record.submissions[-1].submitted_by):
            facts.append(f"started by {who}")
        if record.queued and record.sweep is not None:
            facts.append(f"its sweep {record.sweep.sweep} starts it: hpcrl sweep status {record.sweep.sweep}")
        elif not record.submissions:
            facts.append("it has just been created, and no job or process of it is known; try again in a minute")
        raise RunDirError(
            f"the run {run.name} is alive ({', '.join(facts)}); nothing was changed\n"
            f"    hint: watch it: hpcrl status {reference(run)} --watch\n"
            f"    hint: end it first: hpcrl cancel {reference(run)}"
        )
    if view.job is not None and view.job.gone and (state := hidden_job(record)):
        raise RunDirError(
            f"squeue does not know job {view.job.job_id} of {run.name}, and the controller says that it is {state}; "
            "nothing was changed\n"
            f"    hint: wait until both say the same, or end it: scancel {view.job.job_id}"
        )
    return plan_resume(run, begin or ResumeFrom(), completed=view.state is RunState.COMPLETED, steps=steps)


def end_leftovers(run: RunDir) -> int:
    """End processes of a run that has no supervisor any more; returns how many there were on this machine."""
    record = RunRecord.read(run)
    return 0 if original_of(run, record) is not None else len(sweep(record.run_id, run_dir=run.path))


def cancel(run: RunDir, *, user: str) -> RunView:
    """Ask the supervisor to stop, and wait until the run has ended.

    When the time that the plan's roles have to stop is over, the supervisor itself is killed (its guards then end the
    roles).

    Parameters
    ----------
    run:
        The run.
    user:
        User who asks.

    Raises
    ------
    RunDirError
        The run has ended already (left-over processes are ended all the same), or its supervisor is on another
        machine.
    """
    record = find_unrecorded(run)
    if (original := original_of(run, record)) is not None:
        raise RunDirError(
            f"{run.path} is a copy of the run in {original}, which it does not touch; nothing was changed\n"
            f"    hint: end that run: hpcrl cancel {original}\n"
            f"    hint: make the copy a run of its own: hpcrl resume {run.path}; or remove it: hpcrl rm {run.path}"
        )
    if record.queued:
        _withdraw(run, user)
    view = observe(run)
    if view.state is RunState.CANCELLED and not record.submissions:
        return view
    if view.state.ended:
        count, jobs = end_leftovers(run), cancel_replica_jobs(run)
        ended = f"; {count} leftover processes were ended" if count else ""
        ended += f"; leftover jobs were cancelled: {', '.join(map(str, jobs))}" if jobs else ""
        raise RunDirError(f"the run {run.name} has ended already ({view.state}){ended}")
    _put_on_record(run, record.with_cancel(user, time.time()))
    if record.submissions and record.submissions[-1].executor == "slurm":
        return cancel_jobs(run, deadline_s=_stop_deadline_s(run))
    process = _whom_to_ask(run, record, view)
    if process.alive() is None:
        raise RunDirError(
            f"the supervisor of {run.name} runs on {process.host}, this is {procfs.hostname()}\n"
            f"    hint: call hpcrl cancel {reference(run)} on {process.host}"
        )
    request_stop(process)
    deadline = time.monotonic() + _stop_deadline_s(run)
    while not (view := observe(run)).state.ended:
        if time.monotonic() > deadline:
            kill_launch(record.run_id, run)
            break
        time.sleep(_CANCEL_POLL_S)
    end_leftovers(run)
    return observe(run)


def _withdraw(run: RunDir, user: str) -> None:
    """Cancel a member that its sweep has not started, unless it is started at this moment (RunDirError)."""
    with claimed(run, user=user):
        record = RunRecord.read(run)
        if record.queued:
            withdrawal = Withdrawal(user=user, time_s=time.time())
            msgspec.structs.replace(record, withdrawn=withdrawal).write(run)


def _put_on_record(run: RunDir, record: RunRecord) -> None:
    """Record the user who cancels; a full disk does not prevent a cancellation."""
    try:
        record.write(run)
    except OSError:
        release_reserve(run, "roles")
        try:
            record.write(run)
        except OSError as error:
            _log.warning("the user who cancelled %s could not be recorded: %s", run.name, error)


def _stop_deadline_s(run: RunDir) -> float:
    return 2 * sum(group.policy.stop_timeout_s for group in run.plan().groups) + 10.0


def _whom_to_ask(run: RunDir, record: RunRecord, view: RunView) -> ProcessId:
    """Return the supervisor's process; before it has registered, submitit's controller, which passes signals on."""
    if view.supervisor is not None and view.supervisor.alive() is not False:
        return view.supervisor
    if record.submissions and record.submissions[-1].process is not None:
        return record.submissions[-1].process
    raise RunDirError(
        f"the run {run.name} was created and apparently never submitted; there is nothing to cancel\n"
        f"    hint: continue it: hpcrl resume {reference(run)}\n"
        f"    hint: or submit again under its name after removing {run.path}"
    )


def request_stop(process: ProcessId) -> None:
    """Send SIGTERM to a process of this machine, if it is still the same one."""
    found = procfs.read_process(process.pid)
    if found is not None and found.start_ticks == process.start_ticks:
        procfs.send_signal([found], signal.SIGTERM)


def kill_launch(run_id: str, run: RunDir | None = None) -> None:
    """Send SIGKILL to supervisor and controller; the guards see their pipes close and end the roles."""
    found = find_leftovers(run_id, kinds=("launch",), run_dir=None if run is None else run.path)
    procfs.send_signal(found, signal.SIGKILL)


def interrupt(run: RunDir, count: int) -> str:
    """Handle the ``count``-th Ctrl-C of a user who follows the run; return the message.

    The first asks the supervisor to stop in order, the second to kill the roles at once, the third kills the
    supervisor itself (the guards then end the roles).

    Raises
    ------
    RunDirError
        The run was never submitted, as far as can be seen.
    """
    view = observe(run)
    if view.state.ended:
        return f"{run.name} has ended already"
    record = RunRecord.read(run)
    if count == 1:
        _put_on_record(run, record.with_cancel("Ctrl-C", time.time()))
    if record.submissions and record.submissions[-1].executor == "slurm":
        signal_job(run, kill=count > 2)
        return "stopping; Ctrl-C again kills at once" if count == 1 else "killing the roles; Ctrl-C again kills all"
    if count > 2:
        kill_launch(record.run_id, run)
        return "killing the supervisor"
    process = _whom_to_ask(run, record, view)
    if process.alive() is None:
        return f"the supervisor runs on {process.host}: hpcrl cancel {reference(run)} there"
    request_stop(process)
    return "stopping; Ctrl-C again kills at once" if count == 1 else "killing the roles; Ctrl-C again kills all"
