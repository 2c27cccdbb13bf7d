"""What tests of this folder share."""

from __future__ import annotations

import pytest
from fake_slurm import FakeSlurm


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()
