"""The exceptions of hpcrl.

::

    HpcrlError                      base; a message for a person, with a hint
    ├── UsageError                  what was asked cannot be done (exit code 2)
    │   ├── ConfigError             a recipe, cluster profile or override is wrong; carries every finding
    │   ├── DoesNotFitError         no plan of the size that was asked for fits (exit code 3)
    │   ├── UnknownSizesError       the model's sizes are needed and not known (exit code 4)
    │   ├── RunDirError             a run does not exist, is ambiguous, or its directory is in use
    │   └── MissingExtraError       an optional part is not installed; names the install command
    ├── RunFailedError              the run itself failed (exit code 1)
    ├── EnvironmentFailedError      an environment of the user's own fails; its exception comes first, then its frames
    ├── RolloutsFailedError         too large a share of the rollouts of an environment failed
    ├── HandoffError                a weight hand-off is missing, torn or wrong
    ├── RolloutsLostError           columns of finished rollouts are gone or damaged wherever they should be
    ├── CheckpointError             a checkpoint entry is missing, torn or wrong
    ├── NothingToRestoreError       a run that has saved checkpoints can restore none; it does not begin again
    ├── FencedError                 a newer attempt writes here now; this process must end
    ├── DeadlineError               a wait ended without what it waited for
    └── PeerLostError               another role of the run went away; a consequence, not a cause

``ValueError`` and similar are for callers of hpcrl's Python functions, ``assert`` is for its own invariants.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the ``hpcrl`` command (documented in docs/cli.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    """A plan asks for more memory or more nodes than there are (``hpcrl plan``)."""
    UNKNOWN = 4
    """A plan cannot be judged: the model's sizes are not known, or the profile lacks a number."""
    NO_PROGRESS = 93
    """The run was given up: attempts in a row made no progress. A script must not resume it."""
    NOTHING_TO_RESTORE = 94
    """No checkpoint can be restored: a person must decide how to continue (``hpcrl resume --from-scratch``)."""
    CANCELLED = 130


class HpcrlError(Exception):
    """Base of all errors that are shown to a person without a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(HpcrlError):
    """Raised when a request cannot be carried out; nothing was changed."""

    exit_code = ExitCode.USAGE


_LONGEST = 400
"""Maximum characters of a key or a sentence in a message, which may quote a file's values of any length."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong in a configuration.

    Attributes
    ----------
    where:
        ``file:line`` (or ``--set``) the value came from.
    key:
        Dotted path of the value, for example ``engine.replicas``.
    what:
        Description of the problem, in one sentence.
    hint:
        Action that solves it; may be empty if ``what`` names it.
    """

    where: str
    key: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        what = self.what if len(self.what) <= _LONGEST else f"{self.what[:_LONGEST]}…"
        key = self.key if len(self.key) <= _LONGEST else f"{self.key[:_LONGEST]}…"
        head = f"{self.where}: {key}: {what}" if key else f"{self.where}: {what}"
        return f"{head}\n    hint: {self.hint}" if self.hint else head


class ConfigError(UsageError):
    """A configuration is wrong; carries all findings of one load, not the first one."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        plural = "problem" if len(self.findings) == 1 else "problems"
        super().__init__(f"{len(self.findings)} {plural}\n" + "\n".join(f"  {f}" for f in self.findings))


class DoesNotFitError(UsageError):
    """No plan of the size that was asked for fits."""

    exit_code = ExitCode.DOES_NOT_FIT


class UnknownSizesError(UsageError):
    """The sizes of a model are needed, and its config does not contain them in a known form."""

    exit_code = ExitCode.UNKNOWN


class RunDirError(UsageError):
    """A run does not exist, is ambiguous, or its directory is in use."""


class MissingExtraError(UsageError):
    """An optional part of hpcrl is not installed."""

    def __init__(self, extra: str, module: str) -> None:
        from hpcrl.installing import install_command  # noqa: PLC0415 - guards load this module, and must stay small

        super().__init__(
            f"this needs the Python module {module!r}, which is part of the extra {extra!r}\n"
            f"    hint: {install_command(extra)}"
        )
        self.extra = extra


class RunFailedError(HpcrlError):
    """A run ended without success."""


class EnvironmentFailedError(HpcrlError):
    """An environment of the user's own cannot be made, or fails in all its rollouts.

    The first line names the environment, the type of its exception and the message; the next are its own frames.
    """


class RolloutsFailedError(HpcrlError):
    """Too large a share of the rollouts of an environment failed (``rollouts.failures.end_share``)."""


class HandoffError(HpcrlError):
    """A weight hand-off is missing, torn or does not fit the model."""


class RolloutsLostError(HpcrlError):
    """Columns of finished rollouts are gone or damaged wherever they should be."""


class CheckpointError(HpcrlError):
    """A checkpoint entry is missing, torn or does not fit."""


class NothingToRestoreError(HpcrlError):
    """A run that has saved checkpoints can restore none of them; it does not begin again by itself."""

    exit_code = ExitCode.NOTHING_TO_RESTORE


class FencedError(HpcrlError):
    """A newer attempt of the run writes to a store now; this process may not."""


class DeadlineError(HpcrlError):
    """A wait ended without what it waited for."""


class PeerLostError(HpcrlError):
    """Another role of the run went away. Never the first cause of a failure."""


_AGAIN = "try again; if the problem persists, report it to the site"
_REFUSALS = {
    errno.EACCES: ("permission denied", "ask its owner, or name a directory of yours"),
    errno.EPERM: ("the operation is not permitted", "ask its owner, or name a directory of yours"),
    errno.EROFS: ("the filesystem is read-only", "name a directory on another one"),
    errno.ENOSPC: ("no space is left on the device", "make room there, or name a directory on another one"),
    errno.ESTALE: ("the handle is stale: the file server has lost it, or was restarted", _AGAIN),
    errno.EIO: ("the filesystem failed to read or write", _AGAIN),
    errno.ETIMEDOUT: ("the file server does not answer", _AGAIN),
    errno.EDQUOT: ("the quota is used up", "make room there, or name a directory on another filesystem"),
}


def refusal(error: OSError) -> UsageError | None:
    """Return a filesystem's refusal as one message that names the file; None if the error may be a defect of hpcrl."""
    if error.errno not in _REFUSALS:
        return None
    what, hint = _REFUSALS[error.errno]
    if error.filename is None:
        # a write to an already open file: for a command mostly its own output, as in `hpcrl plan > FILE`
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        return UsageError(f"the output could not be written: {what}\n    hint: {hint}") if full else None
    return UsageError(f"{error.filename}: {what}\n    hint: {hint}")
