"""Metrics as TensorBoard's event files, by tensorboardX, which needs neither torch nor TensorFlow."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.runs.outlets.curves import by_curve, by_summary
from hpcrl.runs.outlets.flat import moment_of, without_time
from hpcrl.runs.outlets.interface import RunInfo, Stored
from hpcrl.runs.outlets.samples import SAMPLE_COLUMNS
from hpcrl.runs.outlets.shipped.library import import_library, run_config
from hpcrl.runs.outlets.shipped.tensorboard_files import shown_by_tensorboard


class TensorBoardSink:
    """Writes event files into ``sinks/tensorboard`` of the run, or into ``NAME`` in a directory for all runs."""

    def __init__(self, *, directory: str | None = None) -> None:
        """Import the library.

        Parameters
        ----------
        directory:
            Directory for all runs, which TensorBoard compares then; None: that of the run.
        """
        self._files = import_library("tensorboardX.event_file_writer", "tensorboardX")
        self._messages = import_library("tensorboardX.proto.event_pb2", "tensorboardX")
        self._summary = import_library("tensorboardX.summary", "tensorboardX")
        self._directory = directory
        self._writer: Any = None

    def open(self, run: RunInfo) -> Stored:
        """Begin a file; return what TensorBoard shows of the files before it.

        A sink that was given no step begins anew: TensorBoard drops all of the files before it, which another run of
        this name may have written.
        """
        path = Path(self._directory) / run.name if self._directory else run.directory / "sinks" / "tensorboard"
        path.mkdir(parents=True, exist_ok=True)
        stored = Stored(0, -1) if run.last_step == 0 else shown_by_tensorboard(path, self._messages)
        # its SummaryWriter has a queue, and what waits there is lost with this process. Files are named by the second,
        # and one of the same second would be replaced
        self._writer = self._files.EventsWriter(str(path / "events"), f".{time.time_ns()}")
        if run.last_step == 0:
            self._write(0, session_log=self._messages.SessionLog(status=self._messages.SessionLog.START))
            text = json.dumps(run_config(run), indent=2)
            lines = "\n".join(f"    {line}" for line in text.splitlines())
            self._write(0, summary=self._summary.text("config", lines))
        self._writer.flush()
        return stored

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step as one event, so that a step is stored as a whole or not at all."""
        self._write_row(step, by_curve(metrics), moment_of(metrics))

    def _write_row(self, step: int, values: Mapping[str, float], moment_s: float) -> None:
        row = self._messages.Event(wall_time=moment_s, step=step)
        for name, value in values.items():
            row.summary.MergeFrom(self._summary.scalar(name, value))
        self._writer.write_event(row)
        self._writer.flush()

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Write held-out rewards of a version."""
        self._write_row(version, by_curve(without_time(metrics)), moment_of(metrics))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rollouts as a text, each with its numbers as a heading."""
        parts = []
        for row in rows:
            numbers = ", ".join(f"{name} {row[name]}" for name in SAMPLE_COLUMNS[2:-1])
            body = "\n".join(f"    {line}" for line in str(row["text"]).splitlines())
            parts.append(f"**{row['environment']}, {row['rank']}**: {numbers}\n\n{body}")
        self._write(step, summary=self._summary.text("rollouts", "\n\n".join(parts)))
        self._writer.flush()

    def ended(self, state: str, summary: Mapping[str, float]) -> None:
        """Write the state and the final numbers as a text, and the numbers as curves of one point."""
        step = int(summary.get("steps", 0))
        rows = [f"| {name} | {value:.6g} |" for name, value in summary.items()]
        text = "\n".join([f"**{state}**", "", "| final | value |", "| --- | --- |", *rows])
        self._write(step, summary=self._summary.text("end", text))
        self._write_row(step, by_summary(summary), time.time())

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._messages.Event(wall_time=time.time(), step=step, **content))
