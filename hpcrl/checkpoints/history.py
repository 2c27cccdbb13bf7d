"""Record of saved checkpoints: ``checkpoints/history.jsonl``, a line for each, also when the entries are gone.

A run whose entries are all damaged or removed must not be taken for one that has not come far enough to save.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from hpcrl.storage.files import open_log
from hpcrl.storage.msgspec_types import prepared

FILE = "history.jsonl"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was completed.

    Attributes
    ----------
    step, attempt:
        Optimizer steps done, and the attempt that saved it.
    time_s:
        Seconds since the epoch by its writer's clock; for people.
    """

    step: int
    attempt: int
    time_s: float


def add_saved(root: Path, *, step: int, attempt: int) -> None:
    """Write down that an entry is complete; durable on return, or with the first entry that goes.

    Raises
    ------
    OSError
        The filesystem refused. The entry is complete all the same.
    """
    line = msgspec.json.encode(Saved(step=step, attempt=attempt, time_s=time.time())) + b"\n"
    fd = open_log(root / FILE)
    try:
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_saved(root: Path) -> list[Saved]:
    """Return all that were ever completed, in the order of completion."""
    try:
        lines = (root / FILE).read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    saved = []
    for line in lines:
        try:
            saved.append(msgspec.json.decode(line, type=prepared(Saved)))
        except msgspec.DecodeError:
            continue  # empty, or the incomplete line of a writer that was killed
    return saved
