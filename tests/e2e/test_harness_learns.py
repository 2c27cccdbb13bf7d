"""A start model learns the exercises through the gateway: mini-swe-agent, unchanged, has the shell and the turns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
from exercise_tasks import NODE_PYTHON
from lab import ROOT, Lab, events, newest_counters, processes, steps
from mini_swe_packages import changed_files, copy_mini_swe_agent, let_others_read
from patience import patience, wait_for
from rollout_lines import rollouts_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = ROOT / "docs/examples/mini_swe_agent"
TURNS = 5


@pytest.fixture
def mounts() -> Iterator[dict[str, str]]:
    """The example and mini-swe-agent, where users of sandboxes may read them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        path = Path(place)
        path.chmod(0o755)
        copy_mini_swe_agent(path / "packages", python=NODE_PYTHON)
        (path / "agent").mkdir()
        for file in EXAMPLE.iterdir():
            if file.is_file():
                (path / "agent" / file.name).write_bytes(file.read_bytes())
        let_others_read(path / "agent")
        yield {f"/{name}": str(path / name) for name in ("agent", "packages")}


def test_a_small_model_learns_by_mini_swe_agent(
    exercises: Path, mounts: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The start model is that of `test_exercises_learnt`: what the program asks is rendered as its demonstrations."""
    assert not changed_files(Path(mounts["/packages"]))
    lab = Lab(tmp_path, start_models.exercises_model(tmp_path_factory, exercises))
    run = lab.submit(
        "learns",
        f"environments.0.path={exercises.with_name('rows.jsonl')}",
        f"environments.0.rewards.0.args.tasks={exercises}",
        f"environments.0.sandbox.mounts={json.dumps(mounts)}",
        recipe=str(EXAMPLE / "recipe.yaml"),
    )
    ended = lab.wait_end(run, 900.0 * patience())
    assert ended.upper() == "COMPLETED", lab.hpcrl("why", run.name, "--events", check=False).stdout
    wait_for(lambda: not processes(run), 10.0 * patience(), "end of all processes")

    first, *_, last = [event.data for event in events(run, "evaluation")]
    assert (first["version"], last["version"]) == (0, run.recipe().trainer.steps)
    assert first["reward"] <= 0.1
    assert last["reward"] >= 0.8

    rollouts = rollouts_of(run)
    assert len(rollouts) == len(steps(run)) * run.recipe().rollouts.rollouts_per_step
    assert "nothing was lost, and nothing trained twice" in lab.hpcrl("rollouts", "verify", run.name).stdout
    # the program has sent its whole history with each turn, and all of it was found to be what was sampled
    assert {rollout["branches"] for rollout in rollouts} == {1}
    assert newest_counters(run)["gateway_requests"] >= sum(len(rollout["turns"]) for rollout in rollouts)
    assert {rollout["reward"] for rollout in rollouts} == {0.0, 1.0}
    assert not any(rollout["parts"]["timed_out"] for rollout in rollouts)
    right = [rollout for rollout in rollouts if rollout["reward"] == 1.0]
    assert sum(len(rollout["turns"]) >= TURNS for rollout in right) >= 0.9 * len(right)
