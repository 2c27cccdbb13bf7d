"""docs/swe.md has the figures of `bench/smollm2_swe.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/swe.md").read_text(encoding="utf-8")


def test_the_figures_of_a_published_model_are_those_of_the_bench() -> None:
    found = json.loads((ROOT / "bench/results/smollm2_swe.json").read_text(encoding="utf-8"))
    prompts, published = found["published_model"]["prompts"], found["published_model"]
    assert f"| published | {published['passed']} of {prompts} |" in PAGE
    first = found["heldout"][0]
    assert (first["version"], first["prompts"], first["failed"]) == (0, prompts, 0)
    assert f"| after the warm-up | {round(first['reward'] * prompts)} of {prompts} |" in PAGE
    last = found["heldout"][-1]
    after = f"{round(last['reward'] * prompts)} of {prompts}" if last["version"] else "not measured"
    assert f"| after the run | {after} |" in PAGE
    assert f"module ({found['tasks']['heldout_functions_in_training']} of {found['tasks']['heldout']})" in PAGE.replace(
        "\n", " "
    )
