"""Entries of a store that a restart at an earlier step withdraws: put aside, not deleted, until they are passed again.

::

    put-aside/000002/step-000024/     taken out of the store by the writer with token 2

A run that restarts at step 0, or continues from an older checkpoint, gives up later entries. That may have been a
mistake, so a rename takes them out of the store, and they are deleted once the run has reached their step again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from hpcrl.storage import lost_replies
from hpcrl.storage.fence import Fence
from hpcrl.storage.files import NumberedDirectories, fsync_dir, make_directory

DIRECTORY = "put-aside"
_REMOVED_PREFIX = ".removed-"


class QuarantinedEntry(NamedTuple):
    """An entry that was put aside.

    Attributes
    ----------
    number:
        Its step or version.
    token:
        Token of the writer that quarantined it: the attempt.
    """

    number: int
    token: int
    path: Path


def put_aside(fence: Fence, name: str) -> bool:
    """Take the entry ``name`` out of the store and keep it; whether there was one.

    Raises
    ------
    FencedError
        A newer writer has claimed the store.
    """
    if not fence.hide(name):
        return False
    place = fence.root / DIRECTORY / f"{fence.token:06d}"
    make_directory(place)
    target = place / name
    if target.exists():  # this attempt has quarantined an entry of that name before: the older one is the original
        fence.delete(name)
        return True
    fence.move_hidden(name, target)
    fsync_dir(place)
    return True


def list_asides(root: Path, prefix: str) -> list[QuarantinedEntry]:
    """Return the quarantined entries of the store ``root``, sorted by number; entries of one number newest first.

    Parameters
    ----------
    prefix:
        Prefix of the names of entries, for example ``step-``.
    """
    found = []
    try:
        tokens = [name for name in os.listdir(root / DIRECTORY) if name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    for token in tokens:
        entries = NumberedDirectories(root / DIRECTORY / token, prefix)
        found += [QuarantinedEntry(number, int(token), entries.path_of(number)) for number in entries.numbers()]
    return sorted(found, key=lambda aside: (aside.number, -aside.token))


def take_back(fence: Fence, aside: QuarantinedEntry) -> None:
    """Give an entry its name in the store again, in place of what has that name now."""
    fence.adopt(aside.path.name, aside.path)


def collect_asides(root: Path, prefix: str, *, up_to: int, keep: Collection[int] = ()) -> list[int]:
    """Delete what was put aside and is passed again; returns the numbers.

    Parameters
    ----------
    up_to:
        Step that the run has reached.
    keep:
        Numbers that stay because they are pinned.
    """
    removed = []
    for aside in list_asides(root, prefix):
        if aside.number > up_to or aside.number in keep:
            continue
        # out of sight at once: a half deleted one must not be taken back
        doomed = root / f"{_REMOVED_PREFIX}{aside.token:06d}-{aside.path.name}"
        try:
            lost_replies.rename(aside.path, doomed)
        except FileNotFoundError:
            continue
        fsync_dir(root)  # or a power failure could leave it put aside without all of its files
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(aside.number)
    return removed
