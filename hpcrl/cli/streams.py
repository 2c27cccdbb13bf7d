"""Standard streams of a command that was started without them, as by daemons and ``hpcrl ls >&-``."""

from __future__ import annotations

import fcntl
import os
import sys

_STREAMS = ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY))


def fill_standard_streams() -> None:
    """Put ``/dev/null`` where a standard stream is missing, or cannot be read or written.

    Without that Python has None in its place, and the next file that is opened gets its number: what a child process
    prints would then be written into that file.
    """
    for number, name, mode in _STREAMS:
        if _serves(number, mode) and getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, mode)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
        stream = open(number, "r" if mode == os.O_RDONLY else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _serves(number: int, mode: int) -> bool:
    """Return whether a file descriptor is open for reading or for writing."""
    try:
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
    except OSError:
        return False
    return flags & os.O_ACCMODE in (mode, os.O_RDWR)
