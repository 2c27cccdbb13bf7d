"""Slurm as a command asks it before it changes anything: an answer within seconds, or a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.slurm.client import SlurmClient

__all__ = ["reach_slurm_of", "reachable_slurm"]


def reachable_slurm(client: SlurmClient | None = None) -> SlurmClient:
    """See `hpcrl.slurm.reach.reachable_slurm`."""
    from hpcrl.slurm.reach import reachable_slurm as reach

    return reach(client)


def reach_slurm_of(run: RunDir) -> None:
    """See that the Slurm answers which alone can say what becomes of a run; nothing where the run has ended, or has
    no job.

    Raises what `reachable_slurm` does.
    """
    from hpcrl.runs.observe import open_job
    from hpcrl.slurm.lookup import client_of

    if (submission := open_job(run)) is not None:
        reachable_slurm(client_of(submission))
