"""docs/demo.md shows what `bench/demo.py` has recorded, and its task is what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/demo.md").read_text()


def recorded(name: str) -> list[dict[str, Any]]:
    seeds: list[dict[str, Any]] = json.loads((ROOT / f"bench/results/{name}.json").read_text())["seeds"]
    return seeds


def test_figures() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "| `smollm2" in line]
    runs = [(name, run) for name in ("smollm2", "smollm2_lora") for run in recorded(name)]
    assert len(rows) == len(runs)
    for cells, (name, run) in zip(rows, runs, strict=True):
        curve = [f"{reward:.2f}" for _, reward in run["heldout"]]
        assert cells[:2] == [f"`{name}`", str(run["seed"])]
        assert cells[2:-1] == curve
        assert float(cells[-1]) == pytest.approx(run["standard_error"], abs=0.0051)
        # beyond noise
        assert run["heldout_after"] - run["heldout_before"] > 3 * run["standard_error"]


def test_rollouts_are_real() -> None:
    said = re.findall(r"^    \| (.*) -> (.*) \| reward ([01])$", PAGE, re.MULTILINE)
    assert len(said) >= 5
    texts = [(line["text"], line["reward"]) for run in recorded("smollm2") for line in run["rollouts"]]
    for question, reply, reward in said:
        whole = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"
        assert any(whole in text and float(reward) == earned for text, earned in texts), (question, reply)


def test_the_task_is_as_the_page_says() -> None:
    rows = [json.loads(line) for line in (ROOT / "docs/examples/sums/questions.jsonl").read_text().splitlines()]
    sums = {"train": set(), "test": set()}  # type: dict[str, set[frozenset[int]]]
    for row in rows:
        a, b = map(int, re.fullmatch(r"What is (\d+)\+(\d+)\? Answer .*", row["question"]).groups())  # type: ignore[union-attr]
        assert row["answer"] == a + b
        sums[row["split"]].add(frozenset((a, b)))
    held_out = sum(row["split"] == "test" for row in rows)
    assert f"{len(rows)} sums" in PAGE
    assert f"{held_out} of them are held out" in PAGE
    assert not sums["train"] & sums["test"]
