"""How far the clocks of nodes are from the supervisor's, and times of nodes by that clock.

Measured at the start of an attempt, by the shortest of a few round trips: the node's time lies somewhere between
question and answer, so that half of the round trip is what is not known. ``attempts/NNNN/clocks.json`` holds it; where
it is missing, or a node is not in it, times are taken as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hpcrl.decoding import prepared
from hpcrl.runs.rundir import RunDir

__all__ = ["FAR_S", "Clocks", "NodeClock", "own_node"]

FAR_S = 1.0
"""Clocks that differ by more are worth a word: they make logs of several nodes hard to read."""


class NodeClock(msgspec.Struct, frozen=True):
    """The clock of one node against the supervisor's, in seconds.

    Attributes
    ----------
    ahead_s:
        Its time minus the supervisor's.
    uncertain_s:
        The true difference lies no further away than this.
    """

    ahead_s: float
    uncertain_s: float

    @property
    def differs(self) -> bool:
        """Whether the two are surely not the same."""
        return abs(self.ahead_s) > self.uncertain_s

    def __str__(self) -> str:
        return f"{abs(self.ahead_s):.2g} s ± {self.uncertain_s:.2g} s"


def own_node() -> str:
    """Slurm's name of the node that we are on; empty outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME", "")


class Clocks(msgspec.Struct, frozen=True):
    """Clocks of an attempt's nodes, by Slurm's names; without any on one machine."""

    nodes: dict[str, NodeClock] = {}

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        """The file with the clocks of an attempt."""
        return run.attempt_dir(attempt) / "clocks.json"

    def encode(self) -> bytes:
        """What is in the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Clocks:
        """Read the clocks of an attempt; none where they were not measured."""
        try:
            return msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return cls()

    def corrected(self, time_s: float, node: str) -> float:
        """A time of a node in seconds, by the supervisor's clock; as it is where no difference was found."""
        clock = self.nodes.get(node)
        return time_s if clock is None or not clock.differs else time_s - clock.ahead_s

    def compared(self, one: str, other: str) -> NodeClock:
        """The clock of one node against that of another; a node that was not asked has the supervisor's."""
        mine, theirs = self.nodes.get(one, NodeClock(0.0, 0.0)), self.nodes.get(other, NodeClock(0.0, 0.0))
        return NodeClock(mine.ahead_s - theirs.ahead_s, mine.uncertain_s + theirs.uncertain_s)

    @property
    def far(self) -> dict[str, NodeClock]:
        """Give the clocks that differ by more than `FAR_S`, whatever is not known of them."""
        return {node: c for node, c in self.nodes.items() if abs(c.ahead_s) - c.uncertain_s > FAR_S}
