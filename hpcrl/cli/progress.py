"""Progress of a command that takes long: shown on the standard error of a terminal, after two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpcrl.cli.output import screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_QUIET_S = 2.0
"""Seconds without output before progress is shown."""


class Working:
    """A line of progress that appears when a command takes longer than `_QUIET_S`.

    Without a share it says what is done and for how long; with one, also how much of it is.
    """

    def __init__(self, what: str, progress: Progress | None) -> None:
        """Add the task to ``progress``; None shows nothing."""
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=None)

    def share(self, done: float, what: str | None = None) -> None:
        """Say how much is done, from 0 to 1, and of what."""
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, total=1.0, completed=min(1.0, done))
        if what is not None:
            self._progress.update(self._task, description=what)


@contextmanager
def working(what: str, *, console: Console | None = None, quiet_s: float = _QUIET_S) -> Iterator[Working]:
    """Show progress while the block runs; the line is gone afterwards.

    Parameters
    ----------
    what:
        Description of the work, for example ``looking at 24 to 28 nodes``.
    console:
        Console that shows it; standard error by default.
    quiet_s:
        Seconds before it appears.
    """
    if console is None and not sys.stderr.isatty():
        yield Working(what, None)
        return

    console = console or screen(err=True)
    if console.is_dumb_terminal:  # a printed line cannot be removed on such a stream
        yield Working(what, None)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    told = Working(what, progress)
    timer = threading.Timer(quiet_s, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield told
    finally:
        timer.cancel()
        # the timer may have fired just now and be about to start the display
        timer.join()
        progress.stop()
