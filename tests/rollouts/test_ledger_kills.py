"""A run that is killed at random moments loses nothing and trains nothing twice (more: campaigns/rollout_kills.py)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CODE = """
import sys, json
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from ledger_trials import run_trials
print(json.dumps(run_trials(Path(sys.argv[3]), **json.loads(sys.argv[4]))))
"""


def killed(path: Path, **trials: object) -> dict[str, int]:
    """What came of a run, in a process that forks: this one has threads. Nothing was lost, and nothing twice."""
    argv = [sys.executable, "-c", CODE, str(HERE), str(HERE.parent), str(path), json.dumps(trials)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    *said, counts = done.stdout.splitlines()
    assert not said, said
    found: dict[str, int] = json.loads(counts)
    assert found["problems"] == 0
    assert found["steps"] >= 1
    assert found["rollouts"] >= 16 * found["steps"]
    return found


def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    found = killed(tmp_path, kills=6, seed=13)
    kinds = ("run", "orchestrator", "rank", "lock", "engine", "warehouse")
    assert [found[f"kills: {kind}"] for kind in kinds] == [1] * len(kinds)
    # of the warehouse's files after they were gone
    assert found["read from: disk"] > 0


@pytest.mark.slow
@pytest.mark.campaign
def test_ranks_that_die_with_the_lock_of_a_block(tmp_path: Path) -> None:
    found = killed(tmp_path, kills=8, seed=1, kinds=["lock"])
    assert found["died with a lock"] == 8
    assert found["read from: node"] > 0


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="mooncake is not installed: hpcrl[store-cpu]")
def test_a_run_whose_rollouts_are_in_mooncake_store(tmp_path: Path) -> None:
    found = killed(tmp_path, kills=6, seed=4, backend="mooncake")
    assert found["kills: master"] == 2
    assert found["read from: pool"] > 0
