"""Attribution of a trainer's wait for a batch to what the rollouts of that batch did meanwhile.

At each moment of the wait, the rollouts of the batch that have begun and not ended share it equally: early in a wait
these are many, and at its end those that the batch waited for last. Where none of them runs, it is the time of a
hand-off if a version was being written or loaded, else of admission. After the last of them has ended it is that of the
batch itself. So the parts of a wait always add up to it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.analysis.bounds.rollout_states import RolloutStays, Stay, TimeHolder
from hpcrl.simulation.inputs.timeline import Interval

Parts = dict[tuple[TimeHolder, str], float]
"""Seconds by holder and environment; the name of the environment is empty where the holder is none's."""


class HandoffTimes(NamedTuple):
    """Times of hand-offs.

    Attributes
    ----------
    frozen:
        Intervals in which one engine was frozen by an update.
    moving:
        Intervals in which a version was being written by the trainer, or fetched and loaded by an engine.
    engines:
        Number of engines that were updated at least once; at least 1.
    """

    frozen: Sequence[Interval] = ()
    moving: Sequence[Interval] = ()
    engines: int = 1


def wait_parts(begin_s: float, end_s: float, rollouts: Sequence[RolloutStays] | None, handoff: HandoffTimes) -> Parts:
    """Return the parts of a wait from ``begin_s`` to ``end_s``; their sum is the wait.

    Parameters
    ----------
    rollouts:
        Rollouts of the batch; None where the files do not have their times.
    """
    found = defaultdict[tuple[TimeHolder, str], float](float)
    if end_s <= begin_s:
        return {}
    if rollouts is None:
        return {(TimeHolder.UNKNOWN, ""): end_s - begin_s}
    stays = [_within(stay, begin_s, end_s) for each in rollouts for stay in each.stays]
    stays = [stay for stay in stays if stay.end_s > stay.begin_s]
    frozen = [_cut(each, begin_s, end_s) for each in handoff.frozen]
    moving = [_cut(each, begin_s, end_s) for each in handoff.moving]
    ended_s = max(each.end_s for each in rollouts)
    edges = {begin_s, end_s, min(max(ended_s, begin_s), end_s)}
    edges |= {time for stay in stays for time in (stay.begin_s, stay.end_s)}
    edges |= {time for each in (*frozen, *moving) for time in each}
    changes = _changes(stays, frozen, moving)
    active, still, moves = Counter[tuple[TimeHolder, str]](), 0, 0
    ordered = sorted(edges)
    for now, later in itertools.pairwise(ordered):
        for kind, change in changes.get(now, ()):
            if isinstance(kind, tuple):
                active[kind] += change
            elif kind == "frozen":
                still += change
            else:
                moves += change
        _share(found, later - now, active, frozen=still / handoff.engines, moves=moves > 0, over=now >= ended_s)
    return dict(found)


def _share(
    found: defaultdict[tuple[TimeHolder, str], float],
    seconds: float,
    active: Counter[tuple[TimeHolder, str]],
    *,
    frozen: float,
    moves: bool,
    over: bool,
) -> None:
    """Add some seconds in which nothing changes."""
    running = sum(active.values())
    if running:
        for (holder, of), count in active.items():
            part = seconds * count / running
            if holder is TimeHolder.ENGINES and frozen:
                still = min(1.0, frozen) * part
                found[TimeHolder.HAND_OFF, ""] += still
                part -= still
            found[holder, of] += part
    elif over:
        found[TimeHolder.BATCH, ""] += seconds
    else:
        found[TimeHolder.HAND_OFF if moves else TimeHolder.ADMISSION, ""] += seconds


def _changes(
    stays: Sequence[Stay], frozen: Sequence[Interval], moving: Sequence[Interval]
) -> dict[float, list[tuple[tuple[TimeHolder, str] | str, int]]]:
    changes: dict[float, list[tuple[tuple[TimeHolder, str] | str, int]]] = {}
    for stay in stays:
        changes.setdefault(stay.begin_s, []).append(((stay.holder, stay.of), 1))
        changes.setdefault(stay.end_s, []).append(((stay.holder, stay.of), -1))
    for kind, intervals in (("frozen", frozen), ("moving", moving)):
        for begin_s, end_s in intervals:
            changes.setdefault(begin_s, []).append((kind, 1))
            changes.setdefault(end_s, []).append((kind, -1))
    return changes


def _within(stay: Stay, begin_s: float, end_s: float) -> Stay:
    return stay._replace(begin_s=min(max(stay.begin_s, begin_s), end_s), end_s=min(max(stay.end_s, begin_s), end_s))


def _cut(interval: Interval, begin_s: float, end_s: float) -> Interval:
    return Interval(min(max(interval.begin_s, begin_s), end_s), min(max(interval.end_s, begin_s), end_s))
