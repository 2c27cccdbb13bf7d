"""Recipes for questions from a file are run as they are shipped, small: with another model, file and sizes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, steps

from hpcrl.runs.events import read_events
from hpcrl.runs.run_progress import read_set_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

#: sizes; and engines of this project in place of vLLM's, which have an environment of their own
SMALL = (
    "engine.backend=embedded",
    # the share of a GPU, which is vLLM's alone
    "engine.memory.gpu_memory_utilization=0.9",
    "engine.max_model_len=384",
    "rollouts.rollouts_per_step=16",
    "rollouts.group_size=4",
    "rollouts.max_in_flight=32",
    "rollouts.sampling.max_new_tokens=64",
    "trainer.steps=3",
    "trainer.micro_batch_tokens=2048",
    "trainer.memory.lm_head_chunk_tokens=256",
    "evaluation.prompts=8",
)
#: what a file has beside the question, and the family of the start model
SHAPES = {
    "qwen3_1b7_gsm8k": ("question", "{a}+{b}=<<{a}+{b}={sum}>>{sum} eggs.\n#### {sum}", "qwen3"),
    # read by math-verify alone: a number in a root, and what only LaTeX can be
    "qwen25_7b_math": ("problem", r"{sum}\sqrt{{2}}", "qwen2"),
}
#: the answer of every other row, where recipes read more than one form
OTHER_ANSWERS = {"qwen25_7b_math": r"\frac{{{sum}}}{{1}}"}
MORE = {
    "qwen3_1b7_gsm8k": (),
    "qwen25_7b_math": ("trainer.ranks=2", "engine.replicas=2", "evaluation.sets.0.prompts=4"),
}


def write_rows(file: Path, name: str, operands: range) -> None:
    """Write questions of sums, as the recipe wants them."""
    column, answer, _ = SHAPES[name]
    forms = (answer, OTHER_ANSWERS.get(name, answer))
    rows = (
        {column: f"Ann has {a} eggs and buys {b}. How many?", "answer": forms[(a + b) % 2].format(a=a, b=b, sum=a + b)}
        for a in operands
        for b in range(1, 4)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def start(lab: Lab, name: str, directory: Path) -> RunDir:
    """Make a start model of the family by the recipe's own demonstrations, and run the recipe to its end."""
    train, held_out, model = directory / "train.jsonl", directory / "test.jsonl", directory / "model"
    write_rows(train, name, range(1, 9))
    write_rows(held_out, name, range(9, 12))
    warmup = {"family": SHAPES[name][2], "config": {"intermediate_size": 128}, "steps": 30, "batch_size": 16}
    files = (f"environments.0.path={train}", f"environments.0.held_out_path={held_out}")
    given = [part for setting in files for part in ("--set", setting)]
    lab.hpcrl("warmup", name, *given, "--set", f"model.warmup={json.dumps(warmup)}", "--output", str(model))
    lab.model = model
    return lab.submit("small", *files, *SMALL, *MORE[name], recipe=name, to_end=True)


def held_out_versions(run: RunDir) -> list[Any]:
    return [(event.data["version"], event.data["prompts"]) for event in read_events(run, kind="evaluation")]


def test_qwen3_on_gsm8k(lab: Lab, tmp_path: Path) -> None:
    run = start(lab, "qwen3_1b7_gsm8k", tmp_path)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3"
    assert sorted(steps(run)) == [1, 2, 3]
    assert held_out_versions(run) == [(0, 8), (3, 8)]
    # the recipe's own: one trainer and one engine on the same GPU
    recipe = run.recipe()
    assert (recipe.engine.placement, recipe.trainer.dtype, recipe.engine.dtype) == ("shared_gpus", *["bfloat16"] * 2)
    assert "nothing was lost" in lab.hpcrl("rollouts", "verify", "small").stdout
    assert len(read_ledger(run).rollouts) >= 48


def test_qwen25_on_mathematics(lab: Lab, tmp_path: Path) -> None:
    run = start(lab, "qwen25_7b_math", tmp_path)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen2"
    assert sorted(steps(run)) == [1, 2, 3]
    assert held_out_versions(run) == [(0, 8), (3, 8)]
    found = [(each.set, each.version, each.samples, each.temperature) for each in read_set_evaluations(run)]
    assert found == [("sampled", 0, 16, 0.7), ("sampled", 3, 16, 0.7)]
    (first, _) = read_events(run, kind="evaluation.set")
    assert first.data["sampling"]["top_p"] == 0.95
    assert first.data["failed"] == 0
