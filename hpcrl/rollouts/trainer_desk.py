"""What the trainer is given, step by step: a batch once, the same bytes again on a retry, a snapshot on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.batches import Batch, build_batch
from hpcrl.rollouts.counters import Counters
from hpcrl.rollouts.files import RolloutFiles
from hpcrl.rollouts.records import Group
from hpcrl.rollouts.scheduler import Scheduler
from hpcrl.rollouts.state import OrchestratorState

__all__ = ["ConflictError", "TrainerDesk"]


class ConflictError(Exception):
    """What the trainer asks does not fit what happened so far."""


class TrainerDesk:
    """Hands out batches in step order.

    The batch of a step is made when the first rank asks for it, so that it holds the freshest that there is, and
    kept until the next step is asked for.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        scheduler: Scheduler,
        counters: Counters,
        gauges: Callable[[], Mapping[str, float]],
        decode: Callable[[Sequence[int]], str],
        files: RolloutFiles,
    ) -> None:
        """Start at the scheduler's step.

        Parameters
        ----------
        gauges:
            Measurements to report with each batch, beside ``counters``.
        decode:
            Token ids to text, for ``files``.
        files:
            Where consumed rollouts are written for people.
        """
        self._recipe, self._scheduler, self._counters, self._gauges = recipe, scheduler, counters, gauges
        self._decode, self._files = decode, files
        self._batch: Batch | None = None
        self._building = asyncio.Lock()

    @property
    def step(self) -> int:
        """The last step whose batch was handed out."""
        return self._scheduler.account.step

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float) -> bytes | None:
        """The shard of ``rank``; None where the batch is not ready within ``wait_s``.

        Raises
        ------
        ConflictError
            The step is neither the last one nor the next, or ranks disagree about their number.
        """
        if not 0 <= rank < world_size:
            raise ConflictError(f"rank {rank} of {world_size}")
        if step == self.step + 1 and not await self._scheduler.wait_batch(wait_s):
            return None
        async with self._building:
            if step == self.step + 1:
                if not self._scheduler.account.batch_ready:
                    return None
                self._batch = await self._build(step, world_size)
        if self._batch is None or self._batch.step != step:
            raise ConflictError(f"the batch of step {step} was asked for; the next is that of step {self.step + 1}")
        if len(self._batch.shards) != world_size:
            raise ConflictError(f"step {step} was cut for {len(self._batch.shards)} ranks, not {world_size}")
        return self._batch.shards[rank]

    async def _build(self, step: int, world_size: int) -> Batch:
        groups = self._scheduler.take_batch()
        counters: dict[str, float] = {**self._counters.as_dict(), **self._gauges()}
        # in a thread: a batch of long rollouts is many megabytes
        return await asyncio.to_thread(self._build_and_write, groups, step, world_size, counters)

    def _build_and_write(self, groups: list[Group], step: int, world_size: int, counters: dict[str, float]) -> Batch:
        batch = build_batch(
            groups, step=step, world_size=world_size, recipe=self._recipe, counters=counters, decode=self._decode
        )
        self._files.write(step, batch.lines)
        return batch

    def snapshot(self, step: int) -> OrchestratorState:
        """The state with exactly the batches up to ``step`` consumed.

        A trainer that asks ahead may have taken the batch of ``step + 1`` already: it then counts as finished
        and not consumed.

        Raises
        ------
        ConflictError
            That state is gone, or in the future.
        """
        restart, finished = self._scheduler.pending()
        counters = msgspec.structs.replace(self._counters)
        if step == self.step - 1 and self._batch is not None:
            finished = sorted([*finished, *self._batch.groups], key=lambda group: group.index)
            counters.consumed -= sum(len(group.rollouts) for group in self._batch.groups)
        elif step != self.step:
            raise ConflictError(f"a snapshot of step {step} was asked for; the last step is {self.step}")
        return OrchestratorState(
            step=step,
            seed=self._recipe.seed,
            group_size=self._recipe.rollouts.group_size,
            next_index=self._scheduler.next_index,
            restart=restart,
            finished=finished,
            counters=counters,
        )
