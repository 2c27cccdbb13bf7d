"""Metrics to Weights & Biases, online or into files that ``wandb sync`` sends later."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hpcrl.runs.outlets.curves import by_curve, by_summary
from hpcrl.runs.outlets.flat import moment_of, without_time
from hpcrl.runs.outlets.interface import RunInfo, Stored
from hpcrl.runs.outlets.samples import SAMPLE_COLUMNS
from hpcrl.runs.outlets.shipped.library import import_library, run_config
from hpcrl.runs.outlets.shipped.wandb_files import history_values

_STEP = "step"
"""The axis of all curves but held-out ones. W&B's own step takes no row for an earlier step than the last one."""
_VERSION = "heldout/version"
"""The axis of held-out curves."""
_ROW = "_step"
"""Number of a row, as W&B counts them."""
_TIME = "_timestamp"
"""Time of a row in seconds since the epoch; without it W&B takes that of writing."""


class WandbSink:
    """Continues one run of W&B over all attempts; the key comes from ``WANDB_API_KEY`` or the user's netrc file."""

    def __init__(
        self,
        *,
        project: str = "hpcrl",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        """Import the library.

        Parameters
        ----------
        project, entity, group, tags:
            As in ``wandb.init``.
        mode:
            ``offline`` writes into ``sinks/wandb`` of the run and needs no network and no key.
        """
        self._library = import_library("wandb", "wandb")
        self._settings = {"project": project, "entity": entity, "group": group, "tags": tags, "mode": mode}
        self._run: Any = None
        self._row: int | None = None
        self._exit_code: int | None = None

    def open(self, run: RunInfo) -> Stored | None:
        """Begin or continue the run; return what W&B has."""
        directory = run.directory / "sinks"
        offline = self._settings["mode"] == "offline"
        last, rows = self._stored_offline(directory) if offline else (None, None)
        # the name alone is not unique on a server
        run_id = f"{run.name[:80]}-{hashlib.sha256(os.fsencode(run.directory)).hexdigest()[:8]}"
        self._run = self._library.init(
            **self._settings,
            id=run_id,
            name=run.name,
            dir=str(directory),
            resume="allow",
            config=run_config(run),
            settings=self._library.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True
            ),
        )
        self._run.define_metric("*", step_metric=_STEP)
        self._run.define_metric("heldout/*", step_metric=_VERSION)
        # W&B counts rows itself, and begins anew in each offline file: rows of the same number would replace each other
        self._row = rows
        if offline:
            print(f"later, where there is a network: wandb sync {directory}/wandb/offline-run-*", flush=True)
            return last
        step, version = self._run.summary.get(_STEP), self._run.summary.get(_VERSION)
        return Stored(0 if step is None else int(step), -1 if version is None else int(version))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._log(by_curve(metrics) | {_STEP: step, _TIME: moment_of(metrics)})

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Send held-out rewards, with their version as another axis."""
        self._log(by_curve(without_time(metrics)) | {_VERSION: version, _TIME: moment_of(metrics)})

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send rollouts as a table."""
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=[list(row.values()) for row in rows])
        self._log({"rollouts/samples": table, _STEP: step})

    def ended(self, state: str, summary: Mapping[str, float]) -> None:
        """Put the final numbers and the state into the summary of the run."""
        self._run.summary.update({"final/state": state, **by_summary(summary)})
        self._exit_code = 0 if state == "COMPLETED" else 1

    def close(self) -> None:
        """Send what is left, and the state; before another attempt W&B calls it preempted."""
        if self._exit_code is None:
            self._run.mark_preempting()  # with an exit code of 0 it would be finished all the same
        self._run.finish(exit_code=1 if self._exit_code is None else self._exit_code)

    def _log(self, row: Mapping[str, Any]) -> None:
        if self._row is None:  # the server knows the number of rows
            self._run.log(row)
        else:
            self._run.log(row, step=self._row, commit=True)
            self._row += 1

    @staticmethod
    def _stored_offline(directory: Path) -> tuple[Stored, int]:
        """Return what files of earlier processes have, and the next row: one that was killed has not written all."""
        messages = import_library("wandb.proto.wandb_internal_pb2", "wandb")
        files = list((directory / "wandb").glob("offline-run-*/run-*.wandb"))
        steps = [value for path in files for value in history_values(path, _STEP, messages)]
        versions = [value for path in files for value in history_values(path, _VERSION, messages)]
        rows = [value for path in files for value in history_values(path, _ROW, messages)]
        return Stored(int(max(steps, default=0)), int(max(versions, default=-1))), int(max(rows, default=-1)) + 1
