"""Files for Prometheus: one target a run for ``file_sd_configs``, and the configuration of jobs.

Each run has a token of its own, which only its user can read, so each has a job of its own with ``credentials_file``: a
file of targets cannot have that. The targets of a job follow the attempts of its run without a reload of Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from hpcrl.errors import HpcrlError
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.runs.observe import observe
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write
from hpcrl.storage.trusted_paths import files_as

ALERTS = Path(__file__).with_name("alerts.yml")
"""Alert rules."""
DASHBOARD = Path(__file__).with_name("dashboard.json")
"""Dashboard for Grafana."""
_ORCHESTRATOR = "orchestrator"


class RunTarget(NamedTuple):
    """A run as Prometheus sees it.

    Attributes
    ----------
    address:
        ``host:port`` of its orchestrator; empty where it has none now.
    labels:
        Labels of all of its samples.
    """

    run: RunDir
    address: str
    labels: dict[str, str]


def target_of(run: RunDir) -> RunTarget:
    """Return the target of a run; without an address where it does not run, or its orchestrator has no address yet.

    Raises
    ------
    HpcrlError
        The run cannot be read.
    """
    view, names = observe(run), run.names()
    labels = {"run": run.name, "recipe": names.recipe, "cluster": names.cluster}
    address = ""
    if not view.state.ended and view.attempt:
        try:
            urls = Endpoints.read(run, view.attempt).urls.get(_ORCHESTRATOR, [])
        except (OSError, ValueError):
            urls = []
        address = urlsplit(urls[0]).netloc if urls else ""
    return RunTarget(run, address, labels)


def write_targets(runs: Iterable[RunDir], output: Path) -> list[RunTarget]:
    """Write ``targets/RUN.json`` for each run and ``scrape.yml``; runs that have ended keep a file without targets.

    Files of runs that are not given are removed.

    Parameters
    ----------
    output:
        Directory of the files, which is made.

    Returns
    -------
    list of RunTarget
        Those that run now.

    Raises
    ------
    OSError
        A file cannot be written.
    """
    found = []
    for run in runs:
        try:
            found.append(target_of(run))
        except (HpcrlError, OSError):
            continue  # it is being made, or removed
    directory = output / "targets"
    directory.mkdir(parents=True, exist_ok=True)
    with files_as(output):
        for each in found:
            groups = [{"targets": [each.address], "labels": each.labels}] if each.address else []
            atomic_write(directory / f"{each.run.name}.json", json.dumps(groups, indent=2).encode() + b"\n")
        for path in directory.glob("*.json"):
            if path.stem not in {each.run.name for each in found}:
                path.unlink(missing_ok=True)
        living = [each for each in found if each.address]
        text = yaml.safe_dump({"scrape_configs": [_job(each, directory) for each in living]}, sort_keys=False)
        atomic_write(output / "scrape.yml", text.encode())
    return living


def _job(target: RunTarget, directory: Path) -> dict[str, Any]:
    return {
        "job_name": f"hpcrl-{target.run.name}",
        "metrics_path": "/metrics/run",
        "authorization": {"credentials_file": str(target.run.path.resolve() / TOKEN_FILE)},
        # hpcrl sets the labels role and replica
        "honor_labels": True,
        "file_sd_configs": [{"files": [str(directory.resolve() / f"{target.run.name}.json")]}],
    }
