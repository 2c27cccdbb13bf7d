"""Faults of a filesystem, injected into real processes by a preloaded library (tests/faults.c says how)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def build_shim(directory: Path) -> Path:
    """Compile the library; skips the test, and says so, where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("FAULTS ARE NOT TESTED: there is no C compiler (hint: apt-get install gcc libc6-dev)")
    library = directory / "faults.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-o",
        library,
        TESTS / "faults.c",
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


def run_with_fault(library: Path, fault: str, script: str, *arguments: object) -> list[str]:
    """Run a Python script under a fault; returns the lines that it prints (an AssertionError where it fails)."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "HPCRL_FAULT": fault,
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
    }
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{fault}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()
