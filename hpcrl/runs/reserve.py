"""Reserved space of a few KiB on the filesystem, kept from the start of an attempt for its final records.

A run that fills its disk, or its quota, could not record that: neither a failure record nor a last status. So an
attempt begins with two small files that take space, and removes them when its end must be recorded: one for failure
records of roles, one for the status and the events of the supervisor. A third one exists from the submit on: with it an
attempt can begin on a full disk, and report that.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write

_log = logging.getLogger(__name__)
SIZES = {"roles": 256 << 10, "supervisor": 128 << 10}
"""Reserved bytes, by the processes whose final records they are for."""
START_BYTES = 128 << 10
"""Reserved bytes for the directory of an attempt, its status and its events."""


def _path(run: RunDir, whose: str) -> Path:
    return run.path / f".reserve-{whose}"


def keep_reserve(run: RunDir) -> None:
    """Reserve the space. OSError where there is none."""
    keep_start_reserve(run)
    for whose, size in SIZES.items():
        # random data: a compressing filesystem would reserve nothing for zeros
        atomic_write(_path(run, whose), os.urandom(size))


def keep_start_reserve(run: RunDir) -> None:
    """Reserve the space in which later attempts can start on a full filesystem, unless it is reserved already.

    Raises
    ------
    OSError
        The filesystem has not enough space.
    """
    path = _path(run, "start")
    if not path.exists():
        atomic_write(path, os.urandom(START_BYTES))


def release_reserve(run: RunDir, whose: str) -> bool:
    """Release the space (``roles``, ``supervisor`` or ``start``); return whether there was any."""
    try:
        _path(run, whose).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.warning("the space reserved for final records could not be released: %s", error)
        return False
    return True
