"""Attribution of the waits of single steps of a run, from its files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hpcrl.analysis.bounds.rollout_states import (
    RolloutStays,
    delayed_environments,
    rollout_stays,
    sandboxed_environments,
)
from hpcrl.analysis.bounds.waiting_time import HandoffTimes, Parts, wait_parts
from hpcrl.analysis.role_clocks import RoleClocks
from hpcrl.config.recipe import Recipe
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import Event
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.simulation.inputs.timeline import Interval

WAIT = "wait_batch"
"""Phase of a step in which the trainer waits for rollouts; it is the first one."""


class StepWaits:
    """Attributes the waits of single steps of a run.

    Parameters
    ----------
    events:
        All events of the run in time order.
    """

    def __init__(self, run: RunDir, recipe: Recipe, events: Sequence[Event]) -> None:
        self._consumed = ConsumedRollouts(run.rollouts_dir)
        self._sandboxed, self._delayed = sandboxed_environments(recipe), delayed_environments(recipe)
        updates = (event for event in events if event.kind == "engine.weights_updated")
        self._updates = [event for event in updates if isinstance(event.data.get("seconds"), int | float)]
        self._updates.sort(key=lambda event: event.time_s)
        # a run of weeks has tens of thousands: only those near an interval are read
        self._longest_s = max((float(event.data["seconds"]) for event in self._updates), default=0.0)
        self._published: dict[tuple[int, object], float] = {}
        for event in events:
            if event.kind in ("trainer.version_announced", "trainer.version_published"):
                # engines can have it from the first of the two on
                self._published.setdefault((event.attempt, event.data.get("version")), event.time_s)
        self._clocks = RoleClocks(run, events)
        self._engines = max(1, len({event.data.get("engine") for event in self._updates}))

    def parts(self, record: StepRecord) -> Parts:
        """Return the parts of the wait of one step."""
        begin_s = record.time_s - sum(record.phases_s.values())
        return self.parts_of(record, [(begin_s, begin_s + record.phases_s.get(WAIT, 0.0))])

    def parts_of(self, record: StepRecord, intervals: Sequence[tuple[float, float]]) -> Parts:
        """Return the parts of some intervals of the wait of one step; their sum is that of the intervals.

        Parameters
        ----------
        intervals:
            Begins and ends in seconds since the epoch, by the clock of the record.
        """
        found: Parts = {}
        waits = [(begin_s, end_s) for begin_s, end_s in intervals if end_s > begin_s]
        if not waits:
            return found
        rollouts = self._rollouts(record)
        # times of events and rollouts are by the supervisor's clock
        ahead_s = self._clocks.ahead_s(record.attempt, "trainer")
        step_s = record.time_s - sum(record.phases_s.values()) - ahead_s
        for begin_s, end_s in waits:
            handoff = self._handoff(record, step_s, begin_s - ahead_s, end_s - ahead_s)
            for part, seconds in wait_parts(begin_s - ahead_s, end_s - ahead_s, rollouts, handoff).items():
                found[part] = found.get(part, 0.0) + seconds
        return found

    def _rollouts(self, record: StepRecord) -> list[RolloutStays] | None:
        try:
            lines = self._consumed.of(record.step)
        except OSError:
            return None
        return rollout_stays(
            lines,
            sandboxed=self._sandboxed,
            delayed=self._delayed,
            ahead_s=self._clocks.ahead_s(record.attempt, "orchestrator"),
        )

    def _handoff(self, record: StepRecord, step_s: float, begin_s: float, end_s: float) -> HandoffTimes:
        """Return the updates of engines and the writing of the version before, as far as they touch an interval.

        Parameters
        ----------
        step_s:
            Begin of the step, from which on the version before it is written.
        """
        first = bisect_right(self._updates, begin_s, key=_ended_s)
        last = bisect_right(self._updates, end_s + self._longest_s, key=_ended_s)
        near = [event for event in self._updates[first:last] if _began_s(event) < end_s]
        moving = [Interval(_began_s(event), event.time_s) for event in near]
        published_s = self._published.get((record.attempt, record.step - 1))
        if published_s is not None and published_s > begin_s:
            moving.append(Interval(step_s, published_s))
        frozen = [Interval(event.time_s - _pause_s(event), event.time_s) for event in near]
        return HandoffTimes(frozen, moving, self._engines)


def _ended_s(event: Event) -> float:
    return event.time_s


def _began_s(event: Event) -> float:
    return event.time_s - float(event.data["seconds"])


def _pause_s(event: Event) -> float:
    pause_s = event.data.get("pause_s")
    return float(pause_s) if isinstance(pause_s, int | float) else 0.0
