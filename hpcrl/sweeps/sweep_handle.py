"""A sweep as a script holds it: its members, its result, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.known import known_runs
from hpcrl.runs.locate import profile_roots, runs_root
from hpcrl.runs.waiting import WaitTimeoutError
from hpcrl.slurm.lookup import look_up
from hpcrl.submit.handle import Run
from hpcrl.sweeps.control import cancel_sweep, resume_sweep
from hpcrl.sweeps.results import SweepResult, read_sweep_result
from hpcrl.sweeps.sweep_files import SweepDir, find_sweep

_POLL_S = 2.0
_UNREADABLE_S = 60.0
"""Maximum seconds for which only members that cannot be read are waited for."""


class Sweep:
    """A sweep, by its name or its directory.

    Parameters
    ----------
    root:
        Only this directory of runs. By default all that are known are searched.

    Raises
    ------
    RunDirError
        No sweep, or more than one, matches.
    """

    def __init__(self, sweep: str | Path, *, root: str | Path | None = None) -> None:
        set_job_query(look_up)
        self.directory: SweepDir = find_sweep(str(sweep), sweep_roots(None if root is None else str(root)))

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Return the name of the sweep, which its runs have as a tag."""
        return self.directory.name

    @property
    def path(self) -> Path:
        """Return the directory of the sweep; those of its runs are next to it."""
        return self.directory.path

    def runs(self) -> list[Run]:
        """Return the members in their order; those that were removed are left out."""
        directories = (self.directory.root / member.name for member in self.directory.read().members)
        return [Run(path) for path in directories if path.is_dir()]

    def result(self) -> SweepResult:
        """Return members, settings with their held-out rewards, and the best, as ``hpcrl sweep status`` shows them."""
        return read_sweep_result(self.directory)

    def wait(self, timeout_s: float | None = None) -> SweepResult:
        """Wait until all members have ended, or nothing starts those that are left (``idle``); return the result.

        It raises nothing for members that failed: look at ``counts``. Members that cannot be read may run; when all
        others have ended, it waits a minute for them, and then returns a result that has not ``ended``.

        Parameters
        ----------
        timeout_s:
            Maximum seconds to wait; None: as long as it takes.

        Raises
        ------
        hpcrl.runs.waiting.WaitTimeoutError
            After ``timeout_s``; the sweep is not changed.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        unreadable_s = 0.0
        while True:
            found = self.result()
            if found.ended or found.idle:
                return found
            # nothing else lives, and a damaged record does not mend itself
            unreadable_s = unreadable_s or time.monotonic() if found.waits_for_unreadable else 0.0
            if unreadable_s and time.monotonic() - unreadable_s > _UNREADABLE_S:
                return found
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeoutError(f"{self.name} has not ended within {timeout_s:g} s: {found.counts}")
            time.sleep(min(_POLL_S, left_s))

    def resume(self, *, failed: bool = False, on_note: Callable[[str], None] = lambda words: None) -> None:
        """Start members that were not started, and resume those that were lost or cancelled with the sweep.

        Parameters
        ----------
        failed:
            Also give members that failed another attempt.
        on_note:
            Called with each sentence that ``hpcrl sweep resume`` prints.

        Raises
        ------
        RunDirError
            Members could not be started; the others were.
        """
        resume_sweep(self.directory, on_note, failed=failed)

    def cancel(self) -> SweepResult:
        """Start no more members, cancel those that run, and return the result."""
        cancel_sweep(self.directory, lambda words: None)
        return self.result()


def sweep_roots(root: str | None) -> Iterator[Path]:
    """Yield directories of runs that may have sweeps; with ``root`` that alone."""
    yield runs_root(root)
    if root is None:
        yield from profile_roots()
        yield from {run.path.parent for _, run in known_runs()}
