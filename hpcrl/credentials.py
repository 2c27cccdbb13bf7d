"""The run's token: 32 random bytes in a file of the run directory that only its owner reads.

Every server of a run answers those alone who know it. Every role finds it by ``HPCRL_RUN_DIR``; it is in no command
line, no environment variable, no log and no other file. A role's requests say of which attempt it is, too, so that one
that was left over from an older attempt changes nothing in a newer one::

    Authorization: Bearer <token>.<attempt>

Both in one header, because a router in between may hand on nothing else. People and programs that only look (metrics,
health) need no attempt: ``Authorization: Bearer <token>``, which is the content of the file.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import RunDirError
from hpcrl.fs import atomic_create

__all__ = ["TOKEN_FILE", "Credentials", "Refusal", "ensure_token", "read_token"]

TOKEN_FILE = "token"
_TOKEN = re.compile(r"[0-9a-f]{64}")
_LOOKING = frozenset({"/health", "/liveness", "/metrics", "/metrics/run"})
"""Paths that only tell something, for who may not be part of an attempt."""


class Refusal(NamedTuple):
    """Why a request is not answered.

    Attributes
    ----------
    status:
        401: it did not bring the token. 403: it is of another attempt, or does not say of which.
    reason:
        ``no_token``, ``wrong_token``, ``no_attempt`` or ``other_attempt``.
    message:
        For the caller.
    """

    status: int
    reason: str
    message: str


def ensure_token(run_dir: Path) -> None:
    """Make the token of a run that has none. Of several that try at once, one makes it."""
    path = run_dir / TOKEN_FILE
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            atomic_create(path, secrets.token_hex(32).encode(), mode=0o600)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises
    ------
    RunDirError
        It is not there, others own it or may read it, or it is no token.
    """
    try:
        # a pipe that nobody writes to is refused below, and not waited for
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="ascii", errors="replace") as stream:
            status = os.fstat(fd)
            text = stream.read(256).strip()
    except OSError as error:
        raise RunDirError(
            f"the token of the run cannot be read: {path}: {error.strerror}\n"
            "    hint: the next attempt makes one where it is missing: hpcrl resume RUN"
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RunDirError(
            f"{path} is not a file that its owner alone can read, and that we own\n"
            "    hint: remove it, the next attempt makes another one; other users may know it"
        )
    if not _TOKEN.fullmatch(text):
        raise RunDirError(f"{path} holds no token\n    hint: remove it, the next attempt makes another one")
    return text


class Credentials(NamedTuple):
    """What a role of a run brings along, and expects of others.

    Attributes
    ----------
    token:
        Of the run.
    attempt:
        Its own; None for who is part of none, and for a server outside of a run, which serves every attempt.
    """

    token: str
    attempt: int | None = None

    @classmethod
    def of_run(cls, run_dir: Path, attempt: int | None = None) -> Credentials:
        """Read the credentials of a role of ``attempt`` (RunDirError where the token cannot be read)."""
        return cls(read_token(run_dir / TOKEN_FILE), attempt)

    @classmethod
    def from_env(cls) -> Credentials | None:
        """Read the credentials of this process; None where no supervisor of a run started it (RunDirError as above)."""
        run_dir = os.environ.get("HPCRL_RUN_DIR")
        return cls.of_run(Path(run_dir), int(os.environ["HPCRL_ATTEMPT"])) if run_dir else None

    def __repr__(self) -> str:
        # a traceback or a log line may show it
        return f"Credentials(attempt={self.attempt})"

    @property
    def headers(self) -> dict[str, str]:
        """Headers for requests to servers of the run, and to no others."""
        return {"Authorization": f"Bearer {self.bearer}"}

    @property
    def bearer(self) -> str:
        """What stands behind ``Bearer``."""
        return self.token if self.attempt is None else f"{self.token}.{self.attempt}"

    def refusal(self, method: str, path: str, authorization: str | None) -> Refusal | None:
        """Why a request is not answered; None where it is.

        Parameters
        ----------
        path:
            Without the query.
        authorization:
            The header of this name.
        """
        scheme, _, given = (authorization or "").strip().partition(" ")
        token, _, attempt = given.strip().partition(".")
        if scheme.lower() != "bearer" or not token:
            return Refusal(401, "no_token", "this server answers those alone who bring the token of its run")
        # of equal length and in the same time, whatever was given
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return Refusal(401, "wrong_token", "this is not the token of the run that this server belongs to")
        if self.attempt is None or attempt == str(self.attempt):
            return None
        if attempt:
            message = f"this server belongs to attempt {self.attempt} of the run, the request to attempt {attempt[:20]}"
            return Refusal(403, "other_attempt", message)
        if method in ("GET", "HEAD") and path in _LOOKING:
            return None
        message = (
            f"the request does not say that it belongs to attempt {self.attempt} of the run (Bearer TOKEN.ATTEMPT)"
        )
        return Refusal(403, "no_attempt", message)
