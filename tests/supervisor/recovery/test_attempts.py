"""Whether one more attempt is worth its nodes, and saving before one ends."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import time
from pathlib import Path

import msgspec
import pytest
from supervisor_testing import create

from hpcrl.checkpoints.history import add_saved
from hpcrl.config.cluster_slurm import SIGNAL_EARLY_S
from hpcrl.config.plan import Plan
from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import MetricsWriter, StepRecord
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.reserve import keep_start_reserve
from hpcrl.runs.role import save_answer_path, save_request_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.storage.files import write_json
from hpcrl.supervisor.recovery.attempts import (
    LEAVE_S,
    begin_attempt,
    exhausted,
    has_trained,
    lead_s,
    may_retry,
    newest_checkpoint,
    retries,
    save_now,
    with_measured_lead,
)
from hpcrl.supervisor.status.status_writer import StatusWriter


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(tmp_path)


def plan(run: RunDir, *, requeue: bool = True, max_attempts: int = 9, max_without_progress: int = 3) -> Plan:
    plan = run.plan()
    limits = {"requeue": requeue, "max_attempts": max_attempts, "max_without_progress": max_without_progress}
    return plan.model_copy(update={"attempts": plan.attempts.model_copy(update=limits)})


def began(run: RunDir, attempt: int, checkpoint_step: int | None) -> None:
    """What the supervisor records when an attempt begins."""
    events = EventWriter(run, attempt=attempt, writer="supervisor")
    events.emit("attempt.started", checkpoint_step=checkpoint_step)
    events.close()


def checkpoint(run: RunDir, step: int) -> None:
    (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True)


def resumed_after(run: RunDir, attempt: int) -> None:
    record = RunRecord.read(run)
    submission = Submission(submitted_at_s=0.0, executor="slurm", job_id="7", folder="", after_attempt=attempt)
    msgspec.structs.replace(record, submissions=[*record.submissions, submission]).write(run)


def test_attempts_in_a_row_without_progress(run: RunDir) -> None:
    for attempt in (1, 2):
        began(run, attempt, None)
    assert exhausted(run, plan(run), 3) == ""
    began(run, 3, None)
    assert "3 attempts in a row started before the first checkpoint" in exhausted(run, plan(run), 4)


def test_a_new_checkpoint_is_progress(run: RunDir) -> None:
    for attempt in (1, 2, 3):
        began(run, attempt, None)
    checkpoint(run, 10)
    assert exhausted(run, plan(run), 4) == ""
    for attempt in (4, 5, 6):
        began(run, attempt, 10)
    assert "at the checkpoint of step 10" in exhausted(run, plan(run), 7)
    checkpoint(run, 20)
    assert exhausted(run, plan(run), 7) == ""


def test_attempts_that_began_at_different_checkpoints_came_further(run: RunDir) -> None:
    """Also where the last one began at the newest."""
    checkpoint(run, 10)
    for attempt in (1, 2):
        began(run, attempt, 10)
    checkpoint(run, 20)
    began(run, 3, 20)
    assert exhausted(run, plan(run), 4) == ""
    for attempt in (4, 5):
        began(run, attempt, 20)
    assert "3 attempts in a row started at the checkpoint of step 20" in exhausted(run, plan(run), 6)


def test_a_checkpoint_below_a_damaged_one_is_progress(run: RunDir) -> None:
    """The newest entry cannot be restored, and each attempt comes further from the one before it."""
    checkpoint(run, 20)
    for attempt in (1, 2, 3):
        run.start_attempt()
        began(run, attempt, 20)
    assert "at the checkpoint of step 20" in exhausted(run, plan(run), 4)
    assert not may_retry(run, plan(run), began_at=20)
    add_saved(run.checkpoints_dir, step=12, attempt=3)
    assert exhausted(run, plan(run), 4) == ""
    policy = plan(run).attempts.model_copy(update={"retries": 1})
    assert may_retry(run, plan(run).model_copy(update={"attempts": policy}), began_at=20)


def retrying(run: RunDir, retries: int) -> Plan:
    policy = plan(run).attempts.model_copy(update={"retries": retries})
    return plan(run).model_copy(update={"attempts": policy})


def retried(run: RunDir, attempt: int) -> None:
    """What the supervisor records when a new attempt follows a failure."""
    events = EventWriter(run, attempt=attempt, writer="supervisor")
    events.emit("attempt.retried")
    events.close()


def test_who_came_further_may_try_again_as_often_as_the_plan_says(run: RunDir) -> None:
    """A failure before the first joint checkpoint would come again."""
    for _ in range(3):
        run.start_attempt()
    assert not may_retry(run, retrying(run, 2), began_at=None)
    checkpoint(run, 10)
    assert may_retry(run, retrying(run, 2), began_at=None)
    assert may_retry(run, retrying(run, 2), began_at=9)
    assert not may_retry(run, retrying(run, 2), began_at=10)
    assert not may_retry(run, retrying(run, 0), began_at=None)
    retried(run, 1)
    assert may_retry(run, retrying(run, 2), began_at=None)
    retried(run, 2)
    assert not may_retry(run, retrying(run, 2), began_at=None)
    # a person who resumes knows why: those of before do not count, the first one after it does
    resumed_after(run, 2)
    assert may_retry(run, retrying(run, 1), began_at=None)
    retried(run, 3)
    assert not may_retry(run, retrying(run, 1), began_at=None)


def test_what_another_attempt_has_saved_does_not_count(run: RunDir) -> None:
    checkpoint(run, 20)
    for attempt in (1, 2):
        run.start_attempt()
        add_saved(run.checkpoints_dir, step=10 + attempt, attempt=attempt)
    assert may_retry(run, retrying(run, 1), began_at=20)
    run.start_attempt()
    assert not may_retry(run, retrying(run, 1), began_at=20)


#: whether a new attempt may follow, of all kinds of ends
PASSING = {
    CauseKind.ERROR: True,
    CauseKind.EXIT: True,
    CauseKind.EARLY_EXIT: True,
    CauseKind.GUARD_LOST: True,
    CauseKind.HUNG: True,
    CauseKind.STALE: True,
    CauseKind.WRONG_WEIGHTS: True,
    CauseKind.START_TIMEOUT: True,
}


@pytest.mark.parametrize("kind", list(CauseKind))
def test_failures_that_may_pass_are_followed_by_another_attempt(run: RunDir, kind: CauseKind) -> None:
    """And what a person, Slurm or the command line decided is not."""
    run.start_attempt()
    checkpoint(run, 10)
    cause = Cause(kind=kind, time_s=1.0, message="it ended")
    assert retries(run, retrying(run, 1), cause, began_at=None) is PASSING.get(kind, False)
    assert not retries(run, retrying(run, 1), None, began_at=None)
    assert not retries(run, retrying(run, 1), cause, began_at=10)


def test_whether_what_is_run_has_worked_here(run: RunDir) -> None:
    run.start_attempt()
    run.checkpoints_dir.mkdir()
    assert not has_trained(run)
    add_saved(run.checkpoints_dir, step=10, attempt=1)
    assert has_trained(run)
    resumed_after(run, 1)
    assert not has_trained(run)
    add_saved(run.checkpoints_dir, step=20, attempt=2)
    assert has_trained(run)


def saved_in(run: RunDir, seconds: float) -> None:
    events = EventWriter(run, attempt=1, writer="trainer")
    events.emit("trainer.checkpoint_saved", step=1, seconds=seconds)
    events.close()


def step_of(step: int, phases_s: dict[str, float]) -> StepRecord:
    """The record of a step of which nothing matters but its times."""
    empty: dict[type, object] = {float: 0.0, int: 0}
    values = {each.name: empty.get(each.type, {}) for each in msgspec.structs.fields(StepRecord) if each.required}
    return StepRecord(**{**values, "attempt": 1, "step": step, "phases_s": phases_s})  # type: ignore[arg-type]


def test_the_warning_comes_early_enough_for_a_step_and_two_saves(run: RunDir) -> None:
    """Before the first save as the site says; then by what was measured, and the plan says so too."""
    run.start_attempt()
    warned = run.plan()
    warned = warned.model_copy(update={"attempts": warned.attempts.model_copy(update={"signal_lead_s": 500})})
    assert lead_s(run, warned) == 500
    assert with_measured_lead(run, warned) is warned
    for seconds in (30.0, 40.0, 20.0):
        saved_in(run, seconds)
    assert lead_s(run, warned) == 2 * 40 + LEAVE_S + SIGNAL_EARLY_S
    metrics = MetricsWriter(run, 1)
    for step, seconds in enumerate((7.0, 11.5, 9.0), start=1):
        metrics.write(step_of(step, {"wait": 1.0, "optimizer": seconds - 1.0}))
    metrics.close()
    wanted = math.ceil(11.5 + 2 * 40 + LEAVE_S + SIGNAL_EARLY_S)
    assert lead_s(run, warned) == wanted
    assert with_measured_lead(run, warned).attempts.signal_lead_s == wanted
    assert run.plan().attempts.signal_lead_s == wanted
    # a job that is not warned stays so
    silent = warned.model_copy(update={"attempts": warned.attempts.model_copy(update={"signal_lead_s": 0})})
    assert lead_s(run, silent) == 0


def test_the_number_of_attempts_is_bounded(run: RunDir) -> None:
    for attempt in range(1, 5):
        began(run, attempt, attempt)
        checkpoint(run, attempt)
    assert exhausted(run, plan(run, max_attempts=4), 4) == ""
    assert "job.max_attempts are 4" in exhausted(run, plan(run, max_attempts=4), 5)


def test_a_resume_counts_anew(run: RunDir) -> None:
    for attempt in (1, 2, 3):
        began(run, attempt, None)
    assert exhausted(run, plan(run), 4)
    resumed_after(run, 3)
    assert exhausted(run, plan(run), 4) == ""


def test_without_requeue_every_attempt_is_a_persons(run: RunDir) -> None:
    for attempt in range(1, 20):
        began(run, attempt, None)
    assert exhausted(run, plan(run, requeue=False, max_attempts=1), 20) == ""


def test_a_supervisor_that_wakes_up_leaves_the_status_to_the_newer_attempt(run: RunDir) -> None:
    boards = []
    for _ in range(2):
        boards.append(StatusWriter(run, run_id="r", attempt=run.start_attempt()))
        boards[-1].enter(RunState.RUNNING)
        boards[-1].close()
    old = boards[0]
    old.enter(RunState.FAILED)
    old.close()
    status = RunStatus.read(run)
    assert status is not None
    assert (status.attempt, status.state) == (2, RunState.RUNNING)


@pytest.mark.parametrize("step", [13, None])
async def test_saving_waits_for_the_answer(run: RunDir, step: int | None) -> None:
    checkpoint(run, 10)
    run.start_attempt()
    saving = asyncio.create_task(save_now(run, 1, timeout_s=60.0))
    async with asyncio.timeout(60.0):
        while not save_request_path(run, 1).exists():
            await asyncio.sleep(0.01)
        checkpoint(run, 12)  # of a save that was under way: not what was asked for
        await asyncio.sleep(0.5)
        assert not saving.done()
        write_json(save_answer_path(run, 1), {"step": step, "reason": ""})
        assert await saving == step


@pytest.mark.parametrize("unreadable", [b"{", b"{}", b"[]", b'{"step": '])
async def test_an_answer_that_cannot_be_read_yet_is_read_again(run: RunDir, unreadable: bytes) -> None:
    run.start_attempt()
    saving = asyncio.create_task(save_now(run, 1, timeout_s=60.0))
    answer = save_answer_path(run, 1)
    async with asyncio.timeout(60.0):
        while not save_request_path(run, 1).exists():
            await asyncio.sleep(0.01)
        answer.write_bytes(unreadable)
        await asyncio.sleep(0.3)
        assert not saving.done()
        write_json(answer, {"step": 14, "reason": ""})
        assert await saving == 14


async def test_a_request_to_save_says_who_asks_and_since_when(run: RunDir) -> None:
    run.start_attempt()
    before_s = time.time()
    await save_now(run, 1, timeout_s=0.3)
    assert reports.flush(30.0, directory=run.path)
    asked = json.loads(save_request_path(run, 1).read_text())
    assert asked["pid"] == os.getpid()
    assert before_s <= asked["time_s"] <= time.time()


class Refusing(RunDir):
    """A run whose first attempts to begin are refused."""

    refusals: list[OSError]

    def start_attempt(self) -> int:
        if self.refusals:
            raise self.refusals.pop(0)
        return super().start_attempt()


def refusing(run: RunDir, number: int, *, times: int) -> RunDir:
    kept = Refusing(run.path)
    kept.refusals = [OSError(number, os.strerror(number)) for _ in range(times)]
    return kept


def test_an_attempt_begins_with_the_patience_that_it_was_given(run: RunDir) -> None:
    keep_start_reserve(run)
    assert begin_attempt(run, limit_s=30.0) == (1, 30.0)
    # what is refused for a moment is waited for
    assert begin_attempt(refusing(run, errno.ENOSPC, times=1), limit_s=30.0) == (2, 30.0)
    assert (run.path / ".reserve-start").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_attempt_without_space_begins_with_what_was_kept_for_its_words(run: RunDir, number: int) -> None:
    """It was waited for already: there is no patience left."""
    keep_start_reserve(run)
    assert begin_attempt(refusing(run, number, times=1), limit_s=0.0) == (1, 0.0)
    assert not (run.path / ".reserve-start").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_an_attempt_that_is_refused_for_another_reason_does_not_begin(run: RunDir, number: int) -> None:
    keep_start_reserve(run)
    with pytest.raises(OSError, match=os.strerror(number)):
        begin_attempt(refusing(run, number, times=2), limit_s=0.0)
    assert run.attempts() == []
    assert (run.path / ".reserve-start").exists()


def test_before_its_first_attempt_a_run_has_nothing_to_try_again(run: RunDir) -> None:
    assert not may_retry(run, retrying(run, 1), began_at=None)
    assert not has_trained(run)
    assert newest_checkpoint(run) is None


def test_the_lead_follows_the_last_fifty_steps(run: RunDir) -> None:
    """Not the first one, which compiles."""
    run.start_attempt()
    saved_in(run, 40.0)
    warned = run.plan()
    warned = warned.model_copy(update={"attempts": warned.attempts.model_copy(update={"signal_lead_s": 500})})
    metrics = MetricsWriter(run, 1)
    for step in range(1, 51):
        metrics.write(step_of(step, {"optimizer": 900.0 if step == 1 else 10.0}))
    assert reports.flush(30.0, directory=run.path)
    assert lead_s(run, warned) == 900 + 80 + LEAVE_S + SIGNAL_EARLY_S
    metrics.write(step_of(51, {"optimizer": 10.0}))
    metrics.close()
    assert lead_s(run, warned) == 10 + 80 + LEAVE_S + SIGNAL_EARLY_S


def test_attempts_in_a_row_are_those_that_began_and_the_last_of_them(run: RunDir) -> None:
    """One that ended before it began is none, and an older one that began elsewhere is passed over."""
    checkpoint(run, 10)
    began(run, 1, 5)
    for attempt in (2, 4, 5):
        began(run, attempt, 10)
    assert "3 attempts in a row started at the checkpoint of step 10" in exhausted(run, plan(run), 6)
    add_saved(run.checkpoints_dir, step=9, attempt=1)
    assert exhausted(run, plan(run), 6)
    add_saved(run.checkpoints_dir, step=9, attempt=2)
    assert exhausted(run, plan(run), 6) == ""


def test_attempts_are_bounded_where_only_failures_are_retried(run: RunDir) -> None:
    limits = {"requeue": False, "retries": 2, "max_attempts": 4}
    policy = plan(run).attempts.model_copy(update=limits)
    assert exhausted(run, plan(run).model_copy(update={"attempts": policy}), 4) == ""
    said = exhausted(run, plan(run).model_copy(update={"attempts": policy}), 5)
    assert said == "the run had 4 attempts, job.max_attempts are 4"


async def test_saving_gives_up_in_time(run: RunDir) -> None:
    run.start_attempt()
    assert await save_now(run, 1, timeout_s=0.3) is None
