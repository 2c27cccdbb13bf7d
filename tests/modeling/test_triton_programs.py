"""Our programs in Triton: in Triton's interpreter against the reference, and compiled for Hopper without a GPU.

The interpreter wants ``TRITON_INTERPRET`` before Triton is imported, so it has a process of its own. Triton is that of
the environment, or lies in ``.triton`` of the checkout, where torch does not find it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.modeling.sparse_kernels import by_triton

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".triton"
INSTALLED = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.triton,
    # the stamp is written last: an installation that failed is none
    pytest.mark.skipif(
        not INSTALLED and not (OWN / "hpcrl-bootstrap").is_file(),
        reason="triton is not installed: python3 tools/bootstrap.py --triton",
    ),
]
CHECKS = Path(__file__).with_name("triton_checks.py")


def check(name: str, **variables: str) -> str:
    command = [sys.executable, CHECKS, name]
    # the programs of this checkout; what tests share is found by its directory, as pytest finds it
    paths = [str(ROOT), str(CHECKS.parents[1]), *([] if INSTALLED else [str(OWN)])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_give_what_the_reference_gives() -> None:
    assert check("interpret", TRITON_INTERPRET="1").splitlines()[-1] == "15 cases agree"


def test_a_whole_model_trains_by_programs_as_by_the_reference() -> None:
    assert check("train", TRITON_INTERPRET="1").splitlines()[-1].endswith("gradients agree")


def test_programs_fit_hopper_and_use_its_instructions() -> None:
    """Shared memory, registers, and products of matrices by the instruction that only Hopper has."""
    assert check("compile", TRITON_INTERPRET="0").splitlines()[-1] == "10 programs fit"


def test_gpus_with_less_shared_memory_get_smaller_blocks() -> None:
    assert by_triton.blocks_of((9, 0)) is by_triton.HOPPER
    for other in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert by_triton.blocks_of(other) is by_triton.SMALL
