"""Directories that a container gets to see: their names must not have signs that separate mounts."""

from __future__ import annotations

import os

from hpcrl.config.layout import Container
from hpcrl.errors import UsageError

SEPARATORS = "\n\\:,"
"""Signs of Slurm, pyxis and Apptainer; none of them can be quoted in a mount."""


def check_mounted(path: str | os.PathLike[str], what: str) -> None:
    """Check that a directory or file can be mounted into a container.

    Raises
    ------
    UsageError
        Its name has a sign that would make other mounts of it.
    """
    name = os.fspath(path)
    if bad := [sign for sign in SEPARATORS if sign in name]:
        raise UsageError(
            f"{what} is {name!r}, and {bad[0]!r} separates mounts of containers, which roles run in here\n"
            "    hint: choose a directory whose name has no comma, colon, backslash or line break"
        )


def check_working_directory(container: Container | None, path: str | os.PathLike[str]) -> None:
    """Check the working directory of roles, which is mounted into containers in addition to their own mounts."""
    if container is not None:
        check_mounted(path, "the working directory")
