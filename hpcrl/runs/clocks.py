"""Offsets of the clocks of nodes from the supervisor's, and times of nodes corrected by them.

They are measured at the start of an attempt, by the shortest of a few round trips: the node's time lies between request
and answer, so that half of the round trip is the uncertainty. ``attempts/NNNN/clocks.json`` holds it; where it is
missing, or a node is not in it, times are used unchanged.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import prepared

FAR_S = 1.0
"""Difference of clocks in seconds above which a warning is given: logs of several nodes are hard to read then."""


class NodeClock(msgspec.Struct, frozen=True):
    """Clock of one node against the supervisor's, in seconds.

    Attributes
    ----------
    ahead_s:
        Its time minus the supervisor's.
    uncertain_s:
        Bound of the error of ``ahead_s``.
    """

    ahead_s: float
    uncertain_s: float

    @property
    def differs(self) -> bool:
        """Return whether the difference of the two clocks exceeds its uncertainty."""
        return abs(self.ahead_s) > self.uncertain_s

    def __str__(self) -> str:
        return f"{abs(self.ahead_s):.2g} s ± {self.uncertain_s:.2g} s"


def own_node() -> str:
    """Return Slurm's name of the current node; empty outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME", "")


class Clocks(msgspec.Struct, frozen=True):
    """Clocks of an attempt's nodes, by Slurm's names; without any on one machine."""

    nodes: dict[str, NodeClock] = {}

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        """Return the path of the file with the clocks of an attempt."""
        return run.attempt_dir(attempt) / "clocks.json"

    def encode(self) -> bytes:
        """Return the content of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Clocks:
        """Read the clocks of an attempt; none where they were not measured."""
        try:
            return msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return cls()

    def corrected(self, time_s: float, node: str) -> float:
        """Return a time of a node, in seconds by the supervisor's clock; unchanged where no difference was found."""
        clock = self.nodes.get(node)
        return time_s if clock is None or not clock.differs else time_s - clock.ahead_s

    def compared(self, one: str, other: str) -> NodeClock:
        """Return the clock of one node against that of another; an unmeasured node has the supervisor's clock."""
        mine, theirs = self.nodes.get(one, NodeClock(0.0, 0.0)), self.nodes.get(other, NodeClock(0.0, 0.0))
        return NodeClock(mine.ahead_s - theirs.ahead_s, mine.uncertain_s + theirs.uncertain_s)

    @property
    def far(self) -> dict[str, NodeClock]:
        """Return the clocks that differ by more than `FAR_S`, even after their uncertainty is subtracted."""
        return {node: c for node, c in self.nodes.items() if abs(c.ahead_s) - c.uncertain_s > FAR_S}
