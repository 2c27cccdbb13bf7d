"""Slurm as a command asks it before it changes anything: an answer within seconds, or a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.slurm.client import SlurmClient


def reachable_slurm(client: SlurmClient | None = None) -> SlurmClient:
    """See `hpcrl.slurm.reach.reachable_slurm`."""
    from hpcrl.slurm.reach import reachable_slurm as reach

    return reach(client)


def reach_slurm_of(run: RunDir) -> None:
    """See `hpcrl.slurm.reach.reach_slurm_of`."""
    from hpcrl.slurm.reach import reach_slurm_of as reach

    reach(run)
