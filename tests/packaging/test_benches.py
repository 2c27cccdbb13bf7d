"""Each bench loads: what it takes from the tests and from hpcrl is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
HELPERS = {"harness", "vllm_lab", "planner_memory_worker", "adversary_stranger"}
PROGRAMS = sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in HELPERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bench_says_what_it_takes(name: str) -> None:
    command = [sys.executable, BENCH / f"{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage:")
