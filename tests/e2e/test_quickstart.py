"""The promise of the README: one command, and the reward rises."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
import torch
from lab import ROOT, Lab, events, processes, steps
from observed import status_of
from patience import patience, wait_for
from rollout_lines import rollouts_of
from safetensors.torch import load_file

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.config.load import load_recipe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.token_ratios import KEPT_STEPS, read_ratios
from hpcrl.runs.views.rollouts import read_ledger
from hpcrl.weights.store import HandoffStore

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "quickstart.yaml"


@pytest.fixture
def quickstart_lab(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path, start_models.taught_model(tmp_path_factory))


@pytest.fixture
def quickstart(quickstart_lab: Lab) -> RunDir:
    """A run of the recipe as it stands, in the lab's runs root.

    ``HPCRL_TEST_QUICKSTARTS`` names a directory of runs: one that this very code has completed is looked at, and none
    is made.
    """
    for run in done_before(Path(given)) if (given := os.environ.get("HPCRL_TEST_QUICKSTARTS")) else ():
        quickstart_lab.keep_runs_in(run.path.parent)
        return run
    return quickstart_lab.submit("first", to_end=True)


@pytest.mark.campaign
def test_adapters_learn_and_are_resumed(quickstart_lab: Lab) -> None:
    """Only adapters are trained, saved and published; engines show that they compute with them, in both attempts."""
    lab = quickstart_lab
    length = ("trainer.steps=14", "trainer.optimizer.schedule=constant")
    run = lab.submit(
        "adapters", *length, "checkpoint.every_steps=4", "evaluation.every_steps=0", recipe="quickstart_lora"
    )
    wait_for(lambda: CheckpointLedger(run.checkpoints_dir).steps(), 120.0 * patience(), "a checkpoint")
    lab.hpcrl("cancel", run.name, "--yes")
    lab.wait_end(run, 60.0 * patience())
    lab.hpcrl("resume", run.name)
    lab.complete(run)
    total = run.recipe().trainer.steps
    evaluations = [event.data for event in events(run, "evaluation")]
    assert evaluations[-1]["version"] == total
    assert evaluations[-1]["reward"] - evaluations[0]["reward"] >= 0.2
    assert list(steps(run)) == list(range(1, total + 1))
    assert events(run, "trainer.restored")
    compared = [event for event in events(run, "engine.adapter_compared") if event.data["outcome"] == "applied"]
    assert {event.attempt for event in compared} == {1, 2}
    store = HandoffStore(run.weights_dir)
    first, *others = store.versions()
    assert (first, store.open(first).manifest.kind) == (0, "full")
    assert others[-1] == total
    assert len(others) <= run.recipe().handoff.keep_last + 1
    base = store.open(0).manifest.total_bytes
    for version in others:
        manifest = store.open(version).manifest
        assert (manifest.kind, manifest.needs) == ("lora", (0,))
        assert manifest.total_bytes < base / 3
    # the merged model is a model like the one that it began with
    merged = run.path / "merged"
    lab.hpcrl("checkpoint", "export", run.name, "--output", str(merged))
    shapes = [{name: tensor.shape for name, tensor in _tensors(path).items()} for path in (lab.model, merged)]
    assert shapes[0] == shapes[1]
    same = {name for name, tensor in _tensors(merged).items() if torch.equal(tensor, _tensors(lab.model)[name])}
    assert same == {name for name in shapes[0] if not re.search(r"self_attn\.[qkvo]_proj|mlp\.experts", name)}


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def done_before(runs_root: Path) -> Iterator[RunDir]:
    """Completed runs of the unchanged recipe that began after everything that they are made of was written."""
    recipe = load_recipe(str(RECIPE)).value.model_dump(exclude={"model": {"path"}})
    files = [path for path in (ROOT / "hpcrl").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    changed_s = max(path.stat().st_mtime for path in (*files, RECIPE))
    for path in sorted(runs_root.glob("*/run.json"), reverse=True):
        run = RunDir(path.parent)
        # older ones may be of another format
        if path.stat().st_mtime < changed_s or RunRecord.read(run).created_at_s < changed_s:
            continue
        same = run.recipe().model_dump(exclude={"model": {"path"}}) == recipe
        if same and status_of(run)["state"] == "COMPLETED":
            yield run


def test_quickstart_learns_and_shows_it(quickstart: RunDir, quickstart_lab: Lab) -> None:
    lab, run = quickstart_lab, quickstart
    evaluations = [event.data for event in events(run, "evaluation")]
    before, after = evaluations[0]["reward"], evaluations[-1]["reward"]
    assert after - before >= 0.2
    assert after >= 2 * before
    records = steps(run)
    total = run.recipe().trainer.steps
    assert list(records) == list(range(1, total + 1))
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["version"] == total
    assert max(r.staleness_max for r in records.values()) <= run.recipe().rollouts.max_off_policy_steps

    # tokens of the current version agree with the trainer; rollouts that crossed an update say so
    fresh = [r.mismatch_kl_by_lag["0"] for r in records.values() if "0" in r.mismatch_kl_by_lag]
    assert fresh
    assert max(fresh) < 1e-5
    assert events(run, "engine.weights_updated")
    rollouts = rollouts_of(run)
    assert len(rollouts) == total * run.recipe().rollouts.rollouts_per_step
    assert any(rollout["first_version"] < rollout["last_version"] for rollout in rollouts)

    # of the newest steps some rollouts have their log-ratios, token by token
    ratios = read_ratios(run)
    assert {step for step, _, _ in ratios} == set(range(total - KEPT_STEPS + 1, total + 1))
    trained = {(held.step, *held.id): held.entry for held in read_ledger(run).rollouts}
    for key, each in ratios.items():
        assert len(each.log_ratios) == trained[key].sampled_tokens
        if trained[key].first_version == key[0] - 1:
            assert max(abs(value) for value in each.log_ratios if value is not None) < 0.05

    assert processes(run) == []
    status = lab.json("status", run.name)
    assert status["state"].upper() == "COMPLETED"
    assert any(row["name"] == run.name for row in lab.json("ls")["runs"])
    assert "completed" in lab.hpcrl("why", run.name, "--events").stdout.lower()
    logs = lab.hpcrl("logs", run.name, "--role", "trainer").stdout
    assert re.search(rf"step={total}\b", logs)
    assert CheckpointLedger(run.checkpoints_dir).steps()[-1] == total
    lab.hpcrl("report", run.name)
    assert (run.path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    # the name is taken now: refused, with a hint
    again = lab.hpcrl("submit", "quickstart", "--name", run.name, "--set", f"model.path={lab.model}", check=False)
    assert again.returncode == 2
    assert "resume" in again.stderr
