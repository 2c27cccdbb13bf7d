"""Fixtures of whole runs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import HPCRL, ROOT, SMALL_MODEL, Lab, processes

from hpcrl.runs.rundir import RunDir


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that was warmed up for seconds."""
    path = tmp_path_factory.mktemp("model") / "small"
    sets = [part for s in SMALL_MODEL for part in ("--set", s)]
    subprocess.run([HPCRL, "warmup", "quickstart", "--output", path, *sets], cwd=ROOT, check=True, capture_output=True)
    return path


@pytest.fixture
def lab(tmp_path: Path, small_model: Path) -> Iterator[Lab]:
    """A lab whose runs are ended with the test."""
    lab = Lab(tmp_path, small_model)
    yield lab
    for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
        for process in processes(RunDir(path)):
            process.send_signal(signal.SIGKILL)
