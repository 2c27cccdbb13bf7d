"""A bounded form of the kill trials; the full count is `tests/campaigns/checkpoint_kills.py`."""

from __future__ import annotations

import random
from pathlib import Path

from kill_trials import failures, run_trials


def test_a_writer_that_is_killed_or_overtaken_at_any_moment_tears_and_loses_nothing(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    counts = run_trials(tmp_path / "checkpoints", 40, seed)
    print(seed, dict(counts))
    assert not failures(counts), f"seed {seed}"
    assert counts["trials"] == 40
    assert counts["reads"] > 0
    assert counts["commits"] > 0
