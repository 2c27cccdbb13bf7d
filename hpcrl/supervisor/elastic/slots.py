"""One replica with a job of its own (layout ``elastic``), as its keeper knows it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.plan import RoleGroup
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.component import Component

__all__ = ["Slot"]

_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
"""Between two submissions that Slurm rejects; doubled each time."""


@dataclass(eq=False)
class Slot:
    """One replica that is wanted, or that leaves."""

    group: RoleGroup
    replica: int
    component: Component
    starts: int = 0
    driving: bool = False
    """Its process is being started, lives, or is ending."""
    leaving_since: float | None = None
    runs_in: tuple[int, int] | None = None
    """Job and number of its requeues in which it was started last."""
    suspect: tuple[int, int] | None = None
    """The same, where it ended there and it is not known yet whether the job has, too."""
    ended_at: float = float("-inf")
    ends: int = 0
    had_job: bool = False
    replaced: int = 0
    lost: str = ""
    refusals: int = 0
    """Submissions in a row that were not taken."""
    refused: str = ""
    """Why the last was not taken; empty where it was."""
    not_before: float = float("-inf")
    """Monotonic time of the next submission."""

    @property
    def part(self) -> str:
        return f"{self.group.role.value}-{self.replica}"

    @property
    def ready(self) -> bool:
        return self.component.state is ComponentState.READY and self.leaving_since is None

    def refuse(self, why: str, now: float) -> float:
        """A submission was not taken: the next is tried after a pause, whose seconds are returned."""
        self.refusals += 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.refusals - 1))
        self.not_before = now + pause_s
        times = "once" if self.refusals == 1 else f"{self.refusals} times in a row"
        self.refused = f"{why} ({times}; the next try comes {pause_s:g} s after the last)"
        return pause_s

    def accepted(self) -> None:
        """Slurm has taken its job."""
        self.had_job, self.refusals, self.refused, self.ends = True, 0, "", 0
        self.not_before = float("-inf")
