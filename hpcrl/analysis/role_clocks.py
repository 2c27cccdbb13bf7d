"""Clocks of the nodes of roles against the supervisor's, for records that do not name their node."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.runs.clocks import Clocks
from hpcrl.runs.events import Event
from hpcrl.runs.rundir import RunDir


class RoleClocks:
    """Clocks of roles by attempt; the events of a role say which node it was on."""

    def __init__(self, run: RunDir, events: Sequence[Event]) -> None:
        """Take the nodes from all events of a run."""
        self._run = run
        self._nodes = {(event.attempt, event.writer.rpartition("-")[0]): event.node for event in events if event.node}
        self._clocks: dict[int, Clocks] = {}

    def ahead_s(self, attempt: int, role: str) -> float:
        """Return the clock of a role's node minus the supervisor's, in seconds; 0 where it is not known to differ."""
        node = self._nodes.get((attempt, role), "")
        if not node:
            return 0.0
        if attempt not in self._clocks:
            self._clocks[attempt] = Clocks.read(self._run, attempt)
        return -self._clocks[attempt].corrected(0.0, node)
