"""Tracks of consumed rollouts: one lane for each that ran at the same time, with requests, waits and versions."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcrl.analysis.bounds.rollout_states import (
    Stay,
    TimeHolder,
    delayed_environments,
    rollout_stays,
    sandboxed_environments,
)
from hpcrl.analysis.role_clocks import RoleClocks
from hpcrl.analysis.trace.trace_writer import TraceWriter
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import Event
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.rundir import RunDir

_PROCESS = "rollouts"
_NAMES = {
    TimeHolder.ENGINES: "request",
    TimeHolder.ENVIRONMENTS: "environment",
    TimeHolder.SANDBOXES: "sandbox",
    TimeHolder.JUDGE: "judge",
}
_SHOWN = (
    "environment",
    "reward",
    "advantage",
    "staleness",
    "first_version",
    "last_version",
    "tokens",
    "sampled_tokens",
)


class TracedRollout(NamedTuple):
    """A rollout of a trace.

    Attributes
    ----------
    name:
        ``GROUP/MEMBER``.
    about:
        Its figures.
    versions:
        Versions that sampled it.
    """

    begin_s: float
    end_s: float
    name: str
    about: dict[str, Any]
    stays: tuple[Stay, ...]
    versions: tuple[int, int]


class RolloutTracks:
    """Reads consumed rollouts and adds them to a trace."""

    def __init__(self, run: RunDir, clocks: RoleClocks, events: Sequence[Event]) -> None:
        """Take the settings of a run and the times of its weight updates."""
        recipe = run.recipe()
        self._consumed, self._clocks = ConsumedRollouts(run.rollouts_dir), clocks
        self._sandboxed, self._delayed = sandboxed_environments(recipe), delayed_environments(recipe)
        self._served: dict[tuple[int, int], float] = {}
        for event in events:
            version = event.data.get("version")
            if event.kind == "engine.weights_updated" and isinstance(version, int):
                # of several engines the first one counts: which one served a rollout is not on record
                self._served.setdefault((event.attempt, version), event.time_s)

    def count(self, record: StepRecord) -> int:
        """Return the maximum number of events of the rollouts of a step."""
        bound = 0
        for value in self._values(record):
            turns = value.get("turns") or ()
            bound += 2 + 2 * len(turns) + max(0, _version(value, "last") - _version(value, "first") + 1)
        return bound

    def read(self, record: StepRecord) -> list[TracedRollout]:
        """Return the rollouts of a step that say when their requests were."""
        ahead_s = self._clocks.ahead_s(record.attempt, "orchestrator")
        found = []
        for value in self._values(record):
            line = json.dumps(value).encode()
            read = rollout_stays([line], sandboxed=self._sandboxed, delayed=self._delayed, ahead_s=ahead_s)
            if read is None:
                continue
            (stays,) = read
            found.append(
                TracedRollout(
                    stays.begin_s,
                    stays.end_s,
                    f"{value.get('group')}/{value.get('member')}",
                    {"step": record.step, **{key: value[key] for key in _SHOWN if key in value}},
                    stays.stays,
                    (_version(value, "first"), _version(value, "last")),
                )
            )
        return found

    def add(self, writer: TraceWriter, steps: Sequence[tuple[StepRecord, Sequence[TracedRollout]]]) -> None:
        """Add rollouts: lanes in the order in which they become free, the lowest first."""
        every = [(each, record.attempt) for record, found in steps for each in found]
        every.sort(key=lambda pair: (pair[0].begin_s, pair[0].name))
        busy: list[tuple[float, int]] = []
        free: list[int] = []
        lanes = 0
        for rollout, attempt in every:
            while busy and busy[0][0] <= rollout.begin_s:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                lane = heapq.heappop(free)
            else:
                lanes += 1
                lane = lanes
            heapq.heappush(busy, (rollout.end_s, lane))
            self._add(writer, f"lane {lane:04d}", rollout, attempt)

    def _add(self, writer: TraceWriter, lane: str, rollout: TracedRollout, attempt: int) -> None:
        about = rollout.about
        name = f"{rollout.name} {about.get('environment', '')}"
        writer.slice(_PROCESS, lane, name, rollout.begin_s, rollout.end_s, **about)
        spans = self._spans(rollout, attempt)
        for begin_s, end_s, version in spans:
            writer.slice(_PROCESS, f"{lane} versions", f"v{version}", begin_s, end_s, rollout=rollout.name)
        for stay in rollout.stays:
            writer.slice(_PROCESS, lane, _NAMES.get(stay.holder, stay.holder.value), stay.begin_s, stay.end_s)

    def _spans(self, rollout: TracedRollout, attempt: int) -> list[tuple[float, float, int]]:
        """Return the times in which a rollout was sampled by each version, as far as updates say it."""
        first, last = rollout.versions
        spans, begin_s, version = [], rollout.begin_s, first
        for later in range(first + 1, last + 1):
            served_s = self._served.get((attempt, later))
            if served_s is None or served_s <= begin_s:
                version = later if served_s is not None else version
                continue
            end_s = min(served_s, rollout.end_s)
            spans.append((begin_s, end_s, version))
            begin_s, version = end_s, later
        spans.append((begin_s, rollout.end_s, version))
        return [span for span in spans if span[1] > span[0]]

    def _values(self, record: StepRecord) -> Iterator[dict[str, Any]]:
        try:
            lines = self._consumed.of(record.step)
        except OSError:
            return
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the torn last line of a writer that was killed
            if isinstance(value, dict):
                yield value


def _version(value: dict[str, Any], which: str) -> int:
    version = value.get(f"{which}_version")
    return version if isinstance(version, int) else 0
