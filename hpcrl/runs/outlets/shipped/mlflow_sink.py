"""Metrics to an MLflow server or into a database in a file, by mlflow-skinny."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.secret_values import has_password
from hpcrl.runs.outlets.curves import by_curve, by_summary
from hpcrl.runs.outlets.flat import moment_of, without_time
from hpcrl.runs.outlets.interface import RunInfo, Stored
from hpcrl.runs.outlets.samples import SAMPLE_COLUMNS
from hpcrl.runs.outlets.shipped.library import import_library, run_config

_STEP = "hpcrl/step"
"""Metric that is written last with each step: what has it is whole."""
_VERSION = "hpcrl/version"
"""The same of evaluations."""
_RUN = "hpcrl.directory"
"""Tag by which the run is found again."""
_FILE = "sqlite:///"
"""Begin of the address of a database in a file."""
_STATUSES = {"COMPLETED": "FINISHED", "CANCELLED": "KILLED"}
"""Status by state; ``FAILED`` for others."""


class MlflowSink:
    """Continues one run of MLflow over all attempts."""

    def __init__(self, *, experiment: str = "hpcrl", tracking_uri: str | None = None) -> None:
        """Import the library.

        Parameters
        ----------
        tracking_uri:
            Server, such as ``https://mlflow.site.example``, or database, such as ``sqlite:////shared/mlflow.db``, which
            needs ``sqlalchemy`` and ``alembic``, too. None: ``MLFLOW_TRACKING_URI``.

        Raises
        ------
        ValueError
            The address has a user's password, which would stand in the run directory.
        """
        if tracking_uri is not None and has_password(tracking_uri):
            raise ValueError(
                "tracking_uri has a password: leave it out, and give MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI, by secrets of the profile or by your shell"
            )
        self._library = import_library("mlflow", "mlflow-skinny")
        self._experiment, self._uri = experiment, tracking_uri
        self._client: Any = None
        self._run_id = ""
        self._status: str | None = None

    def open(self, run: RunInfo) -> Stored | None:
        """Begin or continue the run; return what MLflow has."""
        tracking = import_library("mlflow.tracking", "mlflow-skinny")
        self._client = tracking.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._new_experiment() if found is None else found.experiment_id
        tag = str(run.directory).replace("'", "''")
        runs = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{tag}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return Stored(self._last(_STEP, 0), self._last(_VERSION, -1))
        config = run_config(run)
        tags = {_RUN: str(run.directory), "mlflow.source.git.commit": str(config.get("git_commit", ""))}
        self._run_id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        parameters = [
            self._library.entities.Param(key, value[:500]) for key, value in _flat("", config) if len(key) <= 250
        ]
        for start in range(0, len(parameters), 100):  # the most that a request may have
            self._client.log_batch(self._run_id, params=parameters[start : start + 100])
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._send(step, by_curve(metrics) | {_STEP: float(step)}, moment_of(metrics))

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Send held-out rewards of a version."""
        row = by_curve(without_time(metrics)) | {_VERSION: float(version)}
        self._send(version, row, moment_of(metrics))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store rollouts as an artifact in the form of MLflow's tables, whose own method needs pandas."""
        table = {"columns": list(SAMPLE_COLUMNS), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._run_id, table, f"rollouts/step-{step:06d}.json")

    def ended(self, state: str, summary: Mapping[str, float]) -> None:
        """Store the final numbers and the state."""
        self._send(int(summary.get("steps", 0)), by_summary(summary), time.time())
        self._client.set_tag(self._run_id, "hpcrl.state", state)
        self._status = _STATUSES.get(state, "FAILED")

    def close(self) -> None:
        """End the run as it has ended; before another attempt it is ``SCHEDULED``."""
        if self._status is None:
            self._client.update_run(self._run_id, status="SCHEDULED")
        else:
            self._client.set_terminated(self._run_id, self._status)

    def _new_experiment(self) -> str:
        """Create the experiment; artifacts of a database in a file are in the same directory as the file."""
        place = None
        if self._uri is not None and self._uri.startswith(_FILE):
            place = Path(self._uri.removeprefix(_FILE)).absolute().with_suffix(".artifacts").as_uri()
        created: str = self._client.create_experiment(self._experiment, artifact_location=place)
        return created

    def _last(self, name: str, none: int) -> int:
        return max((int(each.step) for each in self._client.get_metric_history(self._run_id, name)), default=none)

    def _send(self, step: int, metrics: Mapping[str, float], moment_s: float) -> None:
        # a row that is sent again with the time of its step is the same one
        entity = self._library.entities.Metric
        rows = [entity(_allowed(name), value, int(moment_s * 1000), step) for name, value in metrics.items()]
        for start in range(0, len(rows), 1000):  # the most that a request may have
            self._client.log_batch(self._run_id, metrics=rows[start : start + 1000])


def _allowed(name: str) -> str:
    """Return a name with what MLflow takes in names: letters, digits and ``_-. /``."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)[:250]


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Return the values of nested mappings and lists by dotted key."""
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(f"{prefix}{_allowed(str(key))}.", inner)]
    if isinstance(value, list):
        return [pair for number, inner in enumerate(value) for pair in _flat(f"{prefix}{number}.", inner)]
    return [(prefix.rstrip("."), str(value))]
