"""Log-ratios of the tokens of some rollouts: the trainer's log-probability minus the engine's.

A run keeps those of a few rollouts of each of its newest steps, in ``rollouts/ratios/N.json`` with N the step modulo
`KEPT_STEPS`. A step that an attempt computes again replaces its file, so the directory does not grow. Pages show these
values; nothing else needs them, so a missing or damaged file is no fault.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import decode_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEPT_STEPS = 10
"""Number of newest steps whose log-ratios are kept."""
_MOST_BYTES = 1 << 20
"""Maximum size of a file that is read; the trainer writes at most a third of it."""


class RolloutRatios(msgspec.Struct, frozen=True):
    """Log-ratios of a rollout.

    Attributes
    ----------
    group, member:
        The rollout.
    digest:
        `tokens_digest` of its sampled tokens: after a restart at an earlier step, a group may be sampled again under
        the same number, and the record of the other tokens does not apply to it.
    log_ratios:
        Of its sampled tokens, in order; None where one is not finite.
    """

    group: int
    member: int
    digest: int
    log_ratios: list[float | None]


class StepRatios(msgspec.Struct, frozen=True):
    """Log-ratios of some rollouts of a step, and the attempt that computed them."""

    step: int
    attempt: int
    rollouts: list[RolloutRatios]

    def encode(self) -> bytes:
        """Return the content of the file."""
        return msgspec.json.encode(self) + b"\n"


def ratios_path(run: RunDir, step: int) -> Path:
    """Return the file of a step."""
    return run.rollouts_dir / "ratios" / f"{step % KEPT_STEPS}.json"


def tokens_digest(sampled: NDArray[Any]) -> int:
    """Return a checksum of the ids of sampled tokens, whatever integers they are given as."""
    return zlib.crc32(sampled.astype("<i4").tobytes())


def read_ratios(run: RunDir) -> dict[tuple[int, int, int], RolloutRatios]:
    """Return the log-ratios of rollouts by step, group and member. Files that cannot be read are left out."""
    found: dict[tuple[int, int, int], RolloutRatios] = {}
    for number in range(KEPT_STEPS):
        try:
            with ratios_path(run, number).open("rb") as file:
                ratios = decode_json(file.read(_MOST_BYTES), StepRatios)
        except (OSError, ValueError):
            continue
        found |= {(ratios.step, each.group, each.member): each for each in ratios.rollouts}
    return found
