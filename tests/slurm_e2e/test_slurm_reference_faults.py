"""The small reference run with faults of all kinds, for minutes (an hour of it is tests/campaigns/reference.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_environment import VLLM_PYTHON

#: with the real router, which comes with vLLM's environment
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.vllm, pytest.mark.timeout(5400)]

CAMPAIGN = Path(__file__).resolve().parents[1] / "campaigns" / "reference.py"


def test_faults_of_all_kinds_do_not_stop_the_reference_run(tmp_path: Path) -> None:
    sizes = ["--nodes", "7", "--steps", "24", "--minutes", "10", "--every", "30", "--alone"]
    model = os.environ.get("HPCRL_TEST_REFERENCE_MODEL")
    more = ["--router-python", str(VLLM_PYTHON), *(["--model", model] if model else [])]
    result = tmp_path / "result.json"
    command = [sys.executable, str(CAMPAIGN), *sizes, *more, "--result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    figures = json.loads(result.read_text())
    assert figures["faults"] >= 3
    assert figures["runs"]["with faults"]["hostile_rollouts"] > 0
