"""An attempt that was thought dead wakes up and writes: nothing of it is taken for the newer attempt's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import wait_for
from runs_testing import START_S, make_run, step_record, write_event

from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.errors import FencedError
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import MetricsWriter, read_metrics
from hpcrl.runs.role import restore_path
from hpcrl.runs.run_progress import read_evaluations
from hpcrl.runs.rundir import RunDir

#: what trainer rank 0 and the orchestrator of an attempt write, a step each time a line comes
OLD_ATTEMPT = """
import sys
from pathlib import Path
from runs_testing import step_record
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.runs.events import EventWriter
from hpcrl.runs.metrics import MetricsWriter
from hpcrl.runs.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
metrics, files = MetricsWriter(run, 1), RolloutFiles.claim(run.rollouts_dir, 1)
events = EventWriter(run, attempt=1, writer="orchestrator-0")
for step in map(int, sys.stdin):
    metrics.write(step_record(step, attempt=1))
    metrics.flush(5.0)
    data = {"version": step, "reward": 0.1, "by_env": {}, "parts": {}, "prompts": 8}
    events.emit("evaluation", **data)
    files.write(step, b"attempt 1", wait_s=5.0)
    print("written", flush=True)
"""


def decide(run: RunDir, attempt: int, step: int | None) -> None:
    decision = RestoreDecision(step=step, verified="content", seconds=0.0, skipped=[])
    decision.write(restore_path(run, attempt))


def test_an_old_attempt_that_wakes_up_mixes_with_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.start_attempt()
    decide(run, 1, None)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests/runs", *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", OLD_ATTEMPT, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
    ) as old:
        assert old.stdin is not None
        assert old.stdout is not None

        def step(number: int) -> None:
            old.stdin.write(f"{number}\n")
            old.stdin.flush()

        try:
            for number in (1, 2, 3):
                step(number)
                assert old.stdout.readline() == "written\n"
            old.send_signal(signal.SIGSTOP)
            for number in (4, 5, 6):
                step(number)  # what it does as soon as it wakes up

            run.start_attempt()
            decide(run, 2, 2)
            assert [r.step for r in read_metrics(run)] == [1, 2]  # step 3 is taken back, before the new one has a step
            metrics, files = MetricsWriter(run, 2), RolloutFiles.claim(run.rollouts_dir, 2)
            for number in (3, 4):
                metrics.write(step_record(number, attempt=2))
                files.write(number, b"attempt 2", wait_s=5.0)
            metrics.close()
            data = {"version": 4, "reward": 0.2, "by_env": {}, "parts": {}, "prompts": 8}
            write_event(run, "evaluation", time_s=START_S, attempt=2, writer="orchestrator-0", **data)

            old.send_signal(signal.SIGCONT)
            for _ in (4, 5, 6):
                assert old.stdout.readline() == "written\n"  # so it believes
            old.stdin.close()
        except BaseException:
            old.kill()  # a stopped one would be waited for
            raise
    wait_for(lambda: len(read_events(run, attempt=1, kind="evaluation")) == 6, 10, "events of the old attempt")
    assert [(r.step, r.attempt) for r in read_metrics(run)] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [(e.version, e.reward) for e in read_evaluations(run)] == [(1, 0.1), (2, 0.1), (4, 0.2)]
    assert (run.rollouts_dir / "step-000004.jsonl").read_bytes() == b"attempt 2"
    assert not (run.rollouts_dir / "step-000005.jsonl").exists()
    with pytest.raises(FencedError):
        RolloutFiles.claim(run.rollouts_dir, 1)


def test_records_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """One file for all attempts, and no decisions."""
    run = make_run(tmp_path)
    first = MetricsWriter(run, 1)
    first.write(step_record(1))
    first.close()
    os.rename(run.metrics_dir / "0001.jsonl", run.metrics_path)
    later = MetricsWriter(run, 2)
    for number in (2, 3):
        later.write(step_record(number, attempt=2))
    later.close()
    assert [(r.step, r.attempt) for r in read_metrics(run)] == [(1, 1), (2, 2), (3, 2)]
