"""The process of a sink: ``python -m hpcrl.runs.outlets.feed < request.json``, of the supervisor or after the end.

It reads the metrics from the files of the run, as any reader does: a sink that hangs or fails holds up no step. The
last step that it was given is kept in a file, so that a new process continues where the one before ended. SIGTERM asks
for the end: the steps that are left, and ``close()``.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.outlets import SinkConfig
from hpcrl.errors import HpcrlError
from hpcrl.processes.procfs import die_with_parent
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.event_tail import EventTail
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.metrics_files import MetricsTail
from hpcrl.runs.outlets.derived import DerivedMetrics
from hpcrl.runs.outlets.flat import flat_evaluation, flat_metrics
from hpcrl.runs.outlets.interface import MetricSink, RunInfo
from hpcrl.runs.outlets.making import make_sink
from hpcrl.runs.outlets.run_end import SinkEnd, final_summary, read_end
from hpcrl.runs.outlets.samples import sample_rows
from hpcrl.runs.run_progress import valid_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import SinkPosition, position_path
from hpcrl.runs.status import RunState
from hpcrl.storage.files import atomic_write

_log = logging.getLogger(__name__)
_POLL_S = 1.0
"""Pause in seconds between two looks at the file of metrics."""
_EVALUATIONS_S = 10.0
"""Pause in seconds between two looks at the events, which are more files."""


class FeedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the supervisor to the process of a sink.

    Attributes
    ----------
    run_dir, attempt:
        Source of the metrics.
    sink:
        Fields of `hpcrl.config.outlets.SinkConfig`.
    end:
        State in which the run has ended: the sink is given what it lacks, and is closed. None: the attempt runs.
    """

    run_dir: str
    attempt: int
    sink: dict[str, object]
    end: RunState | None = None


class SinkFeed:
    """Gives the steps of a run to a sink, in order and each once."""

    def __init__(self, run: RunDir, attempt: int, name: str, sink: MetricSink, *, rollouts_every: int = 0) -> None:
        """Read what the sink was given before; nothing is called yet.

        Parameters
        ----------
        rollouts_every:
            Steps from one table of rollouts to the next; 0: none are given.
        """
        self._run, self._attempt, self._sink = run, attempt, sink
        self._position = position_path(run, name)
        self._tail = MetricsTail(run, attempt)
        self._given = SinkPosition(0)
        if self._position.is_file():
            # written without a sync: the end of a node may leave an empty one
            try:
                self._given = msgspec.json.decode(self._position.read_bytes(), type=SinkPosition)
            except msgspec.DecodeError as error:
                _log.warning("%s is damaged, so that all steps are given: %s", self._position, error)
        # a sink of another package may have no such method
        self._evaluated: Callable[[int, dict[str, float]], None] | None = getattr(sink, "evaluated", None)
        self._evaluations, self._looked_s = EventTail(run, "evaluation"), 0.0
        self._derived = DerivedMetrics(run, attempt)
        self._rollouts: Callable[[int, list[dict[str, Any]]], None] | None = getattr(sink, "rollouts", None)
        self._rollouts_every = rollouts_every

    def open(self) -> None:
        """Open the sink, and give it the steps of earlier attempts."""
        recipe = self._run.recipe().model_dump(mode="json")
        info = RunInfo(self._run.name, self._run.path, self._attempt, recipe, self._given.last_step)
        stored = self._sink.open(info)
        if stored is not None:
            self._given = SinkPosition(stored.step, stored.version)
        self._give(read_metrics(self._run))
        self._give_evaluations()

    def poll(self) -> None:
        """Give the sink the steps that were written since the last call."""
        records = (decode_lenient(line, StepRecord) for line in self._tail.lines())
        self._give([record for record in records if record is not None])
        if time.monotonic() - self._looked_s > _EVALUATIONS_S:
            self._give_evaluations()

    def close(self, end: SinkEnd | None = None) -> None:
        """Give the sink what is left, and how the run ended, unless another attempt follows; close it."""
        self.poll()
        self._give_evaluations()
        ended: Callable[[str, dict[str, float]], None] | None = getattr(self._sink, "ended", None)
        if end is not None and ended is not None:
            ended(end.state.value, final_summary(self._run))
        self._sink.close()

    def _give(self, records: list[StepRecord]) -> None:
        before = self._given
        try:
            for record in records:
                if record.step > self._given.last_step:
                    self._sink.log(record.step, {**flat_metrics(record), **self._derived.of(record)})
                    self._given = msgspec.structs.replace(self._given, last_step=record.step)
                    self._give_rollouts(record.step)
        finally:
            self._keep_position(before)

    def _give_rollouts(self, step: int) -> None:
        if self._rollouts is None or not self._rollouts_every or step % self._rollouts_every:
            return
        try:
            if rows := sample_rows(self._run, step):
                self._rollouts(step, rows)
        except Exception:  # noqa: BLE001 - where a store takes no tables, its curves go on all the same
            _log.exception("no more rollouts are given to the sink")
            self._rollouts = None

    def _give_evaluations(self) -> None:
        if self._evaluated is None:
            return
        self._looked_s, before = time.monotonic(), self._given
        try:
            for evaluation in valid_evaluations(self._run, self._evaluations.read()):
                if evaluation.version > self._given.last_version:
                    self._evaluated(evaluation.version, flat_evaluation(evaluation))
                    self._given = msgspec.structs.replace(self._given, last_version=evaluation.version)
        finally:
            self._keep_position(before)

    def _keep_position(self, before: SinkPosition) -> None:
        if self._given != before:
            atomic_write(self._position, msgspec.json.encode(self._given), durable=False)


def main() -> int:
    """Feed one sink until SIGTERM."""
    die_with_parent()
    start_logging("%(levelname)s %(name)s: %(message)s")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is the supervisor's affair
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=FeedRequest)
    run, config = RunDir(Path(request.run_dir)), SinkConfig.model_validate_json(msgspec.json.encode(request.sink))
    try:
        every = config.rollouts_every_steps
        feed = SinkFeed(run, request.attempt, config.name, make_sink(config), rollouts_every=every)
        feed.open()
        if request.end is not None:
            feed.close(SinkEnd(state=request.end))
            return 0
        while not ended.wait(_POLL_S):
            feed.poll()
        feed.close(read_end(run, request.attempt))
    except HpcrlError as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
