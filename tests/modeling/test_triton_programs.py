"""Our programs in Triton: in Triton's interpreter against the reference, and compiled for Hopper without a GPU.

The interpreter wants ``TRITON_INTERPRET`` before Triton is imported, so it has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)
CHECKS = Path(__file__).with_name("triton_checks.py")


def check(name: str, **variables: str) -> str:
    command = [sys.executable, CHECKS, name]
    env = os.environ | {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_give_what_the_reference_gives() -> None:
    assert check("interpret", TRITON_INTERPRET="1").splitlines()[-1] == "6 cases agree"


@pytest.mark.slow
def test_programs_fit_the_shared_memory_of_hopper() -> None:
    assert "attend_queries" in check("compile", TRITON_INTERPRET="0")
