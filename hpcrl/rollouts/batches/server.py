"""Serve batches to the trainer step by step: the same bytes again on a retry, and snapshots of the state on request.

The batch of step s + 1 is built while step s trains: ranks ask for it as soon as they have that of step s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from hpcrl.config.recipe import Recipe
from hpcrl.models.known import load_facts
from hpcrl.models.packing import training_cost
from hpcrl.rollouts.batches.build import Batch, build_batch
from hpcrl.rollouts.batches.columns import RolloutColumns
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.records import Group
from hpcrl.rollouts.ledger.ledger import GroupJournal
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.sampling.scheduler import Scheduler

_log = logging.getLogger(__name__)

_WRITE_S = 1.0
"""Maximum time in seconds that a batch waits for the file of its rollouts."""


class ConflictError(Exception):
    """Raised where a request of the trainer contradicts the current state."""


class BatchServer:
    """Hands out batches in step order.

    A step is *waited for* (rollouts are not there), *built* (they are taken), *handed out* (a rank has its shard), and
    *trained* (so its batch is forgotten). From the first of these on it has a task of the orchestrator's own that
    builds its batch. Requests only look at it: one that is cut off loses nothing, and the next one gets the same bytes.

    At most two steps have a batch: the one that is trained, and the one behind it. Who asks for step s + 1 *ahead* is
    training step s, so step s - 1 is trained, on all ranks; others may still have to fetch step s.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        scheduler: Scheduler,
        counters: Counters,
        gauges: Callable[[], Mapping[str, float]],
        columns: RolloutColumns,
        files: RolloutFiles,
        journal: GroupJournal,
        spawn: Callable[[Coroutine[Any, Any, Batch]], asyncio.Task[Batch]],
    ) -> None:
        """Start at the scheduler's step.

        Parameters
        ----------
        gauges:
            Measurements to report with each batch, in addition to ``counters``.
        columns:
            Locations of the columns of finished rollouts.
        files:
            Writer of consumed rollouts for people.
        journal:
            Records the groups of each step before its batch is handed out.
        spawn:
            Starts a task that belongs to the orchestrator; when one fails, so does the orchestrator.
        """
        self._recipe, self._scheduler, self._counters, self._gauges = recipe, scheduler, counters, gauges
        self._columns, self._files, self._spawn, self._journal = columns, files, spawn, journal
        self._data_ranks = recipe.trainer.data_ranks
        self._flops = _flops_of(recipe)
        self._waited_s = 0.0
        self._builds: dict[int, asyncio.Task[Batch]] = {}
        self._handed_out = self._begun = scheduler.account.step

    @property
    def step(self) -> int:
        """Return the last step whose groups were taken."""
        return self._scheduler.account.step

    def begin(self, step: int) -> None:
        """Build the batch of ``step``, the one behind the last that was begun, as soon as it can be."""
        assert step == self._begun + 1, (step, self._begun)
        self._begun = step
        self._builds[step] = self._spawn(self._build(step))

    def check_asker(self, rank: int, world_size: int) -> None:
        """Raise ConflictError unless ``rank`` of ``world_size`` is a data-parallel rank of the run."""
        if world_size != self._data_ranks or not 0 <= rank < world_size:
            has = f"the run has {self._data_ranks} data-parallel ranks"
            raise ConflictError(f"rank {rank} of {world_size} asked; {has}")

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float, ahead: bool = False) -> bytes | None:
        """Return the shard of ``rank``; None where the batch is not ready within ``wait_s`` seconds.

        Parameters
        ----------
        ahead:
            True: the step before ``step`` is still being trained. False: it is trained.

        Raises
        ------
        ConflictError
            The step is neither the last one nor the next, or ``rank`` or ``world_size`` is wrong. The state is
            unchanged.
        """
        self.check_asker(rank, world_size)
        if step == self._next and step not in self._builds:
            self.begin(step)
        build = self._builds.get(step)
        if build is not None:
            self.trained(step - 2 if ahead else step - 1)
        else:
            raise ConflictError(f"the batch of step {step} was requested; the next is that of step {self._next}")
        # `asyncio.wait` does not cancel the task when the waiting request is cancelled
        await asyncio.wait([build], timeout=wait_s)
        if not build.done():
            return None
        shard = build.result().shards[rank]
        self._handed_out = max(self._handed_out, step)
        return shard

    @property
    def _next(self) -> int:
        return self._handed_out + 1

    def trained(self, step: int) -> None:
        """Forget the batches of steps up to ``step``, which are trained, as far as they were handed out."""
        step = min(step, self._handed_out)
        self._journal.trained(step)
        self._scheduler.settle(step)
        for number in [number for number in self._builds if number <= step]:
            del self._builds[number]

    async def _build(self, step: int) -> Batch:
        await self._scheduler.wait_batch()
        groups = self._scheduler.take_batch()
        await self._journal.taken(step, groups)
        counters: dict[str, float] = {**self._counters.as_dict(), **self._gauges()}
        waited_s = self._scheduler.policy_wait.seconds
        since_s, self._waited_s = waited_s - self._waited_s, waited_s
        # in a thread: a batch of long rollouts is many megabytes
        return await asyncio.to_thread(self._build_and_write, groups, step, counters, since_s)

    def _build_and_write(self, groups: list[Group], step: int, counters: dict[str, float], waited_s: float) -> Batch:
        batch = build_batch(
            groups,
            step=step,
            world_size=self._data_ranks,
            recipe=self._recipe,
            counters=counters,
            text=self._columns.text,
            cost=self._flops or float,
            flops=self._flops,
            wait_for_policy_s=waited_s,
            location=self._columns.location,
            payload_dir=self._columns.payload_dir,
        )
        # only for people: a batch is handed out even if this file cannot be written now
        self._files.write(step, batch.lines, wait_s=_WRITE_S)
        return batch

    def snapshot(self, step: int) -> OrchestratorState:
        """Return the state in which exactly the batches up to ``step`` are consumed.

        A trainer that asks ahead, or a batch that is being built, has already taken groups of later steps. These groups
        count as finished and not consumed here. Groups that those steps made stale are restored as well.

        Raises
        ------
        ConflictError
            The state is not available any more, or ``step`` is in the future.
        """
        pending = self._scheduler.pending(step) if step <= self._handed_out else None
        if pending is None:
            what = f"the last step that was delivered is {self._handed_out}"
            raise ConflictError(f"a snapshot of step {step} was asked for; {what}")
        return OrchestratorState.of(self._recipe, step=step, next_index=self._scheduler.next_index, pending=pending)


def _flops_of(recipe: Recipe) -> Callable[[int], float] | None:
    """Return a function from the tokens of a sequence to its operations; None where the model's sizes are unknown."""
    try:
        return training_cost(load_facts(recipe.model.path))
    except (FileNotFoundError, ValueError) as error:
        _log.warning("micro-batches are balanced by tokens alone: %s", error)
        return None
