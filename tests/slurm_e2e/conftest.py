"""Fixtures of whole runs under a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import start_models
import yaml
from slurm_lab import SlurmLab
from virtual_site import virtual_site

from hpcrl.devcluster.dev_cluster import DevCluster

NODES = 28


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start model that was warmed up for seconds."""
    return start_models.small_model(tmp_path_factory)


@pytest.fixture(scope="session")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's own start model, from which it learns in a few steps."""
    return start_models.taught_model(tmp_path_factory)


@pytest.fixture(scope="session")
def site() -> Iterator[DevCluster]:
    """A virtual cluster as large as the reference site."""
    yield from virtual_site("runs", nodes=NODES)


@pytest.fixture
def slurm_lab(tmp_path: Path, start_model: Path, site: DevCluster) -> Iterator[SlurmLab]:
    """A lab of its own, on an empty cluster; its jobs are ended with the test."""
    lab = SlurmLab(tmp_path, start_model, site)
    lab.end_all()
    yield lab
    lab.end_all()


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory, start_model: Path, site: DevCluster) -> Iterator[SlurmLab]:
    """A lab for the tests of a module that share a run."""
    lab = SlurmLab(tmp_path_factory.mktemp("shared"), start_model, site)
    yield lab
    lab.end_all()


@pytest.fixture
def probe_lab(tmp_path: Path, site: DevCluster) -> Iterator[SlurmLab]:
    """A lab without a model, in which probes stay on their nodes; its jobs are ended with the test."""
    lab = SlurmLab(tmp_path, tmp_path, site)
    profile = yaml.safe_load(lab.profile.read_text())
    profile["env"] = {**profile.get("env", {}), "PROBE_HOLD_S": "600"}
    lab.profile.write_text(yaml.safe_dump(profile))
    lab.end_all()
    yield lab
    lab.end_all()
