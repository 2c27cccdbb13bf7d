"""Removal of runs and checkpoints by a policy: nothing that lives, is pinned, or belongs to another user."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.checkpoints import CheckpointItem, plan_prune, remove_checkpoints
from hpcrl.submit.removal import disk_use, removable, remove_run, surely_ended

_DAY_S = 86400.0


class CollectionPolicy(NamedTuple):
    """A policy of removal.

    Attributes
    ----------
    older_than_days:
        Days since the end of a run, or since its last sign of life.
    states:
        States of runs that it is about.
    keep_checkpoints:
        Keep this number of the newest checkpoints of each run, and remove no run; None: whole runs go.
    """

    older_than_days: float
    states: frozenset[RunState]
    keep_checkpoints: int | None = None


class Collectable(NamedTuple):
    """A run of which something goes: all of it where there are no ``checkpoints``."""

    run: RunDir
    state: RunState
    age_days: float
    bytes: int
    checkpoints: tuple[CheckpointItem, ...] = ()


class Spared(NamedTuple):
    """A run that the policy is about, and that stays all the same."""

    run: RunDir
    why: str


def find_collectable(
    runs: Iterable[RunDir], policy: CollectionPolicy, *, now_s: float | None = None
) -> tuple[list[Collectable], list[Spared]]:
    """Return the runs of which something would go, and those that only a reason keeps. Nothing is changed."""
    now_s = time.time() if now_s is None else now_s
    going, spared = list[Collectable](), list[Spared]()
    for run in runs:
        try:
            found = _judged(run, policy, now_s)
        except (HpcrlError, OSError) as error:
            spared.append(Spared(run, str(error).partition("\n")[0]))
            continue
        if isinstance(found, Spared):
            spared.append(found)
        elif found is not None:
            going.append(found)
    return going, spared


def collect_run(each: Collectable) -> None:
    """Remove a run, or the checkpoints of it that were found (HpcrlError where it may not go any more)."""
    if not each.checkpoints:
        remove_run(each.run)
        return
    surely_ended(each.run)
    remove_checkpoints(each.run, each.checkpoints)


def _judged(run: RunDir, policy: CollectionPolicy, now_s: float) -> Collectable | Spared | None:
    if run.path.lstat().st_uid != os.geteuid():
        return Spared(run, "it belongs to another user")
    from hpcrl.runs.observe import observe  # noqa: PLC0415 - it asks Slurm, which runs of others need not

    view = observe(run, now_s=now_s)
    if view.state not in policy.states or not view.state.ended:
        return None
    last_s = view.ended_at_s or view.heartbeat_s or view.created_at_s or now_s
    if view.state is RunState.LOST:
        last_s = view.heartbeat_s or view.created_at_s or now_s  # its end is the time of the observation
    age_days = (now_s - last_s) / _DAY_S
    if age_days < policy.older_than_days:
        return None
    if policy.keep_checkpoints is None:
        removable(run)
        size = sum(part.bytes for part in disk_use(run).values())
        return Collectable(run, view.state, age_days, size)
    surely_ended(run)
    doomed = tuple(plan_prune(run, keep_last=policy.keep_checkpoints, keep_every=0, content=False))
    if not doomed:
        return None
    return Collectable(run, view.state, age_days, sum(item.bytes for item in doomed), doomed)
