"""The run's token: 32 random bytes in a file of the run directory that only its owner reads.

Every server of a run answers only requests with it. Every role finds it by ``HPCRL_RUN_DIR``; it is in no command
line, no environment variable, no log and no other file. A role's requests also name its attempt, so that a process
that was left over from an older attempt changes nothing in a newer one::

    Authorization: Bearer <token>.<attempt>

Both are in one header, because a router in between may forward only that. People and programs that only look (metrics,
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
from hpcrl.storage.files import atomic_create

TOKEN_FILE = "token"
_TOKEN = re.compile(r"[0-9a-f]{64}")
_LOOKING = frozenset({"/health", "/liveness", "/metrics", "/metrics/run"})
"""Read-only paths, also for clients outside of any attempt."""


class Refusal(NamedTuple):
    """Reason why a request is refused.

    Attributes
    ----------
    status:
        401: it did not bring the token. 403: it belongs to another attempt, or names none.
    reason:
        ``no_token``, ``wrong_token``, ``no_attempt`` or ``other_attempt``.
    message:
        Text for the caller.
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
    """Read the token from a file.

    Raises
    ------
    RunDirError
        The file does not exist, others own it or may read it, or its content is not a token.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer must not block; it is refused below
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
            f"{path} is not a file of this user with mode 0600\n"
            "    hint: remove it, the next attempt makes another one; other users may know it"
        )
    if not _TOKEN.fullmatch(text):
        raise RunDirError(f"{path} holds no token\n    hint: remove it, the next attempt makes another one")
    return text


class Credentials(NamedTuple):
    """Credentials that a role of a run sends, and that it expects from others.

    Attributes
    ----------
    token:
        Token of the run.
    attempt:
        The role's own attempt. None for a client outside of any attempt, and for a server outside of a run, which
        serves every attempt.
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
        """Return headers for requests to servers of the run only."""
        return {"Authorization": f"Bearer {self.bearer}"}

    @property
    def bearer(self) -> str:
        """Return the value that follows ``Bearer`` in the header."""
        return self.token if self.attempt is None else f"{self.token}.{self.attempt}"

    def refusal(self, method: str, path: str, authorization: str | None) -> Refusal | None:
        """Return the reason why a request is refused; None if it is accepted.

        Parameters
        ----------
        path:
            Path of the request without its query.
        authorization:
            Value of the ``Authorization`` header; None if the request has none.
        """
        scheme, _, given = (authorization or "").strip().partition(" ")
        token, _, attempt = given.strip().partition(".")
        if scheme.lower() != "bearer" or not token:
            return Refusal(401, "no_token", "this server accepts only requests with the token of its run")
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
