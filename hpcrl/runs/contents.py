"""What a run directory says, as values that one function hands to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.plan import Plan

__all__ = ["RunContents"]


class RunContents(NamedTuple):
    """A run with its plan, profile and record.

    Whoever has just made or read them hands them on: the directory is read where another process wrote.

    Attributes
    ----------
    run:
        The directory.
    cluster, plan, record:
        As its files say.
    """

    run: RunDir
    cluster: ClusterProfile
    plan: Plan
    record: RunRecord

    @classmethod
    def read(cls, run: RunDir) -> RunContents:
        """Read the files of ``run`` (RunDirError where one cannot be read)."""
        return cls(run, run.cluster(), run.plan(), RunRecord.read(run))
