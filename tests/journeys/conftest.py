"""Fixtures of journeys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
from virtual_site import virtual_site

from hpcrl.devcluster.dev_cluster import DevCluster


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that was warmed up for seconds."""
    return start_models.small_model(tmp_path_factory)


@pytest.fixture(scope="session")
def site() -> Iterator[DevCluster]:
    """A small virtual cluster."""
    yield from virtual_site("journeys", nodes=4)
