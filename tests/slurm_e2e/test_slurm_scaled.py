"""The small recipe of Qwen3-30B-A3B: engines in jobs of their own, more and fewer of them while it learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observed import status_of
from patience import wait_for
from rollout_lines import times_trained
from slurm_lab import SlurmLab, events, wait_step

from hpcrl.devcluster.dev_cluster import DevCluster
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

STEPS = 40
#: 0.01 is what a run that does not learn measures of the same held-out prompts
LEARNED = 0.05


@pytest.fixture
def lab(tmp_path: Path, taught_model: Path, site: DevCluster) -> Iterator[SlurmLab]:
    """A lab with the quickstart's start model, which is what the recipe's warm-up makes, with one task more."""
    lab = SlurmLab(tmp_path, taught_model, site)
    lab.end_all()
    yield lab
    lab.end_all()


def engine_jobs(run: RunDir, count: int) -> dict[int, int]:
    """Wait for so many engines, all ready, and return the job of each."""

    def look() -> dict[int, int] | None:
        found: list[Any] = [each for each in status_of(run)["components"] if each["role"] == "engine"]
        ready = len(found) == count and all(each["state"] == "READY" for each in found)
        return {each["replica"]: each["job"]["job_id"] for each in found} if ready else None

    return dict(wait_for(look, 180.0, f"{count} engines ready", every_s=0.3))


def test_it_learns_while_engines_come_and_go(lab: SlurmLab) -> None:
    settings = (f"model.path={lab.model}", f"trainer.steps={STEPS}", "evaluation.every_steps=0")
    run = lab.submit("scaled", *settings, "checkpoint.every_steps=10", recipe="qwen3_30b_a3b_small", small=False)
    recipe = run.recipe()
    assert recipe.job.layout == "elastic"
    two = engine_jobs(run, 2)
    wait_step(run, 4)
    lab.hpcrl("scale", run.name, "engine=3")
    three = engine_jobs(run, 3)
    # those that were there stay, and each has a job of its own
    assert {replica: three[replica] for replica in two} == two
    assert len(set(three.values())) == 3
    wait_step(run, read_metrics(run)[-1].step + 4)
    lab.hpcrl("scale", run.name, "engine=1")
    one = engine_jobs(run, 1)
    assert set(one.values()) <= set(three.values())
    ended = lab.wait_state(run, ["COMPLETED", "FAILED", "LOST", "CANCELLED"], timeout_s=600)
    assert (ended["state"], ended["attempt"]) == ("COMPLETED", 1), lab.hpcrl("why", run.name, "--events").stdout

    # nothing was lost or trained twice, and no engine that left counts as lost
    assert [record.step for record in read_metrics(run)] == list(range(1, STEPS + 1))
    used = times_trained(run)
    assert max(used.values()) == 1
    assert len(used) == STEPS * recipe.rollouts.rollouts_per_step
    assert not events(run, "replica.lost")
    lab.hpcrl("rollouts", "verify", run.name)
    before, after = (event.data["reward"] for event in events(run, "evaluation"))
    assert after >= before + LEARNED
    lab.wait_empty()
