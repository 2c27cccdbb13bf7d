"""Requests to a trainer that trains: files in the directory of its attempt, which rank 0 lists once a step."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from hpcrl.runs.profile_request import requested_ranks
from hpcrl.runs.role import RoleContext, save_request_path

_log = logging.getLogger(__name__)


class TrainerRequests(NamedTuple):
    """Requests to all ranks.

    Attributes
    ----------
    save:
        A checkpoint is to be saved after this step, because the attempt ends soon.
    profiled_ranks:
        Ranks to be profiled (`hpcrl.trainer.step.step_profiler`); None where that cannot be read now.
    """

    save: bool
    profiled_ranks: tuple[int, ...] | None


class RequestReader:
    """Reads the requests of an attempt."""

    def __init__(self, context: RoleContext) -> None:
        self._path = save_request_path(context.run, context.attempt)
        self._saved = False

    def read(self) -> TrainerRequests:
        """Return what is requested now. A request to save is returned once."""
        try:
            # a listing, because an NFS client may remember for a minute that a name did not exist
            names = os.listdir(self._path.parent)
        except OSError as error:
            _log.warning("requests cannot be read now: %s", error)
            return TrainerRequests(False, None)
        save = self._path.name in names and not self._saved
        self._saved |= save
        return TrainerRequests(save, requested_ranks(names))
