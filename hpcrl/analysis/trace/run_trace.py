"""Trace of a run: roles as processes, phases of steps, weight updates, rollouts with versions, checkpoints, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.analysis.role_clocks import RoleClocks
from hpcrl.analysis.trace.event_tracks import add_events
from hpcrl.analysis.trace.rollout_tracks import RolloutTracks
from hpcrl.analysis.trace.trace_writer import Row, TraceWriter
from hpcrl.errors import UsageError
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.words import PHASES

MOST_EVENTS = 300_000
"""Default maximum number of events of a trace: about 60 MB, which Perfetto opens in seconds."""
_ORDER = ("wait_batch", "swap", "forward_backward", "optimizer", "held_out", "publish", "checkpoint", "other")
"""Phases in the order in which a step has them; only their durations are on record."""
_GAUGES = ("in_flight", "in_flight_limit", "groups_running", "groups_waiting")


class RunTrace(NamedTuple):
    """A trace and what it covers.

    Attributes
    ----------
    events:
        Events of the trace.
    first, last:
        Steps that it covers.
    steps:
        Number of the newest step of the run.
    left_out:
        Steps that were asked for and are not in it, because of the maximum.
    about:
        ``otherData`` of the file.
    """

    events: list[Row]
    first: int
    last: int
    steps: int
    left_out: int
    about: Row


def parse_steps(text: str) -> tuple[int, int | None]:
    """Return the first and the last step of ``A:B``, ``A:`` or ``:B``; None as the last means the newest.

    Raises
    ------
    UsageError
        It has another form, or is empty.
    """
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise UsageError(f"--steps {text}: must be A:B, both steps included\n    hint: --steps 100:120")
    begin, end = int(first or 1), int(last) if last else None
    if end is not None and end < max(begin, 1):
        raise UsageError(
            f"--steps {text}: the first step is after the last\n    hint: --steps {max(end, 1)}:{max(begin, 1)}"
        )
    return max(begin, 1), end


def run_trace(run: RunDir, *, first: int = 1, last: int | None = None, most_events: int = MOST_EVENTS) -> RunTrace:
    """Make the trace of some steps of a run.

    Parameters
    ----------
    first, last:
        Steps to cover, both included; None is the newest.
    most_events:
        Maximum number of events. The newest steps whose events fit are kept.

    Raises
    ------
    UsageError
        The run has no step between these.
    """
    every = read_metrics(run)
    records = [record for record in every if record.step >= first and (last is None or record.step <= last)]
    if not records:
        there = f"it has steps {every[0].step} to {every[-1].step}" if every else "it has no step yet"
        raise UsageError(f"{run.name} has no step to trace there: {there}")
    source = _Source(run, every)
    kept = source.fitting(records, most_events)
    writer = source.trace(kept)
    # the estimate of the size may be too small where events come in bursts
    while len(writer.events) > most_events and len(kept) > 1:
        kept = kept[len(kept) // 4 or 1 :]
        writer = source.trace(kept)
    if len(writer.events) > most_events:
        raise UsageError(
            f"step {kept[-1].step} alone has {len(writer.events):,} events, more than {most_events:,}\n"
            f"    hint: --max-events {len(writer.events)}"
        )
    about = {
        "run": run.name,
        "steps": f"{kept[0].step}-{kept[-1].step} of {every[-1].step}",
        "begin_s": writer.zero_s,
        "producer": "hpcrl trace",
    }
    left_out = len(records) - len(kept)
    return RunTrace(writer.events, kept[0].step, kept[-1].step, every[-1].step, left_out, about)


class _Source:
    """Records of a run that its traces are made of."""

    def __init__(self, run: RunDir, every: Sequence[StepRecord]) -> None:
        self._every, self._events = every, read_events(run)
        self._clocks = RoleClocks(run, self._events)
        self._rollouts = RolloutTracks(run, self._clocks, self._events)

    def fitting(self, records: Sequence[StepRecord], most: int) -> list[StepRecord]:
        """Return the newest steps whose events fit into a maximum by their estimated number, at least one."""
        each_step = 2 * len(self._events) / len(self._every) + len(_ORDER) + len(_GAUGES) + 3
        found: list[StepRecord] = []
        total = 0.0
        for record in reversed(records):
            total += each_step + self._rollouts.count(record)
            if found and total > most:
                break
            found.append(record)
        return found[::-1]

    def trace(self, records: Sequence[StepRecord]) -> TraceWriter:
        """Return the trace of some steps."""
        ends = [record.time_s - self._clocks.ahead_s(record.attempt, "trainer") for record in records]
        lines = [(record, self._rollouts.read(record)) for record in records]
        begins = [ends[0] - sum(records[0].phases_s.values())]
        begins += [each.begin_s for _, read in lines for each in read]
        # what came before the first step, and after the newest one, belongs to a trace that has these steps
        begin_s, end_s = min(begins), ends[-1]
        if records[0].step == self._every[0].step and self._events:
            begin_s = min(begin_s, self._events[0].time_s)
        if records[-1].step == self._every[-1].step and self._events:
            end_s = max(end_s, self._events[-1].time_s)
        writer = TraceWriter(begin_s)
        for process in ("trainer", "orchestrator", "supervisor"):
            writer.process(process)
        previous_s = begin_s
        for record, step_end_s in zip(records, ends, strict=True):
            _add_step(writer, record, previous_s, step_end_s)
            previous_s = step_end_s
        add_events(writer, self._events, begin_s=begin_s, end_s=end_s)
        self._rollouts.add(writer, lines)
        return writer


def _add_step(writer: TraceWriter, record: StepRecord, previous_s: float, end_s: float) -> None:
    """Add a step with its phases one after the other, and the counters that it was recorded with."""
    # a clock that was set meanwhile must not let steps overlap
    begin_s = max(previous_s, end_s - sum(record.phases_s.values()))
    writer.slice(
        "trainer",
        "steps",
        f"step {record.step}",
        begin_s,
        end_s,
        attempt=record.attempt,
        reward_mean=record.reward_mean,
        rollouts=record.reward_count,
        loss=record.loss,
        staleness_mean=record.staleness_mean,
        staleness_max=record.staleness_max,
        tokens=record.tokens,
        skipped=record.skipped,
    )
    now = begin_s
    others = [name for name in record.phases_s if name not in _ORDER]
    for name in (*_ORDER[:-1], *others, _ORDER[-1]):
        seconds = record.phases_s.get(name, 0.0)
        later = min(end_s, now + seconds)
        writer.slice("trainer", "steps", PHASES[name][0] if name in PHASES else name, now, later)
        now = later
    writer.counter("trainer", "reward", end_s, mean=record.reward_mean)
    writer.counter("trainer", "staleness", end_s, mean=record.staleness_mean, max=float(record.staleness_max))
    for name in _GAUGES:
        if name in record.rollouts:
            writer.counter("orchestrator", name, end_s, value=record.rollouts[name])
