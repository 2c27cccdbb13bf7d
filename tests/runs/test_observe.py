"""The state of a run, also when nobody is left to say it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from runs_testing import GONE, START_S, make_run, write_event, write_status, write_steps

from hpcrl.errors import RunDirError
from hpcrl.runs import job_facts
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.observe import observe, observe_all
from hpcrl.runs.record import RunRecord
from hpcrl.runs.resume_request import find_resume_point
from hpcrl.runs.run_progress import read_evaluations, read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ProcessId, RunState, RunStatus


def myself() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def resubmit(run: RunDir, **changes: object) -> None:
    record = RunRecord.read(run)
    submission = msgspec.structs.replace(record.submissions[-1], **changes)
    msgspec.structs.replace(record, submissions=[submission]).write(run)


def test_the_status_of_a_live_supervisor_is_trusted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING, supervisor=myself())
    view = observe(run)
    assert (view.state, view.attempt, view.pid) == (RunState.RUNNING, 1, os.getpid())
    assert {c.state for c in view.components} == {ComponentState.READY}


def test_readiness_is_reported_for_the_current_attempt_only(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert RunStatus.ready_since(run, 1, "engine", 0) is None
    write_status(run, RunState.RUNNING)
    assert RunStatus.ready_since(run, 1, "engine", 0) == START_S + 12
    assert RunStatus.ready_since(run, 1, "engine", 1) is None
    assert RunStatus.ready_since(run, 2, "engine", 0) is None
    write_status(run, RunState.RUNNING, component_state=ComponentState.RESTARTING)
    assert RunStatus.ready_since(run, 2, "engine", 0) is None
    run.status_path.unlink()
    run.status_path.mkdir()  # it cannot be read
    assert RunStatus.ready_since(run, 2, "engine", 0) is None


def test_a_dead_supervisor_without_an_end_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING)
    view = observe(run)
    assert view.state is RunState.LOST
    assert view.ended_at_s == START_S + 100, "its last heartbeat"
    assert {c.state for c in view.components} == {ComponentState.LOST}
    assert view.cause is not None
    assert view.cause.kind is CauseKind.SUPERVISOR_LOST


def test_the_guards_know_when_it_was_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING)
    write_event(run, "guard.supervisor_lost", time_s=START_S + 77, writer="guard-engine-0")
    view = observe(run)
    assert view.ended_at_s == START_S + 77
    assert view.cause is not None
    assert "the guards ended the roles" in view.cause.message


def test_a_pid_that_was_given_away_again_is_not_the_supervisor(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING, supervisor=msgspec.structs.replace(myself(), start_ticks=1))
    assert observe(run).state is RunState.LOST


def test_a_reboot_loses_the_run_even_if_the_pid_matches(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING, supervisor=msgspec.structs.replace(myself(), boot_id="another boot"))
    assert observe(run).state is RunState.LOST


@pytest.mark.parametrize(("silent_s", "state"), [(30.0, RunState.RUNNING), (120.0, RunState.LOST)])
def test_on_another_machine_the_heartbeat_decides(tmp_path: Path, silent_s: float, state: RunState) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING, supervisor=msgspec.structs.replace(GONE, host="elsewhere"))
    assert observe(run, now_s=START_S + 100 + silent_s).state is state


def test_a_supervisor_that_died_while_stopping_had_given_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cause = Cause(kind=CauseKind.EXIT, time_s=START_S + 50, message="engine 0 was killed by SIGKILL", role="engine")
    write_status(run, RunState.STOPPING, cause=cause)
    view = observe(run)
    assert (view.state, view.cause) == (RunState.FAILED, cause)


@pytest.mark.parametrize(
    ("fact", "state"),
    [
        (None, RunState.RUNNING),
        (JobFact(job_id="7", state="UNKNOWN", warning="Slurm has not answered"), RunState.RUNNING),
        (JobFact(job_id="7", state="COMPLETING", holding=True), RunState.STOPPING),
        (JobFact(job_id="7", state="PENDING", waiting=True), RunState.REQUEUED),
        (JobFact(job_id="7", state="PREEMPTED", ended=True), RunState.FAILED),
        (JobFact(job_id="7", state="UNKNOWN", gone=True), RunState.LOST),
    ],
)
def test_under_slurm_a_silent_supervisor_is_lost_only_when_its_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fact: JobFact | None, state: RunState
) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.RUNNING)
    resubmit(run, executor="slurm", job_id="7", requeues=True)
    monkeypatch.setattr(job_facts, "_sources", [] if fact is None else [lambda _: {"7": fact}])
    assert observe(run).state is state


@pytest.mark.parametrize("before", [None, RunState.RUNNING])
@pytest.mark.parametrize("last", [RunState.COMPLETED, RunState.FAILED, RunState.REQUEUED])
def test_a_last_status_that_is_written_during_a_look_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: RunState | None, last: RunState
) -> None:
    run = make_run(tmp_path)
    resubmit(run, executor="slurm", job_id="7", requeues=True)
    if before is not None:
        write_status(run, before)
    facts = iter([JobFact(job_id="7", state="COMPLETED", ended=True)])
    waiting = JobFact(job_id="7", state="PENDING", waiting=last is RunState.REQUEUED, ended=last is RunState.FAILED)

    def ask(_: object) -> dict[str, JobFact]:
        """The supervisor writes its last status and ends between the read of it and this question."""
        if (fact := next(facts, None)) is not None:
            write_status(run, last)
        return {"7": fact or waiting}

    monkeypatch.setattr(job_facts, "_sources", [ask])
    view = observe(run)
    assert (view.state, view.job is None) == (last, last is RunState.COMPLETED)


def test_a_last_status_that_is_written_while_a_local_controller_ends_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    resubmit(run, process=GONE)

    def ends(_: ProcessId) -> bool:
        write_status(run, RunState.FAILED)
        return False

    monkeypatch.setattr(ProcessId, "alive", ends)
    assert observe(run).state is RunState.FAILED


def test_a_run_whose_job_has_just_ended_elsewhere_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    resubmit(run, executor="slurm", job_id="7")
    write_status(run, RunState.RUNNING, supervisor=msgspec.structs.replace(GONE, host="elsewhere"))
    end_s = START_S + 500
    fact = JobFact(job_id="7", state="COMPLETED", ended=True, end_s=end_s)
    monkeypatch.setattr(job_facts, "_sources", [lambda _: {"7": fact}])
    view = observe(run, now_s=end_s + 59)
    assert (view.state, view.ended_at_s) == (RunState.STOPPING, None)
    assert view.warnings == ["job 7 has ended (COMPLETED), and the supervisor's last status is not visible here yet"]
    assert observe(run, now_s=end_s + 61).state is RunState.LOST
    # where the supervisor's end is visible there is nothing to wait for
    write_status(run, RunState.RUNNING, supervisor=GONE)
    assert observe(run, now_s=end_s + 1).state is RunState.LOST


def test_a_submission_is_alive_with_its_controller(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    resubmit(run, process=myself())
    assert observe(run).state is RunState.SUBMITTED
    resubmit(run, process=GONE)
    assert observe(run).state is RunState.LOST
    resubmit(run, process=GONE, cancel_requested_at_s=START_S + 2, cancelled_by="me")
    view = observe(run)
    assert view.state is RunState.CANCELLED
    assert view.cause is not None
    assert view.cause.message == "cancelled by me"


def test_a_supervisor_that_wrote_no_word_left_some_in_submitits_log(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    folder = tmp_path / "submitit"
    folder.mkdir()
    resubmit(run, folder=str(folder), job_id="77", process=GONE)
    view = observe(run)
    assert view.cause is not None
    assert view.cause.message == f"the supervisor ended before it wrote its status; submitit's log is in {folder}"
    (folder / "77_0_log.err").write_text("Traceback\nOSError: [Errno 116] Stale file handle: 'plan.json'\n\n")
    (folder / "78_0_log.err").write_text("of another submission\n")
    view = observe(run)
    assert view.cause is not None
    assert "wrote its status: OSError: [Errno 116] Stale file handle: 'plan.json'; submitit's" in view.cause.message


def test_a_resume_without_an_answer_hides_the_old_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_status(run, RunState.FAILED)
    resubmit(run, process=myself(), after_attempt=1)
    assert observe(run).state is RunState.SUBMITTED


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        observe(RunDir(tmp_path))
    run = make_run(tmp_path)
    run.record_path.write_text('{"half": ')
    with pytest.raises(RunDirError, match="cannot be read"):
        observe(run)
    run.record_path.write_text("{}")
    with pytest.raises(RunDirError, match="cannot be read"):
        observe(run)


@pytest.mark.parametrize("content", ["", "null", "[]", '{"run_id": ', "\0\0"])
def test_a_damaged_status_is_reported_and_hides_no_other_run(content: str, tmp_path: Path) -> None:
    good, damaged = make_run(tmp_path / "runs", name="good"), make_run(tmp_path / "runs", name="damaged")
    write_status(good, RunState.RUNNING, supervisor=myself())
    damaged.status_path.write_text(content)
    with pytest.raises(RunDirError, match=r"status.json cannot be read: .*\n    hint: move it away"):
        observe(damaged)
    assert RunStatus.ready_since(damaged, 1, "engine", 0) is None
    assert [run.name for run, _, _ in observe_all([damaged, good])] == ["good"]


def test_progress_and_the_estimate(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=40)
    assert read_progress(run).eta_s is None
    write_steps(run, 30)
    progress = read_progress(run)
    assert (progress.steps, progress.total_steps, progress.checkpoint_step) == (30, 40, None)
    assert progress.eta_s == pytest.approx(25.0)
    assert [e.version for e in progress.evaluations] == [0, 10, 20, 30]


def test_a_version_that_was_evaluated_twice_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, reward in ((1, 0.1), (2, 0.2)):
        data = {"version": 5, "reward": reward, "by_env": {}, "parts": {}, "prompts": 8}
        write_event(run, "evaluation", time_s=START_S + attempt, attempt=attempt, **data)
    assert [e.reward for e in read_evaluations(run)] == [0.2]


def test_a_resume_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.checkpoints_dir / "step-000010").mkdir(parents=True)
    point = find_resume_point(run)
    assert point.step is None
    assert point.skipped[0][0] == 10


SLURMS_ENDS = [
    ("CANCELLED", RunState.CANCELLED, CauseKind.CANCELLED),
    ("REVOKED", RunState.CANCELLED, CauseKind.CANCELLED),
    ("NODE_FAIL", RunState.FAILED, CauseKind.NODE_FAIL),
    ("BOOT_FAIL", RunState.FAILED, CauseKind.NODE_FAIL),
    ("DEADLINE", RunState.FAILED, CauseKind.TIME_LIMIT),
    ("TIMEOUT", RunState.FAILED, CauseKind.TIME_LIMIT),
    ("PREEMPTED", RunState.FAILED, CauseKind.PREEMPTED),
    ("FAILED", RunState.LOST, CauseKind.SUPERVISOR_LOST),
    ("OUT_OF_MEMORY", RunState.LOST, CauseKind.SUPERVISOR_LOST),
    ("COMPLETED", RunState.LOST, CauseKind.SUPERVISOR_LOST),
]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("end", SLURMS_ENDS, ids=lambda end: end[0])
def test_an_end_by_slurm_has_one_cause_whether_a_supervisor_had_begun_or_not(
    end: tuple[str, RunState, CauseKind], begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, state, kind = end
    run = make_run(tmp_path)
    resubmit(run, executor="slurm", job_id="7", process=None)
    if begun:
        write_status(run, RunState.RUNNING)
    fact = JobFact(job_id="7", state=word, ended=True, reason="why", end_s=START_S + 99)
    monkeypatch.setattr(job_facts, "_sources", [lambda submissions: {"7": fact}])
    view = observe(run, now_s=START_S + 1e6)
    assert view.cause is not None
    assert (view.state, view.cause.kind) == (state, kind)
    assert f"job 7 is {word} (why)" in view.cause.message


def test_a_job_that_slurm_does_not_know_yet_is_not_a_lost_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    resubmit(run, executor="slurm", job_id="7", process=None, submitted_at_s=START_S)
    fact = JobFact(job_id="7", state="UNKNOWN", gone=True)
    monkeypatch.setattr(job_facts, "_sources", [lambda submissions: {"7": fact}])
    view = observe(run, now_s=START_S + 60)
    assert view.state is RunState.SUBMITTED
    assert "does not know job 7 yet" in view.warnings[0]
    assert observe(run, now_s=START_S + 600).state is RunState.LOST
