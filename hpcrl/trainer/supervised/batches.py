"""Batches of conversations for the trainer's ranks, in place of those of the dock: each rank cuts its own shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch
from hpcrl.errors import CheckpointError
from hpcrl.models.known import load_facts
from hpcrl.models.packing import training_cost
from hpcrl.rollouts.batches.packing import pack
from hpcrl.trainer.supervised.order import ConversationOrder
from hpcrl.trainer.supervised.rendered import RenderedConversations

__all__ = ["ConversationBatches", "DataPosition", "rendered_directory"]


class DataPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint stands in the data; the orchestrator's part of a checkpoint of a supervised run.

    Attributes
    ----------
    step:
        Steps whose rows are trained.
    epoch:
        Of the last one, from 0.
    seed, conversations_per_step, digest:
        What the order of rows depends on: with others the same steps would have other rows.
    kind:
        Tells it from the state of an orchestrator.
    """

    step: int
    epoch: int
    seed: int
    conversations_per_step: int
    digest: str
    kind: str = "sft"

    @classmethod
    def decode(cls, data: bytes) -> DataPosition:
        """Return the position that `ConversationBatches.snapshot` has encoded (CheckpointError where it is none)."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"the checkpoint is none of a supervised run: {error}") from error


class ConversationBatches:
    """The shards of one data-parallel rank. It also stands for the dock, whose other side a supervised run lacks."""

    def __init__(self, recipe: Recipe, *, rank: int, world_size: int) -> None:
        """Batches of ``rank`` of ``world_size`` data-parallel ones; `load` comes before everything else."""
        assert recipe.sft is not None
        self._recipe, self._config = recipe, recipe.sft
        self._rank, self._world_size = rank, world_size
        self._cost = _cost_of(recipe)

    def load(self, data: RenderedConversations) -> None:
        """Take the data (UsageError where an epoch has more steps than conversations are left)."""
        self._data, self._rows = data, data.by_row()
        self._order = ConversationOrder(len(self._rows), data.counts.train, self._config, seed=self._recipe.seed)

    def take(self, step: int) -> BatchShard:
        """Return the shard of ``step``: packed sequences of its rows."""
        sequences = [sequence for row in self._order.rows(step) for sequence in self._rows[row]]
        return self._shard(step, sequences)

    def held_out(self) -> BatchShard:
        """Return the shard of all held-out conversations, as of step 0."""
        return self._shard(0, self._data.held_out())

    def _shard(self, step: int, sequences: Sequence[int]) -> BatchShard:
        lengths = [int(self._data.lengths[sequence]) for sequence in sequences]
        budget = self._recipe.trainer.micro_batch_tokens
        layout = pack(lengths, budget=budget, world_size=self._world_size, cost=self._cost)
        trained = sum(int(self._data.trained[sequence]) for sequence in sequences)
        return BatchShard(
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            micro_batches=[
                self._micro_batch(step, [sequences[number] for number in numbers]) for numbers in layout[self._rank]
            ],
            stats=msgspec.structs.replace(
                BatchStats.of_tokens(sum(lengths), sampled=trained),
                # there are no rewards, and nobody has sampled these tokens: not known, in place of 0
                reward_mean=math.nan,
                reward_std=math.nan,
                staleness_mean=math.nan,
            ),
        )

    def _micro_batch(self, step: int, sequences: Sequence[int]) -> MicroBatch:
        def joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
            return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

        said = joined([self._data.said(sequence) for sequence in sequences], np.uint8)
        return MicroBatch(
            token_ids=joined([self._data.tokens(sequence) for sequence in sequences], np.int32),
            cu_seqlens=np.cumsum([0, *(self._data.lengths[sequence] for sequence in sequences)]).astype(np.int32),
            loss_mask=said,
            logprobs=np.zeros(len(said), np.float32),
            # nobody has sampled them: they count as those of the newest weights
            versions=np.full(len(said), max(0, step - 1), np.int32),
            advantages=said.astype(np.float32),
            rollouts=[(self._data.row_of(sequence), sequence) for sequence in sequences],
        )

    # -- what the loop asks of the dock

    def published(self, version: int) -> None:
        """There is no engine to tell of it."""

    def snapshot(self, step: int) -> bytes:
        """Return the position after ``step``, encoded."""
        position = DataPosition(
            step=step,
            epoch=self._order.epoch(step),
            seed=self._recipe.seed,
            conversations_per_step=self._config.conversations_per_step,
            digest=self._data.digest,
        )
        return msgspec.msgpack.encode(position)

    def check(self, saved: bytes) -> None:
        """Check that a checkpoint's position is one in this data (CheckpointError where it is not)."""
        found, own = DataPosition.decode(saved), DataPosition.decode(self.snapshot(1))
        names = ("seed", "conversations_per_step", "digest")
        if wrong := [name for name in names if getattr(found, name) != getattr(own, name)]:
            raise CheckpointError(
                f"the checkpoint of step {found.step} was trained on other batches ({', '.join(wrong)} differ): some "
                "conversations would be trained twice, others not at all\n"
                "    hint: bring back the directory sft of the run; or submit a new run from its weights (--from)"
            )

    def finish(self, version: int) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Nothing is open."""


def rendered_directory(run_dir: Path) -> Path:
    """Return where a run has its rendered conversations."""
    return run_dir / "sft"


def _cost_of(recipe: Recipe) -> Callable[[int], float]:
    """Return the cost of training on a sequence by the model's sizes; of a model that says none, its tokens."""
    try:
        return training_cost(load_facts(recipe.model.path))
    except (ValueError, OSError):
        return float
