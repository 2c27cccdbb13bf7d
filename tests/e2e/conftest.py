"""Fixtures of whole runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
from exercise_tasks import make_exercises
from lab import Lab, processes

from hpcrl.runs.rundir import RunDir


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that was warmed up for seconds; ``HPCRL_TEST_MODEL`` names one that is there already."""
    if given := os.environ.get("HPCRL_TEST_MODEL"):
        return Path(given)
    return start_models.small_model(tmp_path_factory)


@pytest.fixture(scope="session")
def exercises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks of the recipe `swe_exercises`: the file ``tasks.jsonl``."""
    return make_exercises(tmp_path_factory.mktemp("exercises"), tasks=512)


@pytest.fixture
def lab(tmp_path: Path, small_model: Path) -> Iterator[Lab]:
    """A lab whose runs are ended with the test."""
    lab = Lab(tmp_path, small_model)
    yield lab
    end_all(lab)


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Lab]:
    """A lab for the tests of a module that share a run."""
    lab = Lab(tmp_path_factory.mktemp("shared"), small_model)
    yield lab
    end_all(lab)


def end_all(lab: Lab) -> None:
    for path in lab.runs_root.iterdir() if lab.runs_root.is_dir() else ():
        for process in processes(RunDir(path)):
            process.send_signal(signal.SIGKILL)
