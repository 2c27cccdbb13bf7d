"""States of consumed rollouts over time: at an engine, in the environment, in a sandbox, before the judge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from hpcrl.config.environments import CalculatorEnv
from hpcrl.config.recipe import Recipe
from hpcrl.config.swe import SweEnv


class TimeHolder(StrEnum):
    """TimeHolder of a step: whose time a part of it is. Phases of the trainer are those of `hpcrl.runs.metrics`."""

    ENGINES = "engines"
    """The trainer waited for rollouts that were at an engine."""
    ENVIRONMENTS = "environments"
    """... that were in the code of an environment, outside of sandboxes; injected ``latency`` included."""
    SANDBOXES = "sandboxes"
    """... that were in an environment whose tools run in sandboxes."""
    JUDGE = "judge"
    """... whose last reply was there, and whose reward was not."""
    HAND_OFF = "hand-off"
    """... whose engine was frozen by an update, or that could not begin before a version was there."""
    ADMISSION = "staleness bound"
    """... that had not begun while nothing of their batch ran: places of the bound, or in flight."""
    BATCH = "batch"
    """All rollouts of the batch had ended: it was built and fetched."""
    UNKNOWN = "unknown"
    """The files do not say what the trainer waited for."""


class Stay(NamedTuple):
    """Time of a rollout in one state.

    Attributes
    ----------
    begin_s, end_s:
        Seconds since the epoch.
    holder:
        Whose time it is.
    of:
        Name of the environment.
    """

    begin_s: float
    end_s: float
    holder: TimeHolder
    of: str


class RolloutStays(NamedTuple):
    """A consumed rollout: its stays in order, without a gap from its begin to its end."""

    begin_s: float
    end_s: float
    stays: tuple[Stay, ...]


def sandboxed_environments(recipe: Recipe) -> frozenset[str]:
    """Return the names of the environments whose tools run in sandboxes."""
    return frozenset(
        environment.name
        for environment in recipe.environments
        if isinstance(environment, CalculatorEnv | SweEnv) or getattr(environment, "sandbox", None) is not None
    )


def delayed_environments(recipe: Recipe) -> dict[str, float]:
    """Return the median of the injected ``latency`` in seconds, by the name of the environment."""
    return {each.name: each.latency.median_s for each in recipe.environments if each.latency.median_s > 0}


def rollout_stays(
    lines: Sequence[bytes], *, sandboxed: frozenset[str], delayed: Mapping[str, float], ahead_s: float = 0.0
) -> list[RolloutStays] | None:
    """Return the stays of the rollouts of one step; None where a line does not say when its requests were.

    Parameters
    ----------
    lines:
        As in ``rollouts/step-NNNNNN.jsonl``.
    ahead_s:
        Clock of their writer minus that of the trainer, in seconds.
    """
    found = []
    for line in lines:
        try:
            value = json.loads(line)
            stays = _stays(value, sandboxed, delayed, ahead_s)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if stays is None:
            return None
        found.append(stays)
    return found or None


def _stays(
    value: Mapping[str, Any], sandboxed: frozenset[str], delayed: Mapping[str, float], ahead_s: float
) -> RolloutStays | None:
    turns = value.get("turns")
    if not turns or not value.get("ended_s"):
        return None
    name = str(value["environment"])
    end_s = float(value["ended_s"]) - ahead_s
    begin_s = end_s - float(value["seconds"])
    outside = TimeHolder.SANDBOXES if name in sandboxed else TimeHolder.ENVIRONMENTS
    stays, now = [], begin_s
    for turn in turns:
        # turns of programs may overlap: the sum of their seconds is cut at the end
        asked = min(end_s, now + float(turn[2]))
        replied = min(end_s, asked + float(turn[3]))
        stays += [Stay(now, asked, outside, name), Stay(asked, replied, TimeHolder.ENGINES, name)]
        now = replied
    # an injected latency comes after the last reply, as a slow test suite would
    stays.append(Stay(now, end_s, TimeHolder.ENVIRONMENTS if name in delayed else TimeHolder.JUDGE, name))
    return RolloutStays(begin_s, end_s, tuple(stay for stay in stays if stay.end_s > stay.begin_s))
