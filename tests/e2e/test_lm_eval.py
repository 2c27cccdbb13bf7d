"""lm-evaluation-harness, which nobody here wrote, scores what a run exports as hpcrl does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import ROOT, Lab
from patience import patience

from hpcrl.dock.ledger.payload import read_payload
from hpcrl.rollouts.core.records import Rollout, decode_rollout
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import read_ledger

HARNESS = ROOT / ".lm-eval"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (HARNESS / "lm_eval").is_dir(),
        reason="lm-evaluation-harness is not there (tools/bootstrap.py --lm-eval)",
    ),
]

SYSTEM = "End with #### and the number."
TASK = "sums_of_ours"


def write_rows(file: Path, sums: list[tuple[int, int]]) -> None:
    rows = ({"question": f"What is {a}+{b}?", "answer": f"#### {a + b}"} for a, b in sums)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_recipe(directory: Path) -> Path:
    """Write a recipe with questions in the shape of GSM8K, of which a small model answers some."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    held_out = [pair for number, pair in enumerate(sums) if number % 7 == 3]
    write_rows(directory / "train.jsonl", [pair for pair in sums if pair not in held_out])
    write_rows(directory / "test.jsonl", held_out)
    environment = {
        "name": "sums",
        "kind": "dataset",
        "path": str(directory / "train.jsonl"),
        "held_out_path": str(directory / "test.jsonl"),
        "columns": {"prompt": "question"},
        "system": SYSTEM,
        "rewards": [{"kind": "numeric", "extract": "hashes", "extract_answer": "hashes"}],
    }
    warmup = {"family": "qwen3", "config": {"intermediate_size": 128}, "steps": 120, "correct_share": 1.0}
    recipe = {
        "extends": "quickstart",
        "name": "mine",
        "model": {"path": str(directory / "start"), "warmup": warmup},
        "environments": [environment],
        "rollouts": {"rollouts_per_step": 16, "group_size": 4, "max_in_flight": 32},
        "trainer": {"steps": 2},
        "evaluation": {"every_steps": 0, "prompts": len(held_out)},
    }
    (directory / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return directory / "mine.yaml"


def write_task(directory: Path, data: Path) -> None:
    """Write the same questions as a task of the harness."""
    first = {"function": "take_first"}
    number = {"function": "regex", "regex_pattern": r"#### (-?[0-9]+)", "group_select": -1}
    directory.mkdir()
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer.split('#### ')[1]}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 32},
        "filter_list": [{"name": "hashes", "filter": [number, first]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / "sums.yaml").write_text(yaml.safe_dump(task))


def score(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    (directory / "request.json").write_text(json.dumps(request))
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hf")}
    script = [str(ROOT / "tests" / "e2e" / "harness_scorer.py"), "request.json", "result.json"]
    ended = subprocess.run(
        [sys.executable, *script],
        cwd=directory,
        env={**os.environ, **variables, "PYTHONPATH": str(HARNESS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300 * patience(),
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def rollouts(run: RunDir) -> list[Rollout]:
    ledger = read_ledger(run)
    return [decode_rollout(read_payload(run.rollouts_dir / "payload", held.entry.payload)) for held in ledger.rollouts]


def test_the_harness_scores_an_export_as_we_do(lab: Lab, tmp_path: Path) -> None:
    recipe, exported = write_recipe(tmp_path), tmp_path / "exported"
    lab.hpcrl("warmup", str(recipe))
    lab.hpcrl("submit", str(recipe), "--name", "trained")
    lab.complete(RunDir(lab.runs_root / "trained"))
    lab.hpcrl("checkpoint", "export", "trained", "--output", str(exported))
    ours = lab.json("eval", str(exported), "--recipe", str(recipe), "--name", "scored")
    lab.json("eval", str(exported), "--recipe", str(recipe), "--samples", "2", "--name", "drawn")
    drawn = rollouts(RunDir(lab.runs_root / "drawn"))
    pairs = []
    for rollout in drawn:
        (turn,) = rollout.turns
        ids = rollout.token_ids.tolist()
        pairs.append((ids[: turn.said], ids[turn.said :]))
    write_task(tmp_path / "tasks", tmp_path / "test.jsonl")
    request = {"model": str(exported), "tasks": str(tmp_path / "tasks"), "task": TASK, "system": SYSTEM, "pairs": pairs}
    theirs = score(tmp_path, request)
    assert len(theirs["matches"]) == ours["prompts"] == 12
    # some are right and some are not: otherwise an equal share would say little
    assert 0 < ours["mean"]["value"] < 1
    assert theirs["mean"] == pytest.approx(ours["mean"]["value"])
    assert len(drawn) == 24
    # of sampled tokens: the engine's log-probabilities at temperature 1 are the harness's log-likelihoods
    wanted = [float(rollout.logprobs.sum()) for rollout in drawn]
    assert theirs["loglikelihoods"] == pytest.approx(wanted, abs=1e-4)
