"""A run as a script holds it: its state, logs, metrics and rollouts, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.errors import MissingExtraError
from hpcrl.installing import extra_of
from hpcrl.runs.job_facts import set_job_query
from hpcrl.runs.locate import locate_run
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import user_name
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.logs import LogFilter, LogLine, iterate_logs
from hpcrl.runs.waiting import wait_for_state
from hpcrl.slurm.lookup import look_up
from hpcrl.slurm.reach import reach_slurm_of
from hpcrl.submit.submission import cancel as cancel_run

if TYPE_CHECKING:
    from hpcrl.runs.views.rollouts import RolloutItem


class Run:
    """A run, by its name, id, job number or directory.

    Parameters
    ----------
    run:
        Reference of the run; None: the newest.
    root:
        Only this directory of runs. By default all that are known are searched.

    Raises
    ------
    RunDirError
        No run, or more than one, matches.
    """

    def __init__(self, run: str | Path | None = None, *, root: str | Path | None = None) -> None:
        set_job_query(look_up)
        self.directory: RunDir = locate_run(None if run is None else str(run), None if root is None else str(root))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.directory.name

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    def status(self) -> RunView:
        """Return state, attempt, replicas, warnings and the first cause of a failure."""
        return observe(self.directory)

    def logs(
        self,
        *,
        role: str | None = None,
        replica: int | None = None,
        attempt: int | None = None,
        grep: str | None = None,
        since: str | None = None,
        lines: int = 0,
    ) -> Iterator[LogLine]:
        """Yield lines of logs, merged by time.

        Parameters
        ----------
        role, replica, attempt, grep, since:
            As of ``hpcrl logs``; ``role`` may be ``engine/0``. The newest attempt by default.
        lines:
            Only the newest; 0: all.

        Raises
        ------
        UsageError
            The role or attempt does not exist, or ``grep`` or ``since`` cannot be read.
        """
        wanted = LogFilter.make(self.directory, role=role, replica=replica, attempt=attempt, grep=grep, since=since)
        return iterate_logs(self.directory, wanted, lines=lines)

    def metrics(self) -> list[StepRecord]:
        """Return the record of each optimizer step, in order; a step that was done again counts once."""
        return read_metrics(self.directory)

    def rollouts(
        self, *, environment: str | None = None, state: str | None = None, step: int | None = None
    ) -> list[RolloutItem]:
        """Return finished rollouts, as ``hpcrl rollouts ls`` lists them.

        Parameters
        ----------
        environment, state, step:
            Only those of an environment, in a state (``waiting``, ``trained``, ``dropped``), or of the batch of a step.

        Raises
        ------
        UsageError
            The run has no ledger yet, or the state or environment does not exist.
        MissingExtraError
            numpy is not installed.
        """
        try:
            # needs numpy, which the core installation has not
            from hpcrl.runs.views.rollouts import choose_rollouts, read_ledger, rollout_items  # noqa: PLC0415
        except ImportError as error:
            if (extra := extra_of(error)) is None:
                raise
            raise MissingExtraError(extra, error.name or extra) from error
        return rollout_items(
            choose_rollouts(read_ledger(self.directory), environment=environment, state=state, step=step)
        )

    def wait(self, timeout_s: float | None = None, *, running: bool = False) -> RunView:
        """Wait until the run has ended, and return what it is then. It raises nothing for a run that failed.

        Parameters
        ----------
        timeout_s:
            Maximum seconds to wait; None: as long as it takes.
        running:
            Wait until all roles are ready, or the run has ended.

        Raises
        ------
        hpcrl.runs.waiting.WaitTimeoutError
            After ``timeout_s``; the run is not changed.
        """
        return wait_for_state(self.directory, running=running, timeout_s=timeout_s)

    def cancel(self) -> RunView:
        """Stop the run and wait until it has ended (RunDirError where it has ended already)."""
        reach_slurm_of(self.directory)
        return cancel_run(self.directory, user=user_name())
