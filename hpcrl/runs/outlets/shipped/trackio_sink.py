"""Metrics to Trackio: a database in a file that ``trackio show`` draws, or a space of the Hugging Face hub."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hpcrl.runs.outlets.curves import by_curve, by_summary, curve_name
from hpcrl.runs.outlets.flat import moment_of, without_time
from hpcrl.runs.outlets.interface import RunInfo, Stored
from hpcrl.runs.outlets.samples import SAMPLE_COLUMNS
from hpcrl.runs.outlets.shipped.library import import_library, run_config


class TrackioSink:
    """Continues one run of Trackio over all attempts."""

    def __init__(self, *, project: str = "hpcrl", space_id: str | None = None, directory: str | None = None) -> None:
        """Import the library.

        Parameters
        ----------
        project, space_id:
            As in ``trackio.init``; without a space nothing leaves the machine.
        directory:
            Directory of the databases; None: ``TRACKIO_DIR``, or Trackio's own default.
        """
        if directory is not None:
            os.environ["TRACKIO_DIR"] = directory  # read when it is imported
        self._library = import_library("trackio", "trackio")
        self._project, self._space = project, space_id
        self._run: Any = None
        self._storage: Any = None
        self._name = ""
        self._config: dict[str, Any] | None = None

    def open(self, run: RunInfo) -> Stored | None:
        """Begin or continue the run; return what its database has."""
        self._storage = import_library("trackio.sqlite_storage", "trackio").SQLiteStorage
        self._name, self._config = run.name, run_config(run)
        stored = None if self._space else self._stored()
        self._run = self._library.init(
            project=self._project,
            name=run.name,
            space_id=self._space,
            config=self._config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return stored

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        self._store(step, by_curve(metrics), moment_of(metrics))

    def _store(self, step: int, row: dict[str, Any], moment_s: float) -> None:
        if self._space:
            self._run.log(row, step=step)
        else:  # at once: what waits in Trackio's queue is lost with this process, and not in order
            self._storage.bulk_log(
                self._project,
                self._name,
                [row],
                steps=[step],
                timestamps=[datetime.fromtimestamp(moment_s, UTC).isoformat()],
                config=self._config,
                run_id=self._run.id,
            )
            self._config = None  # it is stored once

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Store held-out rewards of a version."""
        self._store(version, by_curve(without_time(metrics)), moment_of(metrics))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store rollouts as a table in a row of their step."""
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=[list(row.values()) for row in rows])
        # what Trackio's own queue makes of a table; texts need no files
        value = table if self._space else table._to_dict(self._project, self._name, step)
        self._store(step, {"rollouts/samples": value}, time.time())

    def ended(self, state: str, summary: Mapping[str, float]) -> None:
        """Store the state and the final numbers as a row of the last step."""
        self._store(int(summary.get("steps", 0)), {"final/state": state, **by_summary(summary)}, time.time())

    def close(self) -> None:
        """Store what is left."""
        self._run.finish()

    def _stored(self) -> Stored:
        rows = self._storage.get_logs(self._project, self._name)
        # a mean that is not finite is left out of a row; the count is in every evaluation
        heldout = curve_name("heldout_count")
        steps = [int(row["step"]) for row in rows if heldout not in row]
        versions = [int(row["step"]) for row in rows if heldout in row]
        return Stored(max(steps, default=0), max(versions, default=-1))
