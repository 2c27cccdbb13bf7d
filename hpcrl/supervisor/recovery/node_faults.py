"""Finds the nodes that an attempt has lost: asked, recorded and reported to Slurm at the first sign.

Slurm may kill the supervisor within a second of its SIGTERM, so that nothing of this waits for the roles to end. What
even this is too late for, the next attempt finds out (`hpcrl.supervisor.recovery.nodes.find_lost_nodes`).
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
from hpcrl.slurm.job_nodes import DID_NOT_ANSWER, WENT_DOWN, JobNodes
from hpcrl.supervisor.launch.replica_launcher import Launcher
from hpcrl.supervisor.recovery.attempts import has_trained, retries
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)

_TAKEN = frozenset({CauseKind.CANCELLED, CauseKind.GUARD_LOST, CauseKind.NO_STEP})
"""Causes that are seen if Slurm ends the job or a component: a signal, steps that end unreported or never begin."""
_SILENCE = frozenset({CauseKind.GUARD_LOST, CauseKind.NO_STEP, CauseKind.START_TIMEOUT})
"""Causes that are seen of a node that is gone before Slurm knows it."""


class NodeFaults:
    """Nodes that one attempt has found broken.

    Attributes
    ----------
    down:
        Nodes of the supervisor's job that were down when Slurm was asked, or did not answer.
    """

    def __init__(self, run: RunDir, *, attempt: int, plan: Plan, launcher: Launcher, board: StatusWriter) -> None:
        self._run, self._attempt, self._plan = run, attempt, plan
        self._launcher, self._board = launcher, board
        self._written: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[Cause] | None = None
        self._told: set[str] = set()
        self._nodes = board.nodes = launcher.nodes
        self._replaceable: dict[str, str] = {}
        self.down: set[str] = set()

    def investigate(self, cause: Cause) -> None:
        """Begin to look for the reason of an end that was just decided, and show it as soon as it is found."""
        self.suspect()
        self._asking = asyncio.create_task(self._ask(cause), name="who ends us")

    def suspect(self, nodes: Collection[str] | None = None) -> None:
        """Look for nodes that went down, in the background, after an end that such a node may have caused.

        Parameters
        ----------
        nodes:
            Nodes of another job of the run; None for those of the supervisor's job.
        """
        look = asyncio.create_task(self._look(nodes), name="failed nodes")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    def saw(self, nodes: Collection[str], *, ours: bool) -> None:
        """Record nodes that another check found down; a later check may find them up again.

        Parameters
        ----------
        ours:
            Whether they belong to the supervisor's job.
        """
        self.write(dict.fromkeys(nodes, WENT_DOWN))
        if ours:
            self.down |= set(nodes)

    async def settle(self) -> list[str]:
        """Wait for all checks and check once more; return the nodes of the supervisor's job that are or were down."""
        self.suspect()
        await asyncio.gather(*self._looks)
        return sorted(self.down)

    def write(self, reasons: Mapping[str, str]) -> None:
        """Add nodes with the reason of each to those that later attempts stay away from.

        Nodes that cannot be recorded are tried again with the next call, and no event names them before.
        """
        fresh = {node: why for node, why in {**reasons, **self._pending}.items() if node not in self._written}
        seconds = self._plan.attempts.exclude_s
        if fresh and seconds:
            try:
                exclude(self._run, fresh, attempt=self._attempt, now_s=time.time(), seconds=seconds)
            except OSError as error:
                # the next attempt finds lost nodes itself (`hpcrl.supervisor.recovery.nodes.find_lost_nodes`)
                if fresh != self._pending:
                    _log.warning("the nodes to avoid could not be recorded: %s", error)
                self._pending = fresh
                return
            self._written |= fresh
            self._pending = {}
            self._board.emit("nodes.excluded", nodes=fresh)

    async def _ask(self, cause: Cause) -> Cause:
        """Return the cause with Slurm's own reason if Slurm took the nodes; ``cause`` itself if it did not."""
        # a node of the job that went down explains the end, so that Slurm need not be asked
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
        # each node is reported to Slurm once, immediately: Slurm may kill the supervisor within a second
        news = self.down - self._told
        # a job with spare nodes is not requeued by Slurm, which takes the list for waiting jobs only
        requeued = self._plan.attempts.requeue and self._nodes is None
        if nodes is None and news and requeued and self._plan.attempts.exclude_s:
            self._told |= news
            await asyncio.to_thread(self._launcher.stay_away, self._run)

    async def judge(self, cause: Cause, broken: Mapping[str, str], *, began_at: int | None) -> tuple[Cause, bool]:
        """Return the cause that really ended the attempt, and whether the run continues on other nodes.

        A node that went down is the cause of the failures of roles after it; Slurm requeues the job itself, unless the
        job has spare nodes (`replace`).

        Parameters
        ----------
        cause:
            The first cause that was seen.
        broken:
            Nodes on which a role failed as roles do on broken hardware, with the words of its log.
        began_at:
            Step of the checkpoint that the attempt began at; None if there was none.
        """
        requeues = self._plan.attempts.requeue
        down = await self.settle()
        self.write(broken)
        if down:
            self._replaceable = dict.fromkeys(down, WENT_DOWN)
            # Slurm requeues the job by a SIGTERM to the supervisor, which is not a cause of its own
            then = "" if cause.kind is CauseKind.CANCELLED else f"; {cause.message}"
            return _node_fail(cause, f"{_names(down)} went down{then}"), requeues
        if cause.kind in _TAKEN:
            asked = await (self._asking or asyncio.create_task(self._ask(cause)))
            if asked.kind in (CauseKind.PREEMPTED, CauseKind.CANCELLED):
                return asked, requeues and asked.kind is CauseKind.PREEMPTED
        if self._nodes is not None and (missing := await self._missing(cause, self._nodes)) is not None:
            return missing, requeues
        if cause.kind is CauseKind.NO_STEP:
            # An allocation can be useless as a whole: Slurm 22.05 has given a requeued job nodes and then called its
            # own GPUs on them an invalid specification. If nothing has ever worked, the request itself is wrong.
            return cause, requeues and has_trained(self._run)
        # on the same nodes it would fail again
        again = bool(broken) and retries(self._run, self._plan, cause, began_at=began_at)
        self._replaceable = dict(broken) if again else {}
        return cause, again and requeues

    async def _missing(self, cause: Cause, nodes: JobNodes) -> Cause | None:
        """Return the cause of an end by nodes that Slurm does not call down; None where none is missing."""
        if not nodes.enough_without(()):
            return _node_fail(cause, cause.message)
        # Slurm declares a node down only minutes after it is gone
        silent = await asyncio.to_thread(self._launcher.silent_nodes) if cause.kind in _SILENCE else []
        # where too many are silent it is more likely that Slurm starts no steps
        if not silent or not nodes.enough_without(silent):
            return None
        self._replaceable = dict.fromkeys(silent, DID_NOT_ANSWER)
        self.write(self._replaceable)
        return _node_fail(cause, f"{_names(silent)} did not answer; {cause.message}")

    def replace(self) -> dict[str, object]:
        """Use the nodes of `judge` no more where spare ones are left; return the fields of the event about it.

        The result is empty where no node was lost, or where too few others are left in the job.
        """
        lost = self._replaceable
        if self._nodes is None or not lost or not self._nodes.enough_without(lost):
            return {}
        self._nodes.lose(lost)
        self._nodes.take_news()  # `judge` has written them down
        return {"nodes": lost, "spares": self._nodes.idle()}

    def placed(self) -> None:
        """Record the nodes that were found lost while the attempt was placed: roles start on others."""
        if self._nodes is not None:
            self.write(self._nodes.take_news())


def _names(nodes: Collection[str]) -> str:
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(sorted(nodes))}"


def _node_fail(cause: Cause, message: str) -> Cause:
    return Cause(kind=CauseKind.NODE_FAIL, time_s=cause.time_s, message=message)
