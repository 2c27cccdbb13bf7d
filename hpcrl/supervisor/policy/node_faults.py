"""Which nodes an attempt has lost: asked, written down and told to Slurm at the first sign.

Slurm may kill the supervisor within a second of its SIGTERM, so that nothing of this waits for the roles to end. What
even this is too late for, the next attempt finds out (`hpcrl.supervisor.policy.nodes.find_lost_nodes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.exclusions import exclude
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.board import Board
from hpcrl.supervisor.launch.replica_launcher import Launcher
from hpcrl.supervisor.policy.attempts import has_trained, retries

__all__ = ["NodeFaults"]

_log = logging.getLogger(__name__)

_WENT_DOWN = "the node went down"
_TAKEN = frozenset({CauseKind.CANCELLED, CauseKind.GUARD_LOST, CauseKind.NO_STEP})
"""What we see where Slurm ends the job, or a component of it: a signal, steps that end unsaid or never begin."""


class NodeFaults:
    """Nodes that one attempt has found broken.

    Attributes
    ----------
    down:
        Nodes of our own job that were down when Slurm was asked.
    """

    def __init__(self, run: RunDir, *, attempt: int, plan: Plan, launcher: Launcher, board: Board) -> None:
        self._run, self._attempt, self._plan = run, attempt, plan
        self._launcher, self._board = launcher, board
        self._written: dict[str, str] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[Cause] | None = None
        self._told: set[str] = set()
        self.down: set[str] = set()

    def investigate(self, cause: Cause) -> None:
        """Begin to look for what is behind an end that was just decided, and show it as soon as it is found."""
        self.suspect()
        self._asking = asyncio.create_task(self._ask(cause), name="who ends us")

    def suspect(self, nodes: Collection[str] | None = None) -> None:
        """Something ended as it does where a node went down: look in the background.

        Parameters
        ----------
        nodes:
            Those of another job of the run; None for those of our own.
        """
        look = asyncio.create_task(self._look(nodes), name="failed nodes")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    def saw(self, nodes: Collection[str], *, ours: bool) -> None:
        """Nodes were down when somebody else asked; the next to ask may find them back already.

        Parameters
        ----------
        ours:
            They are of our own job.
        """
        self.write(dict.fromkeys(nodes, _WENT_DOWN))
        if ours:
            self.down |= set(nodes)

    async def settle(self) -> list[str]:
        """Look once more, when all looks before have ended; the nodes of our own job that are or were down."""
        self.suspect()
        await asyncio.gather(*self._looks)
        return sorted(self.down)

    def write(self, reasons: Mapping[str, str]) -> None:
        """Add nodes with the reason of each to those that later attempts stay away from."""
        fresh = {node: why for node, why in reasons.items() if node not in self._written}
        seconds = self._plan.attempts.exclude_s
        if fresh and seconds:
            self._written |= fresh
            try:
                exclude(self._run, fresh, attempt=self._attempt, now_s=time.time(), seconds=seconds)
            except OSError as error:
                # the next attempt finds lost nodes by itself (`hpcrl.supervisor.policy.nodes.find_lost_nodes`)
                _log.warning("nodes to avoid could not be written down: %s", error)
            self._board.emit("nodes.excluded", nodes=fresh)

    async def _ask(self, cause: Cause) -> Cause:
        """An end that Slurm may have brought, in its words where it has."""
        await asyncio.gather(*self._looks)
        asks = cause.kind in _TAKEN and not self.down
        taken = await asyncio.to_thread(self._launcher.taken) if asks else None
        if taken is None:
            return cause
        kind, words = taken
        cause = Cause(kind=kind, time_s=cause.time_s, message=f"{words}: {cause.message}")
        self._board.explain(cause)
        return cause

    async def _look(self, nodes: Collection[str] | None) -> None:
        found = await asyncio.to_thread(self._launcher.failed_nodes, nodes)
        self.saw(found, ours=nodes is None)
        news = self.down - self._told
        if nodes is None and news and self._plan.attempts.requeue and self._plan.attempts.exclude_s:
            self._told |= news
            await asyncio.to_thread(self._launcher.stay_away, self._run)

    async def judge(self, cause: Cause, broken: Mapping[str, str], *, began_at: int | None) -> tuple[Cause, bool]:
        """What really ended the attempt, and whether the run goes on with other nodes.

        A node that went down is the cause of what then happened to roles; Slurm requeues the job by itself.

        Parameters
        ----------
        cause:
            The first that was seen.
        broken:
            Nodes on which a role failed as it does on broken hardware, with its words.
        began_at:
            Step of the checkpoint that the attempt began at.
        """
        requeues = self._plan.attempts.requeue
        down = await self.settle()
        self.write(broken)
        if down:
            what = f"{'node' if len(down) == 1 else 'nodes'} {', '.join(down)} went down"
            # Slurm's SIGTERM to us is its way to requeue, and no event of its own
            then = "" if cause.kind is CauseKind.CANCELLED else f"; {cause.message}"
            return Cause(kind=CauseKind.NODE_FAIL, time_s=cause.time_s, message=what + then), requeues
        if cause.kind in _TAKEN:
            asked = await (self._asking or asyncio.create_task(self._ask(cause)))
            if asked.kind is CauseKind.PREEMPTED:
                return asked, requeues
            if asked.kind is CauseKind.CANCELLED:
                return asked, False
        if cause.kind is CauseKind.NO_STEP:
            # An allocation can be of no use as a whole: Slurm 22.05 has given a requeued job nodes and then called its
            # own GPUs on them an invalid specification. Where nothing has ever worked, what is asked for is wrong.
            return cause, requeues and has_trained(self._run)
        # on the same nodes it would fail again
        moves = bool(broken) and requeues and retries(self._run, self._plan, cause, began_at=began_at)
        return cause, moves
