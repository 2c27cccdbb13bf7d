"""The package of docs/extending.md, installed as its readers install it, in a whole run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab import ROOT, Lab
from patience import wait_for
from rollout_lines import rollouts_of

import hpcrl
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.weights import HandoffStore

EXAMPLE = ROOT / "docs/examples/extension"
RECIPE = str(EXAMPLE / "recipe.yaml")
SMALL = (
    "rollouts.rollouts_per_step=16",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=32",
    "evaluation.every_steps=0",
    "evaluation.prompts=4",
    "trainer.steps=4",
    "trainer.optimizer.warmup_steps=1",
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a directory."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(EXAMPLE)]
    subprocess.run(command, check=True, timeout=300)
    return target


@pytest.fixture
def extended(lab: Lab, installed: Path) -> Lab:
    """Let the commands and roles of a lab find the package."""
    lab.env["PYTHONPATH"] = os.pathsep.join((str(installed), str(Path(hpcrl.__file__).parents[1])))
    return lab


def test_a_run_has_them_all(extended: Lab, tmp_path: Path) -> None:
    note = tmp_path / "ended.txt"
    mirror = tmp_path / "mirror"
    settings = (*SMALL, f"notify.0.parameters.path={note}", f"handoff.sync.parameters.mirror={mirror}")
    assert "good" in extended.hpcrl("recipe", "check", RECIPE, "--set", f"model.path={extended.model}").stdout
    run = extended.submit("own", *settings, to_end=True, recipe=RECIPE)
    # the kind, which only commands know, is a custom environment for all roles
    (environment,) = run.recipe().environments
    assert environment.kind == "custom"
    assert environment.args == {"letters": "abc", "length": 3}
    records = read_metrics(run)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert all(set(record.loss_metrics) == {"ratio_above_one", "dual_clipped"} for record in records)
    assert all(record.reward_by_env.keys() == {"count"} for record in records)
    # ranks less the price of a length: never those of another advantage
    lines = rollouts_of(run)
    assert {round(each["advantage"] * 3) / 3 for each in lines} == {each["advantage"] for each in lines}
    with (run.sinks_dir / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["reward_by_env/count"]) for row in rows] == [record.reward_mean for record in records]
    wait_for(lambda: any(event.kind == "notify.sent" for event in read_events(run)), 30.0, "the message")
    assert note.read_text() == "hpcrl: run own is completed: the run completed all its steps\n"
    events = {event.kind for event in read_events(run)}
    assert sorted(path.name for path in mirror.iterdir()) == ["v000002", "v000004"]
    assert {path.name for path in (mirror / "v000004").iterdir()} == {
        path.name for path in HandoffStore(run.weights_dir).path_of(4).iterdir()
    }
    assert "mirror.copied" in events
    assert not events & {"sink.failed", "sink.killed", "notify.failed"}
    assert (
        f"step {max(records, key=lambda record: record.reward_mean).step}: "
        in extended.hpcrl("best-step", str(run.path)).stdout
    )
    assert "Extensions" in extended.hpcrl("--help").stdout
    assert "Print the step with the best mean reward." in extended.hpcrl("--help").stdout
