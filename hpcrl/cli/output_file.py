"""Files that people name for a command to write: they are checked before the work whose result they take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

_P = TypeVar("_P", str, Path, None)


def output_file(given: _P) -> _P:
    """Return an option's output file, with `~` replaced; the callback of such an option.

    Raises
    ------
    UsageError
        It is a directory, or its own directory does not exist or may not be written.
    """
    from hpcrl.errors import UsageError

    if given is None:
        return given
    path = Path(given).expanduser()
    directory = path.parent
    if path.is_dir():
        raise UsageError(f"{path} is a directory\n    hint: name a file in it")
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}\n    hint: make it, or name a file in another one")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{directory}: permission denied\n    hint: name a file in a directory of yours")
    return type(given)(path)
