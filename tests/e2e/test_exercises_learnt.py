"""A start model learns tasks of five turns with a shell in sandboxes, whose rewards are decided by tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_models
from lab import Lab, events, processes, steps
from patience import patience, wait_for
from rollout_lines import rollouts_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

RECIPE = "swe_exercises"
TURNS = 5


def test_a_small_model_learns_from_tests(
    exercises: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """None of the held-out tasks is right before, at least eight of ten afterwards: by looks at both files."""
    tasks = f"environments.0.tasks={exercises}"
    lab = Lab(tmp_path, start_models.exercises_model(tmp_path_factory, exercises))
    run = lab.submit("learns", tasks, recipe=RECIPE)
    assert lab.wait_end(run, 900.0 * patience()).upper() == "COMPLETED"
    wait_for(lambda: not processes(run), 10.0 * patience(), "end of all processes")

    first, *_, last = [event.data for event in events(run, "evaluation")]
    assert (first["version"], last["version"]) == (0, run.recipe().trainer.steps)
    assert first["reward"] <= 0.1
    assert last["reward"] >= 0.8

    rollouts = rollouts_of(run)
    assert len(rollouts) == len(steps(run)) * run.recipe().rollouts.rollouts_per_step
    lab.hpcrl("rollouts", "verify", run.name)
    assert all(rollout["parts"]["judge_tampered"] == 0.0 for rollout in rollouts)
    right = [rollout["parts"] for rollout in rollouts if rollout["reward"] == 1.0]
    assert all(parts["fail_to_pass"] == parts["pass_to_pass"] == 1.0 for parts in right)
    assert sum(parts["turns"] >= TURNS for parts in right) >= 0.9 * len(right)
