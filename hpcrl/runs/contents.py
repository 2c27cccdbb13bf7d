"""Contents of a run directory, as values that are passed between functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.plan import Plan


class RunContents(NamedTuple):
    """Run with its plan, profile and record.

    A function that has made or read them passes them on; the directory is read only where another process wrote it.

    Attributes
    ----------
    run:
        Its directory.
    cluster, plan, record:
        Contents of its files.
    """

    run: RunDir
    cluster: ClusterProfile
    plan: Plan
    record: RunRecord

    @classmethod
    def read(cls, run: RunDir) -> RunContents:
        """Read the files of ``run`` (RunDirError where one cannot be read)."""
        return cls(run, run.cluster(), run.plan(), RunRecord.read(run))
