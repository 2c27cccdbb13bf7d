"""Facts of a run for notifications: found in its events and metrics, in the order in which they were written.

The same files give the same facts with the same keys, whatever process reads them and how often: by its key a fact is
sent once (`hpcrl.runs.notice_claims`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hpcrl.runs.events import Event

_REPEAT_S = 6 * 3600.0
"""Minimum time in seconds between two facts about the same limit of disk space: the state lasts, also over attempts."""
_WINDOW = 10
"""Number of steps over which the share of dropped rollouts is taken."""
_FEWEST = 20
"""Minimum number of rollouts for such a share."""
_DROPS = (
    *("dropped_engine", "dropped_environment", "dropped_branches", "dropped_group", "dropped_stale", "cancelled_stale"),
)
"""Counters of rollouts that were lost to training; not groups of equal rewards, which a recipe drops on purpose."""
_ENDS = {"COMPLETED": "completed", "FAILED": "failed", "CANCELLED": "cancelled"}
ENDS = frozenset(_ENDS.values())
"""Events that end a run."""


class Fact(NamedTuple):
    """A fact.

    Attributes
    ----------
    key:
        Unique in the run, and a valid file name.
    event:
        One of `hpcrl.config.outlets.NoticeEvent`.
    what:
        End of the sentence "run NAME ...".
    evidence:
        One more line; may be empty.
    threshold:
        Of ``drops``: the share that was exceeded; 0 for others.
    """

    key: str
    event: str
    attempt: int
    time_s: float
    what: str
    evidence: str = ""
    threshold: float = 0.0


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a step's record that facts are found in."""

    time_s: float
    attempt: int
    step: int
    rollouts: dict[str, float] = {}


class FactFinder:
    """Finds facts in events and steps.

    Parameters
    ----------
    thresholds:
        Shares of dropped rollouts that are facts when they are exceeded.
    """

    def __init__(self, thresholds: Sequence[float] = ()) -> None:
        self._best: tuple[float, int] | None = None
        self._version = -1
        self._hung: Counter[str] = Counter()
        self._space: dict[tuple[str, str], float] = {}
        self._retried: set[int] = set()
        self._ended: set[int] = set()
        self._seen_s: dict[int, float] = {}
        self._drops = {each: _DropWatch(each) for each in sorted(set(thresholds))}
        self._step = 0
        self._readers: dict[str, Callable[[Event], Iterator[Fact]]] = {
            "run.state": self._state,
            "attempt.retried": self._retry,
            "nodes.replaced": self._retry,
            "component.hung": self._stall,
            "evaluation": self._evaluation,
            "run.space_low": self._low,
            "run.space_gone": self._gone,
        }

    def take(self, event: Event) -> list[Fact]:
        """Return the facts of the next event. One of another version, which may lack something, has none."""
        reader = self._readers.get(event.kind)
        try:
            return [] if reader is None else list(reader(event))
        except (KeyError, TypeError, ValueError):
            return []

    def take_step(self, counts: StepCounts) -> list[Fact]:
        """Return the facts of the next step. Steps that an attempt computes again count as they were at first."""
        if counts.step <= self._step:
            return []
        self._step = counts.step
        found = (watch.take(counts) for watch in self._drops.values())
        return [fact for fact in found if fact is not None]

    def seen_s(self, attempt: int) -> float:
        """Return when an attempt last changed its state (seconds since the epoch); 0 where it never did."""
        return self._seen_s.get(attempt, 0.0)

    def retried(self, attempt: int) -> None:
        """Take note that the next attempt begins at once: the end of this one is not that of the run."""
        self._retried.add(attempt)

    def lost(self, attempt: int, *, event: str, time_s: float, evidence: str = "") -> Fact | None:
        """Return the fact that an attempt ended without a final state; None where it has one."""
        if attempt in self._ended or attempt < 1:
            return None
        what = f"lost attempt {attempt}: its supervisor ended without a final state"
        return Fact(f"lost-{attempt:04d}", event, attempt, time_s, what, evidence)

    def end(self, attempt: int, state: str, cause: str, time_s: float) -> Fact | None:
        """Return the fact that an attempt ended in a state; None for other states."""
        if state == "REQUEUED":
            what = f"will be continued by attempt {attempt + 1}"
            return Fact(f"requeued-{attempt:04d}", "requeued", attempt, time_s, what, cause)
        if state not in _ENDS:
            return None
        if attempt in self._retried:
            what = f"failed in attempt {attempt} and begins again at once"
            return Fact(f"retried-{attempt:04d}", "requeued", attempt, time_s, what, cause)
        event = _ENDS[state]
        what = {"completed": "is completed", "failed": "failed", "cancelled": "was cancelled"}[event]
        return Fact(f"{event}-{attempt:04d}", event, attempt, time_s, what, cause)

    def _state(self, event: Event) -> Iterator[Fact]:
        state = event.data["state"]
        self._seen_s[event.attempt] = event.time_s
        fact = self.end(event.attempt, state, str(event.data.get("cause") or ""), event.time_s)
        if fact is not None:
            self._ended.add(event.attempt)
            yield fact

    def _retry(self, event: Event) -> Iterator[Fact]:
        self.retried(event.attempt)
        yield from ()

    def _stall(self, event: Event) -> Iterator[Fact]:
        who = f"{event.data['role']}-{event.data['replica']}"
        number = f"{event.attempt:04d}-{who}"
        self._hung[number] += 1
        what = f"stalled: {event.data['role']} {event.data['replica']} makes no progress"
        key = f"stalled-{number}-{self._hung[number]}"
        yield Fact(key, "stalled", event.attempt, event.time_s, what, str(event.data.get("problem") or ""))

    def _evaluation(self, event: Event) -> Iterator[Fact]:
        version, reward = int(event.data["version"]), float(event.data["reward"])
        if version <= self._version or not math.isfinite(reward):
            return
        self._version, before = version, self._best
        if before is not None and reward <= before[0]:
            return
        self._best = reward, version
        if before is not None:  # the first is the best of one
            what = f"has its best held-out reward: {reward:.4g} at version {version}"
            evidence = f"the best before was {before[0]:.4g} at version {before[1]}{_of(event.data)}"
            yield Fact(f"best-{version:06d}", "best", event.attempt, event.time_s, what, evidence)

    def _low(self, event: Event) -> Iterator[Fact]:
        data = event.data
        left = _amount(float(data["left"]), str(data["of"]))
        minutes = float(data["full_in_s"]) / 60
        yield from self._disk(event, f"has {left} left: {data['what']}", f"it is full in about {minutes:.0f} minutes")

    def _gone(self, event: Event) -> Iterator[Fact]:
        yield from self._disk(event, f"has no disk space: {event.data['what']}", "")

    def _disk(self, event: Event, what: str, evidence: str) -> Iterator[Fact]:
        # the message of a full disk has changing numbers
        limit = event.kind, str(event.data["what"]) if event.kind == "run.space_low" else ""
        before = self._space.get(limit, -math.inf)
        if event.time_s - before < _REPEAT_S:
            return
        self._space[limit] = event.time_s
        kind = event.kind.rpartition("_")[2]
        yield Fact(f"disk-{kind}-{int(event.time_s)}", "disk", event.attempt, event.time_s, what, evidence)


class _DropWatch:
    """Compares the share of dropped rollouts of the last steps with a threshold."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._above = threshold, False
        self._attempt = 0
        self._before: dict[str, float] = {}
        self._window: deque[tuple[Counter[str], float]] = deque(maxlen=_WINDOW)

    def take(self, counts: StepCounts) -> Fact | None:
        """Return the fact that the threshold is exceeded, once until the share has fallen to its half."""
        now = counts.rollouts
        if counts.attempt != self._attempt:
            # counters begin anew, or where a checkpoint has them: the first step of an attempt has no difference
            self._attempt, self._before = counts.attempt, now
            return None
        deltas = {name: now.get(name, 0.0) - self._before.get(name, 0.0) for name in (*_DROPS, "consumed")}
        self._before = now
        dropped = Counter({name: max(deltas[name], 0.0) for name in _DROPS})
        self._window.append((dropped, max(deltas["consumed"], 0.0)))
        lost = sum((each for each, _ in self._window), Counter())
        total = sum(lost.values()) + sum(used for _, used in self._window)
        share = sum(lost.values()) / total if total >= _FEWEST else 0.0
        if self._above:
            self._above = share > self._threshold / 2
            return None
        self._above = share > self._threshold
        if not self._above:
            return None
        causes = ", ".join(f"{name} {count:.0f}" for name, count in lost.most_common() if count)
        what = f"drops {share:.0%} of its rollouts at step {counts.step}"
        key = f"drops-{self._threshold:g}-{counts.step:06d}"
        evidence = f"in the last {len(self._window)} steps: {causes}"
        return Fact(key, "drops", counts.attempt, counts.time_s, what, evidence, self._threshold)


def _of(evaluation: Mapping[str, Any]) -> str:
    """Return the number of rollouts that a mean is over, where the evaluation says it."""
    counted, failed = evaluation.get("counted", evaluation.get("prompts")), evaluation.get("failed")
    if not isinstance(counted, int):
        return ""
    return f"; this is the mean of {counted} rollouts" + (f", and {failed} failed" if failed else "")


def _amount(left: float, of: str) -> str:
    return f"{left / (1 << 30):.1f} GiB" if of == "bytes" else f"{left:,.0f} {of}"
