"""Finished rollouts of a run by its ledger, for means with intervals over prompts and for percentiles of lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcrl.analysis.series import Line, interval_of_sums
from hpcrl.dock.ledger.entries import ledger_bytes
from hpcrl.dock.ledger.replay import Held, State
from hpcrl.errors import HpcrlError
from hpcrl.runs.outlets.derived import nearest_quantile
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import read_ledger

MOST_LEDGER_BYTES = 512 << 20
"""Maximum size of a ledger that is read: longer ones take minutes and gigabytes of memory."""
INTERVAL_NOTE = (
    "Band: Student's interval of 95 % of the mean of groups (each the mean of its rollouts, because rollouts of one "
    "prompt depend on each other) in a window of a tenth of the run: {groups} groups."
)
_WINDOW_SHARE = 0.05
"""Share of the steps, to each side, of a window."""


class FinishedRollouts(NamedTuple):
    """Rollouts of the ledger.

    Attributes
    ----------
    trained:
        Those that were trained, by step, ascending.
    why_not:
        Reason why they are unknown; empty where they are known.
    """

    trained: dict[int, list[Held]]
    why_not: str = ""

    @property
    def environments(self) -> list[str]:
        """Return the names of environments."""
        return sorted({held.entry.environment for rollouts in self.trained.values() for held in rollouts})


def read_finished(run: RunDir, most_bytes: int = MOST_LEDGER_BYTES) -> FinishedRollouts:
    """Read the trained rollouts of a run; a ledger that cannot be read is a reason and not an error.

    Parameters
    ----------
    most_bytes:
        Maximum size of a ledger that is read.
    """
    try:
        size = ledger_bytes(run.rollouts_dir / "ledger")
        if size > most_bytes:
            return FinishedRollouts({}, f"its ledger of rollouts has {size >> 20:,} MiB, and is not read for a page")
        rollouts = read_ledger(run).rollouts
    except (HpcrlError, OSError) as error:
        return FinishedRollouts({}, str(error).splitlines()[0])
    return trained_rollouts(rollouts)


def trained_rollouts(rollouts: Iterable[Held]) -> FinishedRollouts:
    """Return those of some rollouts that were trained."""
    found: dict[int, list[Held]] = defaultdict(list)
    for held in rollouts:
        if held.state is State.TRAINED and held.step is not None:
            found[held.step].append(held)
    return FinishedRollouts(dict(sorted(found.items())))


def group_means(rollouts: Iterable[Held]) -> list[float]:
    """Return the mean reward of each group; rollouts without a finite reward are left out."""
    groups: dict[int, list[float]] = defaultdict(list)
    for held in rollouts:
        if held.entry.reward is not None and math.isfinite(held.entry.reward):
            groups[held.entry.group].append(held.entry.reward)
    return [math.fsum(rewards) / len(rewards) for rewards in groups.values()]


def reward_line(finished: FinishedRollouts, environment: str | None = None, label: str = "") -> Line:
    """Return the moving mean of rewards over groups with its interval; of one environment, or of all of them.

    A window has the groups of its steps with equal weights, so that one with few rollouts of an environment does not
    decide. Sums over windows are differences of running sums.
    """
    steps = list(finished.trained)
    counts, sums, squares = [0], [0.0], [0.0]
    for rollouts in finished.trained.values():
        means = group_means(held for held in rollouts if environment in (None, held.entry.environment))
        counts.append(counts[-1] + len(means))
        sums.append(sums[-1] + math.fsum(means))
        squares.append(squares[-1] + math.fsum(mean * mean for mean in means))
    radius = max(1, round(len(steps) * _WINDOW_SHARE))
    found = []
    for i in range(len(steps)):
        begin, end = max(0, i - radius), min(len(steps), i + radius + 1)
        count = counts[end] - counts[begin]
        found.append(interval_of_sums(count, sums[end] - sums[begin], squares[end] - squares[begin]) if count else None)
    known = sorted(each.count for each in found if each is not None)
    span = "no" if not known else str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
    return Line(
        label,
        steps,
        [None if each is None else each.mean for each in found],
        [None if each is None else each.low for each in found],
        [None if each is None else each.high for each in found],
        INTERVAL_NOTE.format(groups=span),
    )


def length_lines(finished: FinishedRollouts, shares: Sequence[float] = (0.1, 0.5, 0.9)) -> list[Line]:
    """Return percentiles of the sampled tokens of the rollouts of each step."""
    steps = list(finished.trained)
    lengths = [sorted(held.entry.sampled_tokens for held in rollouts) for rollouts in finished.trained.values()]
    return [
        Line(f"{share:.0%} quantile", steps, [nearest_quantile(each, share) for each in lengths]) for share in shares
    ]
