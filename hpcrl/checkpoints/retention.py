"""Which entries go: a pure rule, the same for the trainer and for ``hpcrl checkpoint prune``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["doomed_steps"]


def doomed_steps(
    steps: Sequence[int], *, whole: Collection[int], pinned: Collection[int], keep_last: int, keep_every: int = 0
) -> list[int]:
    """Steps whose entries may be removed, ascending.

    Kept are the newest ``keep_last`` whole entries, everything newer than the oldest of them, multiples of
    ``keep_every`` (0: none), and pinned ones. A damaged entry does not count as one of the last: else it could push
    the last good one out.

    Parameters
    ----------
    steps:
        All entries.
    whole:
        Those whose files are all there in their sizes; the newest ``keep_last`` are enough.
    """
    last = sorted(whole)[-keep_last:] if keep_last > 0 else []
    if not last:
        return []
    return [
        step
        for step in sorted(steps)
        if step < last[0] and step not in pinned and not (keep_every > 0 and step > 0 and step % keep_every == 0)
    ]
