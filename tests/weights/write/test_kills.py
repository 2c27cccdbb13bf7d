"""Publisher, collector and readers killed at random points (the full count is in tests/campaigns/handoff_kills.py)."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from handoff_trials import HandoffTrials


def run_trials(directory: Path) -> tuple[list[str], Counter[str]]:
    trials = HandoffTrials(directory, seed=1)
    try:
        for _ in range(60):
            trials.trial()
    finally:
        trials.close()
    return trials.problems, trials.counts


def test_no_kill_tears_or_loses_a_version(tmp_path: Path) -> None:
    # trials fork: not from a process in which other tests have left threads of libraries
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        problems, counts = apart.submit(run_trials, tmp_path / "trials").result()
    assert problems == []
    assert (counts["torn"], counts["lost"]) == (0, 0)
    assert counts["killed_publishers"] >= 45
    assert counts["killed_collectors"] >= 45
    assert counts["loads"] > 20
    assert counts["published"] > 20
