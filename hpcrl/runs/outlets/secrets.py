"""Secrets of notifiers: read from a private file or a variable where they are used, and removed from what is shown."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.storage.trusted_paths import read_secret

_known: set[str] = set()
"""Secrets that this process has read."""
_MIN_SCRUBBED = 6
"""Minimum length in characters of a secret that is removed from texts: shorter ones are parts of ordinary words."""


def secret_value(what: str, *, file: str | None, env: str | None, required: bool = True) -> str | None:
    """Return the secret of a file or a variable.

    Parameters
    ----------
    what:
        Name of the parameter, for messages: ``url`` has the parameters ``url_file`` and ``url_env``.
    required:
        One of the two must be given.

    Raises
    ------
    ValueError
        Both are given, or none; or the variable is empty or missing. The message never has the value.
    OSError
        The file is missing, or others may read it.
    """
    if (file is not None) and (env is not None):
        raise ValueError(f"{what}_file and {what}_env are both set: set one of them")
    if file is not None:
        value = read_secret(Path(file).expanduser())
    elif env is not None:
        value = os.environ.get(env, "")
        if not value:
            raise ValueError(f"the variable {env} ({what}_env) is not set: name its file in secrets of the profile")
    elif required:
        raise ValueError(f"{what}_file or {what}_env is required: a private file, or a variable, that has it")
    else:
        return None
    _known.update({value, *value.split()})
    return value


def scrubbed(text: str) -> str:
    """Return a text without the secrets that this process has read."""
    for value in sorted(_known, key=len, reverse=True):
        if len(value) >= _MIN_SCRUBBED:
            text = text.replace(value, "[secret]")
    return text
