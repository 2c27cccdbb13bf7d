"""Removing a run that has ended: what it holds, whether it may go, and its removal."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import RunDirError
from hpcrl.processes import procfs
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import user_name
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.claim import claimed
from hpcrl.runs.status import RunState
from hpcrl.runs.views.checkpoints import pinned_steps
from hpcrl.storage import lost_replies
from hpcrl.submit.submission import end_leftovers

_PARTS = ("checkpoints", "weights", "rollouts", "attempts", "metrics", "events")
_OTHER = "the rest"


class DiskUse(NamedTuple):
    """Disk use of one part of a run: bytes of blocks that its files take, a hard link counted once."""

    bytes: int
    files: int


def removable(run: RunDir) -> RunView:
    """Return the state of a run that may be removed.

    Raises
    ------
    RunDirError
        It has not certainly ended; or it has pinned checkpoints.
    """
    view = surely_ended(run)
    if pinned := pinned_steps(run):
        raise RunDirError(
            f"checkpoints of {run.name} are pinned: steps {', '.join(map(str, pinned))}; nothing was changed\n"
            f"    hint: hpcrl checkpoint unpin {reference(run)} {pinned[0]}"
        )
    return view


def surely_ended(run: RunDir) -> RunView:
    """Return the state of a run of which nothing can be alive (RunDirError where that is not certain)."""
    view = observe(run)
    if not view.state.ended:
        raise RunDirError(
            f"the run {run.name} has not ended ({view.state}); nothing was changed\n"
            f"    hint: end it first: hpcrl cancel {reference(run)}"
        )
    # a silent supervisor on another machine may be cut off, not dead
    host = None if view.supervisor is None else view.supervisor.host
    if view.state is RunState.LOST and view.job is None and host not in (None, procfs.hostname()):
        raise RunDirError(
            f"{run.name} was supervised on {host}, which is not visible here: it may be alive; "
            f"nothing was changed\n    hint: call hpcrl rm {reference(run)} there"
        )
    return view


def disk_use(run: RunDir) -> dict[str, DiskUse]:
    """Return the disk use of the parts of a run, the largest first. Files that vanish meanwhile do not count."""
    sizes = dict.fromkeys((*_PARTS, _OTHER), DiskUse(0, 0))
    seen: set[tuple[int, int]] = set()
    for folder, _, names in os.walk(run.path):
        top = Path(folder).relative_to(run.path).parts[:1]
        part = top[0] if top and top[0] in _PARTS else _OTHER
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            size = sizes[part]
            new = (status.st_dev, status.st_ino) not in seen
            seen.add((status.st_dev, status.st_ino))
            sizes[part] = DiskUse(size.bytes + (512 * status.st_blocks if new else 0), size.files + 1)
    found = [(part, size) for part, size in sizes.items() if size.files]
    return dict(sorted(found, key=lambda item: item[1].bytes, reverse=True))


def remove_run(run: RunDir) -> None:
    """Remove a run: it leaves the list at once, by a rename, and then its files go.

    Raises
    ------
    RunDirError
        It may not be removed (`removable`); or files of it could not be: the message says where they are.
    """
    with claimed(run, user=user_name()):
        removable(run)  # again: it cannot be resumed from here on
        end_leftovers(run)
        path = run.path.resolve()
        doomed = path.with_name(f".removed-{run.name}-{uuid.uuid4().hex[:8]}")
        lost_replies.rename(path, doomed)
    try:
        lost_replies.remove_tree(doomed)
    except OSError as error:
        raise RunDirError(
            f"{run.name} is no longer a run, but not all of its files could be removed: {error}\n"
            f"    hint: remove the rest: rm -r {doomed}"
        ) from error
