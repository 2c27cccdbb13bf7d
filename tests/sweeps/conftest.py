"""Fixtures of sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_lab import SweepLab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[SweepLab]:
    """A lab whose queues and runs are ended with the test."""
    lab = SweepLab(tmp_path)
    yield lab
    lab.end_all()
