"""A run that saves and goes on in its job: asked by Slurm's warning, and by ``hpcrl requeue``; what refuses that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from patience import wait_for
from slurm_lab import ONE_NODE_EACH, SlurmLab, events, job_id, wait_saved, wait_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_warning_or_a_requeue_saves_and_the_run_continues(slurm_lab: SlurmLab) -> None:
    passed_on = "job.sbatch_options=[--nice=7, --contiguous]"
    settings = ("trainer.steps=100000", "checkpoint.every_steps=0", "job.layout=hetjob", passed_on)
    run = slurm_lab.submit("moved", *ONE_NODE_EACH, *settings)
    records = slurm_lab.client().details(job_id(run))
    assert {(record["Nice"], record["Contiguous"]) for record in records} == {("7", "1")}
    wait_step(run, 4)

    # the warning before the time limit
    slurm_lab.client().cancel(job_id(run), signal="USR2", batch=True)
    status = slurm_lab.wait_attempt(run, 2)
    assert [event.data["state"] for event in events(run, "run.state") if event.attempt == 1][-1] == "REQUEUED"
    assert status["job"]["restarts"] == 1
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[0].data["step"] == restored[0].data["step"] >= 4

    # a person's wish
    wait_step(run, restored[0].data["step"] + 2)
    answer = slurm_lab.hpcrl("requeue", run.name, "--yes")
    assert "REQUEUED" in answer.stdout
    assert "waits in the queue" in slurm_lab.hpcrl("requeue", run.name, "--yes", check=False).stderr
    status = slurm_lab.wait_attempt(run, 3)
    assert status["usage"]["gpu_hours"] > 0
    saved, restored = events(run, "supervisor.saved"), events(run, "trainer.restored")
    assert saved[1].data["step"] == restored[1].data["step"] > restored[0].data["step"]

    slurm_lab.hpcrl("cancel", run.name, "--yes")
    ended = slurm_lab.hpcrl("requeue", run.name, "--yes", check=False)
    assert ended.returncode == 2
    assert f"hpcrl resume {run.name}" in ended.stderr


#: refuses the trainer its step, once for each file that lies there, in the words of Slurm 22.05
REFUSING = """#!/bin/sh
case " $* " in
*" --job-name=trainer-0 "*)
    if rm {refusal} 2>/dev/null; then
        echo "srun: error: Unable to create step for job 3: Invalid generic resource (gres) specification" >&2
        exit 1
    fi ;;
esac
exec {srun} "$@"
"""


@pytest.mark.campaign
def test_an_allocation_in_which_slurm_makes_no_step_is_changed_for_another(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    """A run that has trained goes back into the queue by itself, and on from its checkpoint."""
    srun, refusal = shutil.which("srun", path=slurm_lab.env["PATH"]), tmp_path / "refusal"
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "srun"
    wrapper.write_text(REFUSING.format(srun=srun, refusal=refusal))
    wrapper.chmod(0o755)
    profile = yaml.safe_load(slurm_lab.profile.read_text())
    profile["launch"]["path"] = [str(tmp_path / "bin"), *profile["launch"].get("path", [])]
    slurm_lab.profile.write_text(yaml.safe_dump(profile))
    settings = ("trainer.steps=100000", "checkpoint.every_steps=2", "job.layout=hetjob")
    run = slurm_lab.submit("refused", *ONE_NODE_EACH, *settings)
    wait_saved(run, 2)
    refusal.touch()
    slurm_lab.hpcrl("requeue", run.name, "--yes")
    wait_for(lambda: events(run, "trainer.restored"), 120.0, "a trainer that goes on")
    assert not refusal.exists()
    status = slurm_lab.wait_state(run, ["RUNNING"])
    assert status["attempt"] == 3
    assert "trainer 0 did not begin: srun ended with 1" in slurm_lab.json("why", run.name)["earlier"]["2"]
    wait_step(run, events(run, "trainer.restored")[0].data["step"] + 1)
    slurm_lab.hpcrl("cancel", run.name, "--yes")
