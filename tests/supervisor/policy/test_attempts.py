"""Whether one more attempt is worth its nodes, and saving before one ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from supervisor_testing import create

from hpcrl.checkpoints.history import add_saved
from hpcrl.config.plan import Plan
from hpcrl.fs import write_json
from hpcrl.runs.events import EventWriter
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.role import save_answer_path, save_request_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.supervisor.board import Board
from hpcrl.supervisor.policy.attempts import exhausted, may_retry, save_now


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
    assert "3 attempts in a row began before the first checkpoint" in exhausted(run, plan(run), 4)


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
        boards.append(Board(run, run_id="r", attempt=run.start_attempt()))
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
    saving = asyncio.create_task(save_now(run, 1, timeout_s=20.0))
    async with asyncio.timeout(10.0):
        while not save_request_path(run, 1).exists():
            await asyncio.sleep(0.01)
        checkpoint(run, 12)  # of a save that was under way: not what was asked for
        await asyncio.sleep(0.5)
        assert not saving.done()
        write_json(save_answer_path(run, 1), {"step": step, "reason": ""})
        assert await saving == step


async def test_saving_gives_up_in_time(run: RunDir) -> None:
    run.start_attempt()
    assert await save_now(run, 1, timeout_s=0.3) is None
