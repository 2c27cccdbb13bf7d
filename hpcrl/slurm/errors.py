"""Errors of Slurm's commands.

::

    SlurmError                      base; carries the command and its output
    ├── SlurmMissingError           Slurm's commands are not installed here (exit code 2)
    ├── NoClusterError              they are, and belong to no cluster (exit code 2)
    ├── SlurmUnavailableError       the controller did not answer; a warning for a watcher, never the end of a job
    │   ├── NoConfigurationError    the slurm.conf that is named cannot be read (exit code 2)
    │   └── SubmitUnclearError      a submission got no answer and could not be looked up
    ├── SlurmRejectedError          Slurm understood and refused (exit code 2)
    ├── NoSuchJobError              the controller does not know the job (any more)
    ├── NoAccountingError           this cluster keeps no accounting
    └── SlurmAnswerError            the answer could not be read

`classify` makes one of them from the output of a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hpcrl.errors import ExitCode, HpcrlError


class SlurmError(HpcrlError):
    """Raised where a Slurm command failed."""


class SlurmMissingError(SlurmError):
    """Raised where a Slurm command is not installed on this machine."""

    exit_code = ExitCode.USAGE

    def __init__(self, program: str) -> None:
        super().__init__(
            f"Slurm's command {program!r} is not on this machine\n"
            "    hint: run hpcrl on a login node, or load the site's Slurm module; to try without a cluster, see "
            "`hpcrl devcluster up --help`"
        )


class NoClusterError(SlurmError):
    """Slurm's commands are installed, but no configuration says which cluster they belong to."""

    exit_code = ExitCode.USAGE


class SlurmUnavailableError(SlurmError):
    """Raised where the controller (or accounting daemon) did not answer in time. Jobs are then unknown, not gone."""


class NoConfigurationError(SlurmUnavailableError):
    """Raised where the ``slurm.conf`` cannot be read: for a watcher a warning, as its filesystem may come back."""

    exit_code = ExitCode.USAGE


class SubmitUnclearError(SlurmUnavailableError):
    """Raised where a submission got no answer and may have been accepted. Submitting again looks it up first."""


class SlurmRejectedError(SlurmError):
    """Raised where Slurm understood a request and refused it."""

    exit_code = ExitCode.USAGE


class NoSuchJobError(SlurmError):
    """Raised where the controller does not know the job: it never existed, or ended longer ago than ``MinJobAge``."""


class NoAccountingError(SlurmError):
    """Raised where the cluster has no accounting, so that ``sacct`` and ``sacctmgr`` have no data."""


class SlurmAnswerError(SlurmError):
    """Raised where a command succeeded and its output cannot be parsed."""


_SHOWN = 80
"""Maximum number of characters of a command that is shown: lists of columns and of jobs are longer."""


def in_short(argv: Sequence[str]) -> str:
    """Return a command shortened to a recognizable length."""
    words = list(argv)
    while len(words) > 1 and len(shlex.join(words)) > _SHOWN:
        words.pop()
    return shlex.join(words) + (" ..." if len(words) < len(argv) else "")


_AWAY = (
    "unable to contact slurm controller",
    "slurm controller not responding",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unable to connect",
    "standby mode",
    "resource temporarily unavailable",
    "problem talking to the database",
    "unable to establish connection",
    "communication connection failure",
    "unexpected message received",
    "slurm temporarily unable to accept job",
    "munge encode failed",  # munged is away on this machine
)
"""Parts of messages (lower case) about a missing answer. From slurm_errno.c and src/api, 22.05 to 25.11."""

_NO_CLUSTER = ("could not establish a configuration source",)
_NO_JOB = ("invalid job id", "job not found")
_NO_ACCOUNTING = ("accounting storage is disabled", "not running a supported accounting_storage plugin")


def classify(argv: Sequence[str], exit_code: int, said: str) -> SlurmError:
    """Return the error of a failed command, by its output ``said`` (standard error and output together)."""
    text = said.strip()
    low = text.lower()
    if any(part in low for part in _NO_CLUSTER):
        return NoClusterError(
            f"Slurm's commands are installed on this machine, but it belongs to no cluster ({argv[0]}: no slurm.conf)\n"
            "    hint: run hpcrl on a login node, or set SLURM_CONF; to try without a cluster: hpcrl devcluster up"
        )
    kind: type[SlurmError] = SlurmRejectedError
    if any(part in low for part in _NO_ACCOUNTING):
        kind = NoAccountingError
    elif any(part in low for part in _AWAY):
        kind = SlurmUnavailableError
    elif any(part in low for part in _NO_JOB):
        kind = NoSuchJobError
    return kind(f"{in_short(argv)} failed ({exit_code}): {text or 'it printed nothing'}")
