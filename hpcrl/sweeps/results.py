"""Results of a sweep: each member, each setting over its seeds, and the best of them with its interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from hpcrl.analysis.comparison.noise import (
    Bounded,
    difference_interval,
    pooled_interval,
    wilson_interval,
)
from hpcrl.analysis.student import student_quantile
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.newest_evaluation import read_newest_evaluation
from hpcrl.runs.status import RunState
from hpcrl.sweeps.member_views import MemberView, view_members
from hpcrl.sweeps.queue_process import queue_process
from hpcrl.sweeps.space import SEED
from hpcrl.sweeps.sweep_files import SweepDir, SweepRecord

RESULT_SCHEMA = "hpcrl.sweep/1"
REMOVED = "REMOVED"
"""State of a member whose run directory is gone."""
UNREADABLE = "UNREADABLE"
"""State of a member whose run directory is there and cannot be read: it may run."""


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """Member of a sweep.

    Attributes
    ----------
    state:
        That of `hpcrl.runs.status.RunState`, `REMOVED` or `UNREADABLE`.
    values:
        Swept values by dotted key, as JSON.
    step, reward:
        Newest step, and its mean reward.
    heldout, low, high, count, version:
        Newest held-out reward with its 95 % interval, the number of rollouts, and the evaluated version.
    wall_s:
        Seconds of its newest attempt.
    problem:
        Reason why it could not be started, or of its end.
    """

    number: int
    run: str
    state: str
    values: dict[str, str]
    step: int = 0
    reward: float | None = None
    heldout: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    version: int | None = None
    wall_s: float | None = None
    problem: str = ""


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of a sweep: its members differ in nothing but the seed.

    Attributes
    ----------
    values:
        Swept values without the seed.
    runs:
        Names of its members.
    heldout, low, high:
        Mean of their newest held-out rewards, and its 95 % interval; None where it is unknown.
    noise:
        ``seeds``: the interval is that of the spread between members (Student), or of the held-out rollouts where that
        is wider. ``evaluation``: of one member, by its held-out rollouts alone (Wilson).
    count:
        Number of members of ``seeds``, of held-out rollouts of ``evaluation``.
    """

    values: dict[str, str]
    runs: list[str]
    heldout: float
    low: float | None
    high: float | None
    noise: str
    count: int


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep as it is now.

    Attributes
    ----------
    ended:
        No member is left to start or to end, as far as all of them can be read.
    queue:
        Process of the queue that starts members; empty where there is none.
    waits_for:
        What the queue waits for, in words.
    idle:
        Members wait, and no process starts them: a person has to call ``hpcrl sweep resume``.
    settings:
        Those with a held-out reward of members that completed (before one has: of all), the best first.
    difference:
        Best minus second, with its 95 % interval; None where that is unknown.
    """

    name: str
    recipe: str
    cluster: str
    executor: str
    max_running: int | None
    cancelled_by: str
    ended: bool
    counts: dict[str, int]
    members: list[MemberRow]
    settings: list[SettingRow]
    queue: str = ""
    waits_for: str = ""
    idle: bool = False
    difference: Bounded | None = None

    @property
    def best(self) -> SettingRow | None:
        """Return the setting with the highest held-out reward; None before there is one."""
        return self.settings[0] if self.settings else None

    @property
    def waits_for_unreadable(self) -> bool:
        """Return whether nothing but members that cannot be read keeps the sweep from its end."""
        others = self.counts.keys() - {UNREADABLE, REMOVED}
        return UNREADABLE in self.counts and all(RunState(each).ended for each in others)

    @property
    def keys(self) -> list[str]:
        """Return the swept keys."""
        return list(dict.fromkeys(key for row in self.members for key in row.values))


def read_sweep_result(sweep: SweepDir) -> SweepResult:
    """Return what a sweep has come to.

    Raises
    ------
    RunDirError
        Its record cannot be read.
    """
    record = sweep.read()
    views = view_members(sweep, record)
    state = sweep.queue()
    process = queue_process(sweep)
    rows = [_row(view, state.problems.get(view.member.number, "")) for view in views]
    waits = any(view.record is not None and view.record.queued for view in views)
    cancelled_by = sweep.cancelled_by
    settings = _settings(views, rows)
    return SweepResult(
        name=record.name,
        recipe=record.recipe,
        cluster=record.cluster,
        executor=record.executor,
        max_running=record.max_running,
        cancelled_by=cancelled_by,
        ended=not waits and not any(view.alive or view.unreadable for view in views),
        counts=dict(Counter(row.state for row in rows)),
        members=rows,
        settings=settings,
        queue="" if process is None else f"pid {process.pid} on {process.host}",
        waits_for=state.waits_for if process is not None else "",
        idle=waits and process is None and not cancelled_by,
        difference=_difference(settings, rows),
    )


def sweep_counts(sweep: SweepDir, record: SweepRecord) -> dict[str, int]:
    """Return the number of members by state."""
    return dict(Counter(_state(view) for view in view_members(sweep, record)))


def _state(view: MemberView) -> str:
    if view.view is None:
        return UNREADABLE if view.unreadable else REMOVED
    return view.view.state.value


def _row(view: MemberView, problem: str) -> MemberRow:
    member = view.member
    if view.view is None:
        return MemberRow(number=member.number, run=member.name, state=_state(view), values=member.values)
    last, heldout = read_newest(view.run), read_newest_evaluation(view.run)
    ends = None if heldout is None else wilson_interval(heldout.reward, heldout.count)
    cause = "" if view.view.cause is None else view.view.cause.message
    return MemberRow(
        number=member.number,
        run=member.name,
        state=view.view.state.value,
        values=member.values,
        step=0 if last is None else last.step,
        reward=None if last is None else last.reward_mean,
        heldout=None if heldout is None else heldout.reward,
        low=None if ends is None else ends[0],
        high=None if ends is None else ends[1],
        count=0 if heldout is None else heldout.count,
        version=None if heldout is None else heldout.version,
        wall_s=view.view.wall_s,
        problem=" ".join(problem.split()) if view.record is not None and view.record.queued else cause,
    )


def _settings(views: Sequence[MemberView], rows: Sequence[MemberRow]) -> list[SettingRow]:
    """Return the settings, the best first. Members that failed on the way count for none."""
    completed = any(view.is_completed for view in views)
    groups: dict[tuple[tuple[str, str], ...], list[MemberRow]] = {}
    for view, row in zip(views, rows, strict=True):
        if row.heldout is not None and (view.is_completed or (not completed and view.alive)):
            values = tuple((key, value) for key, value in row.values.items() if key != SEED)
            groups.setdefault(values, []).append(row)
    return sorted((_setting(dict(values), group) for values, group in groups.items()), key=lambda each: -each.heldout)


def _setting(values: dict[str, str], rows: Sequence[MemberRow]) -> SettingRow:
    rewards = [row.heldout for row in rows if row.heldout is not None]
    mean, names = fmean(rewards), [row.run for row in rows]
    if len(rewards) == 1:
        row = rows[0]
        return SettingRow(
            values=values,
            runs=names,
            heldout=mean,
            low=row.low,
            high=row.high,
            noise="evaluation",
            count=row.count,
        )
    half = student_quantile(len(rewards) - 1) * stdev(rewards) / math.sqrt(len(rewards))
    # members have the same held-out prompts: more members do not make these more
    drawn = wilson_interval(mean, min(row.count for row in rows)) or (mean, mean)
    return SettingRow(
        values=values,
        runs=names,
        heldout=mean,
        low=min(mean - half, drawn[0]),
        high=max(mean + half, drawn[1]),
        noise="seeds",
        count=len(rewards),
    )


def _difference(settings: Sequence[SettingRow], rows: Sequence[MemberRow]) -> Bounded | None:
    """Return how much better the best setting is than the second, with its interval."""
    if len(settings) < 2:
        return None
    best, second = settings[:2]
    ends: list[tuple[float, float]] = []
    if "seeds" in (best.noise, second.noise):
        rewards = {row.run: row.heldout for row in rows}
        groups = [[reward for run in each.runs if (reward := rewards[run]) is not None] for each in (second, best)]
        if (found := pooled_interval(*groups)) is not None:
            ends.append(found[:2])
    bounds = [_bounded(each) for each in (second, best)]
    if bounds[0] is not None and bounds[1] is not None:
        ends.append(difference_interval(bounds[0], bounds[1]))
    if not ends:
        return None
    return Bounded(best.heldout - second.heldout, min(low for low, _ in ends), max(high for _, high in ends))


def _bounded(row: SettingRow) -> Bounded | None:
    return None if row.low is None or row.high is None else Bounded(row.heldout, row.low, row.high)
