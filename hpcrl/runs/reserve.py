"""A few KiB of the filesystem that are kept from the start of an attempt, for its last words.

A run that fills its disk, or its quota, could not say so any more: no failure record, no last status. So an attempt
begins with two small files that take space, and gives them back when its end is to be said: one for what roles say
about their failure, one for the status and the events of the supervisor.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from hpcrl.fs import atomic_write
from hpcrl.runs.rundir import RunDir

__all__ = ["SIZES", "keep_reserve", "release_reserve"]

_log = logging.getLogger(__name__)
SIZES = {"roles": 256 << 10, "supervisor": 128 << 10}
"""Bytes, by whose last words they are for."""


def _path(run: RunDir, whose: str) -> Path:
    return run.path / f".reserve-{whose}"


def keep_reserve(run: RunDir) -> None:
    """Take the space. OSError where there is none."""
    for whose, size in SIZES.items():
        # random: a filesystem that compresses would keep nothing for zeros
        atomic_write(_path(run, whose), os.urandom(size))


def release_reserve(run: RunDir, whose: str) -> None:
    """Give the space back (``roles`` or ``supervisor``); nothing where it was given back before."""
    with contextlib.suppress(FileNotFoundError):
        try:
            _path(run, whose).unlink()
        except FileNotFoundError:
            raise
        except OSError as error:
            _log.warning("the space kept for last words could not be given back: %s", error)
