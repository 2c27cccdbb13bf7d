"""A few KiB of the filesystem that are kept from the start of an attempt, for its last words.

A run that fills its disk, or its quota, could not say so any more: no failure record, no last status. So an attempt
begins with two small files that take space, and gives them back when its end is to be said: one for what roles say
about their failure, one for the status and the events of the supervisor. A third one is there from the moment a run is
submitted: with it an attempt that finds the disk full can begin, and say that.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hpcrl.fs import atomic_write
from hpcrl.runs.rundir import RunDir

__all__ = ["SIZES", "START_BYTES", "keep_reserve", "keep_start_reserve", "release_reserve"]

_log = logging.getLogger(__name__)
SIZES = {"roles": 256 << 10, "supervisor": 128 << 10}
"""Bytes, by whose last words they are for."""
START_BYTES = 128 << 10
"""For the directory of an attempt, its status and its events."""


def _path(run: RunDir, whose: str) -> Path:
    return run.path / f".reserve-{whose}"


def keep_reserve(run: RunDir) -> None:
    """Take the space. OSError where there is none."""
    keep_start_reserve(run)
    for whose, size in SIZES.items():
        # random: a filesystem that compresses would keep nothing for zeros
        atomic_write(_path(run, whose), os.urandom(size))


def keep_start_reserve(run: RunDir) -> None:
    """Take the space that the next attempts begin in where there is no other. OSError where there is none."""
    path = _path(run, "start")
    if not path.exists():
        atomic_write(path, os.urandom(START_BYTES))


def release_reserve(run: RunDir, whose: str) -> bool:
    """Give the space back (``roles``, ``supervisor`` or ``start``); whether there was some."""
    try:
        _path(run, whose).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.warning("the space kept for last words could not be given back: %s", error)
        return False
    return True
