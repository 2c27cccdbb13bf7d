"""Recordings that several tests look at: each scenario is run once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from recording import Operation, Recordings, build_recorder, record

# what scenarios and judges share with the tests of these rooms
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("checkpoints", "runs")]


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """What a scenario did, and the directory that it left."""
    library = build_recorder(tmp_path_factory.mktemp("recorder"))

    @functools.cache
    def recording_of(scenario: str) -> tuple[Sequence[Operation], Path]:
        work = tmp_path_factory.mktemp(scenario)
        return record(library, scenario, work), work / "root"

    return recording_of


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of states are opened: what the code logs about each is of no use."""
    caplog.set_level(logging.CRITICAL)
