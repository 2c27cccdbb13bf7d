"""A run that is killed at random moments loses nothing and trains nothing twice (more: ``bench/rollout_kills.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CODE = """
import sys, json
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from ledger_trials import run_trials
print(json.dumps(run_trials(Path(sys.argv[3]), kills=5, seed=13)))
"""


def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """In a process that forks: this one has threads."""
    argv = [sys.executable, "-c", CODE, str(HERE), str(HERE.parent), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *said, counts = done.stdout.splitlines()
    assert not said, said
    found = json.loads(counts)
    assert found["problems"] == 0
    kinds = ("run", "orchestrator", "rank", "engine", "warehouse")
    assert [found[f"kills: {kind}"] for kind in kinds] == [1] * len(kinds)
    # of the warehouse's files after they were gone
    assert found["read from: disk"] > 0
    assert found["steps"] >= 1
    assert found["rollouts"] >= 16 * found["steps"]
