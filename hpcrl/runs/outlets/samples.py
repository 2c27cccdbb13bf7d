"""Rollouts of a step to read in sinks: of each environment the worst, the median and the best."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.rundir import RunDir

SAMPLE_COLUMNS = ("environment", "rank", "rollout", "reward", "advantage", "tokens", "staleness", "text")
"""Columns of a table of rollouts."""
_MOST_ENVIRONMENTS = 4
_MOST_CHARACTERS = 4000
"""Maximum characters of a text; the middle of longer ones is left out."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Line of a rollout in `hpcrl.runs.consumed`, as far as it is shown."""

    group: int
    member: int
    environment: str
    reward: float = math.nan
    advantage: float = math.nan
    tokens: int = 0
    staleness: int = 0
    text: str = ""


def sample_rows(run: RunDir, step: int) -> list[dict[str, Any]]:
    """Return rows with `SAMPLE_COLUMNS`, of the first environments by name; none where the step has no rollouts.

    Raises
    ------
    OSError
        Its file cannot be read.
    """
    found = [decode_lenient(line, _Line) for line in ConsumedRollouts(run.rollouts_dir).of(step)]
    lines = [line for line in found if line is not None and math.isfinite(line.reward)]
    rows = []
    for name in sorted({line.environment for line in lines})[:_MOST_ENVIRONMENTS]:
        own = sorted(
            (line for line in lines if line.environment == name),
            key=lambda line: (line.reward, line.group, line.member),
        )
        places = {"worst": 0, "median": len(own) // 2, "best": len(own) - 1}
        rows += [_row(rank, own[place]) for rank, place in places.items()]
    return rows


def _row(rank: str, line: _Line) -> dict[str, Any]:
    return {
        "environment": line.environment,
        "rank": rank,
        "rollout": f"{line.group}/{line.member}",
        "reward": line.reward,
        "advantage": line.advantage if math.isfinite(line.advantage) else None,
        "tokens": line.tokens,
        "staleness": line.staleness,
        "text": shortened(line.text, _MOST_CHARACTERS),
    }


def shortened(text: str, most: int) -> str:
    """Return a text; of one with more than ``most`` characters the ends, with a note between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out …\n{text[-half:]}"
