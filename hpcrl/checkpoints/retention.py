"""Rule that chooses the entries to remove: a pure function for the trainer and for ``hpcrl checkpoint prune``."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def removable_steps(
    steps: Sequence[int], *, whole: Collection[int], pinned: Collection[int], keep_last: int, keep_every: int = 0
) -> list[int]:
    """Return the steps whose entries may be removed, ascending.

    The newest ``keep_last`` whole entries, all entries newer than the oldest of them, multiples of ``keep_every``
    (0: none) and pinned entries are kept. A damaged entry does not count as one of the last: otherwise it could cause
    the removal of the last good one.

    Parameters
    ----------
    steps:
        Steps of all entries.
    whole:
        Steps of entries whose files all exist in their sizes; the newest ``keep_last`` are enough.
    """
    last = sorted(whole)[-keep_last:] if keep_last > 0 else []
    if not last:
        return []
    return [
        step
        for step in sorted(steps)
        if step < last[0] and step not in pinned and not (keep_every > 0 and step > 0 and step % keep_every == 0)
    ]
