"""Slurm as a command asks it before it changes anything: with a short deadline, and a hint where nobody answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrl.slurm.client import SlurmClient

__all__ = ["reachable_slurm"]

_ANSWER_S = 15.0
"""Slurm's own commands give up on a controller that is away after nine."""


def reachable_slurm() -> SlurmClient:
    """A client whose controller has just answered.

    Raises
    ------
    NoClusterError
        ``SLURM_CONF`` names no file that can be read.
    UsageError
        The controller does not answer; nothing was changed.
    """
    import os
    from pathlib import Path

    from hpcrl.errors import UsageError
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.errors import NoClusterError, SlurmUnavailableError

    conf = os.environ.get("SLURM_CONF")
    if conf and not os.access(conf, os.R_OK):  # Slurm's commands would look for it for a minute
        missing = "is not there" if not Path(conf).exists() else "may not be read by you"
        raise NoClusterError(
            f"SLURM_CONF is {conf}, which {missing}\n"
            "    hint: unset SLURM_CONF, or let it name the slurm.conf of your cluster"
        )
    try:
        SlurmClient(timeout_s=_ANSWER_S).config()
    except SlurmUnavailableError as error:
        raise UsageError(
            f"Slurm does not answer: {error}\n"
            f"    hint: nothing was changed; try again later, or see whether {conf or 'this machine'} belongs to your "
            "cluster: scontrol ping"
        ) from None
    return SlurmClient()
