"""This file puts what tests of pages and of whole runs share where tests here can import it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for part in ("runs", "analysis", "e2e", "slurm_e2e"):
    sys.path.insert(0, str(Path(__file__).parents[1] / part))


@pytest.fixture(autouse=True)
def _own_registry(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of runs that is empty, and no runs of this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
