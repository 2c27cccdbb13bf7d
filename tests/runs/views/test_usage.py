"""GPU-hours, the age of the last checkpoint, and where both are shown."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from runs_testing import START_S, make_run, write_event, write_status

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.config.layout import JobComponent, Layout
from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.liveview import render
from hpcrl.runs.views.usage import STATUS_SCHEMA, read_usage, status_document

HOUR = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts of one and two hours on 2 trainer nodes of 8 GPUs and 1 engine node of 4."""
    run = make_run(tmp_path)
    common = {"partition": "gpu", "gres": "gres", "exclusive": True, "cpus": 8, "memory_gib": 1.0}
    layout = Layout(
        kind="hetjob",
        components=(
            JobComponent(roles=("trainer",), nodes=2, gpus_per_node=8, **common),
            JobComponent(roles=("engine",), nodes=1, gpus_per_node=4, **common),
        ),
    )
    plan = run.plan().model_copy(update={"layout": layout})
    run.write_configuration(run.recipe(), run.cluster(), plan)
    for attempt, hours in ((1, 1.0), (2, 2.0)):
        write_status(run, RunState.FAILED)
        for time_s in (0.0, hours * HOUR):
            begin_s = START_S + attempt * 10 * HOUR
            write_event(run, "run.state", time_s=begin_s + time_s, attempt=attempt, writer="supervisor")
    return run


def test_hours_of_all_attempts_count_and_the_queue_does_not(run: RunDir) -> None:
    usage = read_usage(run, observe(run))
    assert usage.wall_h == pytest.approx(3.0)
    assert usage.gpu_hours == pytest.approx(60.0)
    assert usage.gpu_hours_by_role == pytest.approx({"trainer": 48.0, "engine": 12.0})


def test_a_run_that_lives_counts_until_now(run: RunDir) -> None:
    write_status(run, RunState.RUNNING)
    begin_s = START_S + 30 * HOUR
    write_event(run, "run.state", time_s=begin_s, attempt=3, writer="supervisor")
    view = observe(run, now_s=START_S + 101)
    alive = type(view)(**{name: getattr(view, name) for name in view.__struct_fields__} | {"state": RunState.RUNNING})
    assert read_usage(run, alive, now_s=begin_s + HOUR / 2).wall_h == pytest.approx(3.5)


def test_a_torn_last_event_is_passed_over(run: RunDir) -> None:
    with (run.events_dir / "0002-supervisor.jsonl").open("ab") as stream:
        stream.write(b'{"time_s": 9e9, "att')
    assert read_usage(run, observe(run)).wall_h == pytest.approx(3.0)


def test_status_shows_hours_and_the_age_of_the_checkpoint(run: RunDir) -> None:
    path = CheckpointLedger(run.checkpoints_dir).path_of(20)
    path.mkdir(parents=True)
    os.utime(path, (path.stat().st_mtime - 125, path.stat().st_mtime - 125))
    document = json.loads(status_document(run))
    assert document["schema"] == STATUS_SCHEMA
    assert document["usage"]["gpu_hours"] == pytest.approx(60.0)
    assert document["progress"]["checkpoint_age_s"] == pytest.approx(125, abs=5)
    console = Console(file=io.StringIO(), width=120)
    view = observe(run)
    console.print(render(view, read_progress(run), [], read_usage(run, view)))
    assert "60.0 GPU-hours" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_queue_of_a_resumed_run_is_not_locked(run: RunDir) -> None:
    """It shows the attempt before as its newest one until the next begins."""
    write_status(run, RunState.FAILED)
    record = RunRecord.read(run)
    again = replace(record.submissions[-1], executor="slurm", job_id="7", process=None, after_attempt=99)
    record.with_submission(again).write(run)
    view = observe(run)
    assert view.state is RunState.SUBMITTED
    assert read_usage(run, replace(view, attempt=2), now_s=START_S + 1000 * HOUR).wall_h == pytest.approx(3.0)


def test_slurm_says_whether_a_run_holds_its_nodes(run: RunDir) -> None:
    write_status(run, RunState.RUNNING)
    alive = replace(observe(run), state=RunState.RUNNING, attempt=2)
    for job, hours in (
        (JobFact(job_id="7", state="RUNNING", holding=True), 1.0 + 10.0),
        (JobFact(job_id="7", state="PENDING", waiting=True), 3.0),
        (JobFact(job_id="7", state="UNKNOWN"), 3.0),
    ):
        usage = read_usage(run, replace(alive, job=job), now_s=START_S + 30 * HOUR)
        assert usage.wall_h == pytest.approx(hours), job.state
