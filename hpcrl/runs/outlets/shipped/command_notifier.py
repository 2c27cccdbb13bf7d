"""Messages for a program of the user: JSON on its standard input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence

from hpcrl.processes.procfs import die_with_parent
from hpcrl.runs.outlets.interface import Notice, NotSentError, RefusedNoticeError

_TRY_AGAIN = os.EX_TEMPFAIL
"""Exit code by which a program asks to be called again."""


class Program:
    """Starts a program for each message, without a shell.

    Parameters
    ----------
    command:
        The program and its arguments. It is given the message as JSON (docs/notifications.md) on its standard input,
        and ends with 0 when it is sent; with 75 (``EX_TEMPFAIL``) it is started again later.
    """

    def __init__(self, *, command: Sequence[str]) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError("command is a list of words, the program first: no shell reads it")
        if shutil.which(command[0]) is None:
            raise ValueError(f"there is no program {command[0]!r}")
        self._command = list(command)

    def notify(self, notice: Notice) -> None:
        """Run it once.

        Raises
        ------
        NotSentError
            It ended with 75, or could not be started.
        RefusedNoticeError
            It ended with another code, or by a signal.
        """
        run_with_input(self._command, json.dumps(notice.document()).encode() + b"\n")


def run_with_input(command: Sequence[str], data: bytes) -> None:
    """Run a program with ``data`` on its standard input; errors as of `Program.notify`."""
    try:
        done = subprocess.run(command, input=data, check=False, preexec_fn=die_with_parent)
    except OSError as error:
        raise NotSentError(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode == _TRY_AGAIN:
        raise NotSentError(f"{command[0]} ended with {_TRY_AGAIN}: try again later")
    if done.returncode:
        raise RefusedNoticeError(f"{command[0]} ended with {done.returncode}")
