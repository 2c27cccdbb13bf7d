"""``hpcrl eval`` as a job: a recipe's start model, and the newest version of a run on that run's own profile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slurm_lab import ONE_NODE_EACH, SlurmLab, job_id

from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
ENDS = ["COMPLETED", "FAILED", "LOST", "CANCELLED"]
FEW = ("--samples", "2", "--prompts", "4", "--seed", "5")


def evaluate(lab: SlurmLab, name: str, target: str, *arguments: str) -> Any:
    return json.loads(lab.hpcrl("eval", target, "--name", name, *FEW, *arguments, "--json").stdout)


def test_a_recipe_and_a_run_are_evaluated_as_jobs(slurm_lab: SlurmLab) -> None:
    lab = slurm_lab
    words = [word for setting in lab.settings(*ONE_NODE_EACH) for word in ("--set", setting)]
    result = evaluate(lab, "of-recipe", "quickstart", "--cluster", str(lab.profile), *words)
    assert (result["prompts"], result["samples"]) == (4, 8)
    status = lab.json("status", "of-recipe")
    assert status["state"] == "COMPLETED"
    assert {component["role"] for component in status["components"]} == {"engine", "orchestrator"}
    assert job_id(RunDir(lab.runs_root / "of-recipe")) > 0
    assert "nothing was lost" in lab.hpcrl("rollouts", "verify", "of-recipe").stdout

    # the profile of a run is that of the lab, which no name finds: the shipped one of this name is another
    run = lab.submit("trained", *ONE_NODE_EACH, "trainer.steps=2")
    assert lab.wait_state(run, ENDS, timeout_s=240)["state"] == "COMPLETED", lab.hpcrl("why", run.name).stdout
    result = evaluate(lab, "of-run", "trained")
    assert (result["prompts"], result["samples"]) == (4, 8)
    ours, theirs = (RunDir(lab.runs_root / name).cluster() for name in ("of-run", "trained"))
    assert ours == theirs
    lab.wait_empty()
