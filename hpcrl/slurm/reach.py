"""Slurm as a command asks it before it changes anything: an answer within seconds, or a hint."""

from __future__ import annotations

import os

from hpcrl.errors import UsageError
from hpcrl.runs.observe import open_job
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import check_configuration
from hpcrl.slurm.lookup import slurm_client_of


def reachable_slurm(client: SlurmClient | None = None) -> SlurmClient:
    """Return a client whose controller has just answered ``scontrol ping``, which answers at once.

    Parameters
    ----------
    client:
        Whom to ask; the Slurm of this shell by default.

    Raises
    ------
    SlurmMissingError, NoConfigurationError
        Slurm's commands are not here, or ``slurm.conf`` is not where it should be.
    UsageError
        The controller does not answer; nothing was changed.
    """
    client = client or SlurmClient()
    check_configuration(client.conf)
    if not client.answers():
        conf = client.conf or os.environ.get("SLURM_CONF")
        raise UsageError(
            "Slurm's controller does not answer; nothing was changed\n"
            "    hint: try again later; scontrol ping shows the controller's host and state"
            + (f"\n    hint: SLURM_CONF is {conf}: check that this file is of your cluster" if conf else "")
        )
    return client


def reach_slurm_of(run: RunDir) -> None:
    """Check that the Slurm answers which alone knows the state of a run; do nothing where it has no open job.

    Raises what `reachable_slurm` does.
    """
    if (submission := open_job(run)) is not None:
        reachable_slurm(slurm_client_of(submission))
