"""Workers of environments that are killed and stopped in a real run: what that costs, and how soon they are back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, after, component, events, steps, wait_step
from patience import wait_for

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
WORKERS_RUN = (
    "environments=[{name: reverse, kind: custom, factory: 'waiting_environment:Waiting', args: {wait_s: 1.0}}]",
    "environment_workers.count=2",
    "rollouts.rollouts_per_step=8",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=16",
    "evaluation.every_steps=0",
    "evaluation.prompts=8",
    "checkpoint.every_steps=0",
    "trainer.steps=60",
)


def fault(run: RunDir, replica: int, number: signal.Signals) -> dict[str, float]:
    """Signal a worker; returns the seconds until it was lost, and until it was back."""
    pid = component(run, "env", replica).pid
    assert pid is not None
    fault_s = time.time()
    os.kill(pid, number)
    lost = wait_for(lambda: after(run, fault_s, "env.lost", replica=replica), 10.0, "env.lost")
    back = wait_for(lambda: after(run, fault_s, "env.back", replica=replica), 15.0, "env.back")
    return {"lost": round(lost[0] - fault_s, 2), "back": round(back[0] - fault_s, 2)}


def test_a_run_continues_without_a_worker_until_it_is_back(lab: Lab, capsys: Any) -> None:
    lab.env["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = lab.submit("workers", *WORKERS_RUN)
    wait_step(run, 2)
    killed = fault(run, 0, signal.SIGKILL)
    stopped = fault(run, 1, signal.SIGSTOP)
    with capsys.disabled():
        print(f"\nworker killed: {killed}; worker stopped: {stopped}")
    lab.complete(run)
    assert list(steps(run)) == list(range(1, 61))
    assert run.attempts() == [1]
    lost = events(run, "env.lost")
    counts = max(steps(run).values(), key=lambda record: record.step).rollouts
    # what was lost with the workers, and no more
    assert [event.data["replica"] for event in lost] == [0, 1]
    assert 0 < counts["dropped_environment"] <= sum(event.data["calls"] for event in lost)
    assert [component(run, "env", replica).restarts for replica in (0, 1)] == [1, 1]
    assert "nothing was lost, and nothing trained twice" in lab.hpcrl("rollouts", "verify", run.name).stdout
