"""``hpcrl requeue`` under a real Slurm, and what refuses it."""

from __future__ import annotations

import pytest
from slurm_lab import SlurmLab, events, wait_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_requeued_run_goes_on_from_what_it_saved(slurm_lab: SlurmLab) -> None:
    run = slurm_lab.submit("moved", "trainer.steps=4000", "checkpoint.every_steps=1000", "job.layout=hetjob")
    wait_step(run, 4)
    answer = slurm_lab.hpcrl("requeue", run.name, "--yes")
    assert "REQUEUED" in answer.stdout
    assert "waits in the queue" in slurm_lab.hpcrl("requeue", run.name, "--yes", check=False).stderr
    status = slurm_lab.wait_state(run, ["RUNNING"], 90)
    assert status["attempt"] == 2
    assert status["usage"]["gpu_hours"] > 0
    assert events(run, "trainer.restored")[0].data["step"] >= 4
    slurm_lab.hpcrl("cancel", run.name, "--yes")
    ended = slurm_lab.hpcrl("requeue", run.name, "--yes", check=False)
    assert ended.returncode == 2
    assert f"hpcrl resume {run.name}" in ended.stderr
