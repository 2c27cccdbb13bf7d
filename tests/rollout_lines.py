"""The rollouts that a run has trained on, as its files say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hpcrl.runs.rundir import RunDir


def rollouts_of(run: RunDir) -> list[dict[str, Any]]:
    """Return the line of each rollout, in the order of steps."""
    paths = sorted(run.rollouts_dir.glob("step*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def times_trained(run: RunDir) -> Counter[tuple[int, int]]:
    """Return how often each rollout (group, member) was trained on."""
    return Counter((rollout["group"], rollout["member"]) for rollout in rollouts_of(run))
