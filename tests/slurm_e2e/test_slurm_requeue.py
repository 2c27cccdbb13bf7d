"""A run that saves and goes on in its job: asked by Slurm's warning, and by ``hpcrl requeue``; what refuses that."""

from __future__ import annotations

import pytest
from slurm_lab import ONE_NODE_EACH, SlurmLab, events, job_id, wait_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_warning_or_a_requeue_saves_and_the_run_goes_on(slurm_lab: SlurmLab) -> None:
    passed_on = "job.sbatch_options=[--nice=7, --contiguous]"
    settings = ("trainer.steps=100000", "checkpoint.every_steps=0", "job.layout=hetjob", passed_on)
    run = slurm_lab.submit("moved", *ONE_NODE_EACH, *settings)
    records = slurm_lab.client().details(job_id(run))
    assert {(record["Nice"], record["Contiguous"]) for record in records} == {("7", "1")}
    wait_step(run, 4)

    # the warning before the time limit
    slurm_lab.client().cancel(job_id(run), signal="USR2", batch=True)
    slurm_lab.wait_state(run, ["REQUEUED"])
    status = slurm_lab.wait_state(run, ["RUNNING"])
    assert status["attempt"] == 2
    assert status["job"]["restarts"] == 1
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[0].data["step"] == restored[0].data["step"] >= 4

    # a person's wish
    wait_step(run, restored[0].data["step"] + 2)
    answer = slurm_lab.hpcrl("requeue", run.name, "--yes")
    assert "REQUEUED" in answer.stdout
    assert "waits in the queue" in slurm_lab.hpcrl("requeue", run.name, "--yes", check=False).stderr
    status = slurm_lab.wait_state(run, ["RUNNING"], 90)
    assert status["attempt"] == 3
    assert status["usage"]["gpu_hours"] > 0
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[1].data["step"] == restored[1].data["step"] > restored[0].data["step"]

    slurm_lab.hpcrl("cancel", run.name, "--yes")
    ended = slurm_lab.hpcrl("requeue", run.name, "--yes", check=False)
    assert ended.returncode == 2
    assert f"hpcrl resume {run.name}" in ended.stderr
