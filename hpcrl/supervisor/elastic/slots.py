"""One replica with a job of its own (layout ``elastic``), as its keeper knows it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.plan import RoleGroup
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.replicas.component import Component

_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
"""Maximum seconds between two submissions that Slurm rejects; doubled each time."""


@dataclass(eq=False)
class Slot:
    """One replica that is wanted, or that leaves."""

    group: RoleGroup
    replica: int
    component: Component
    starts: int = 0
    driving: bool = False
    """Whether its process is being started, runs, or is ending."""
    leaving_since: float | None = None
    runs_in: tuple[int, int] | None = None
    """Job of the last start, and how often that was requeued."""
    suspect: tuple[int, int] | None = None
    """The same if it ended there and it is unknown yet whether the job has ended, too."""
    ended_at: float = float("-inf")
    ends: int = 0
    had_job: bool = False
    replaced: int = 0
    lost: str = ""
    refusals: int = 0
    """Consecutive submissions that were refused."""
    refused: str = ""
    """Reason why the last submission was refused; empty if it was accepted."""
    not_before: float = float("-inf")
    """Monotonic time of the next submission."""

    @property
    def part(self) -> str:
        return f"{self.group.role.value}-{self.replica}"

    @property
    def ready(self) -> bool:
        return self.component.state is ComponentState.READY and self.leaving_since is None

    def refuse(self, why: str, now: float) -> float:
        """Record a refused submission; return the seconds until the next try."""
        self.refusals += 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.refusals - 1))
        self.not_before = now + pause_s
        times = "once" if self.refusals == 1 else f"{self.refusals} times in a row"
        self.refused = f"{why} ({times}; the next try comes {pause_s:g} s after the last)"
        return pause_s

    def accepted(self) -> None:
        """Record that Slurm has accepted its job."""
        self.had_job, self.refusals, self.refused, self.ends = True, 0, "", 0
        self.not_before = float("-inf")
