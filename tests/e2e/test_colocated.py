"""Trainer and engine in turns on the same devices: whole runs that learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_models
from lab import Lab, events, processes, steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

#: of a constant learning rate: the reward of held-out prompts is then several times what it was
SHORT = ("trainer.steps=9", "trainer.optimizer.schedule=constant")
LAYOUTS = {
    "one-rank": (*SHORT, "rollouts.max_off_policy_steps=0"),
    "fsdp-one-behind": ("trainer.steps=30", "trainer.ranks=2", "rollouts.max_off_policy_steps=1"),
    "experts": (*SHORT, "trainer.ranks=2", "trainer.parallelism.ep=2", "rollouts.max_off_policy_steps=0"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["experts", "one-rank", "fsdp-one-behind"])
def test_it_learns_in_turns(layout: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    lab = Lab(tmp_path, start_models.taught_model(tmp_path_factory))
    settings = ("evaluation.every_steps=0", *LAYOUTS[layout])
    run = lab.submit(layout, *settings, to_end=True, recipe="quickstart_colocated")
    recipe, records = run.recipe(), steps(run)
    total, bound = recipe.trainer.steps, recipe.rollouts.max_off_policy_steps
    assert list(records) == list(range(1, total + 1))
    evaluations = [event.data for event in events(run, "evaluation")]
    assert [e["version"] for e in evaluations] == [0, total]
    # each is of one version: the trainer's turn waited
    assert all(e["last_version"] == e["version"] for e in evaluations)
    assert evaluations[-1]["reward"] - evaluations[0]["reward"] >= 0.2
    assert max(r.staleness_max for r in records.values()) == bound
    # what engines got is what the trainer has, or their log-probabilities would differ
    fresh = [r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag]
    assert fresh
    assert max(fresh) < 1e-5
    assert all(record.phases_s["swap"] > 0 for record in records.values())
    handed_over = events(run, "trainer.handed_over")
    assert [event.data["version"] for event in handed_over] == list(range(total + 1))
    # nothing went through files
    assert not list(run.weights_dir.rglob("*.safetensors"))
    assert processes(run) == []
