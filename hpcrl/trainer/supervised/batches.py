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


class DataPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a checkpoint in the data; it takes the orchestrator's part of a checkpoint in a supervised run.

    Attributes
    ----------
    step:
        Number of steps whose rows are trained.
    epoch:
        Epoch of the last of these steps, from 0.
    seed, conversations_per_step, digest:
        Values that determine the order of rows: with others the same steps would have other rows.
    kind:
        Distinguishes it from the state of an orchestrator.
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
            raise CheckpointError(f"the checkpoint is not from a supervised run: {error}") from error


class ConversationBatches:
    """The shards of one data-parallel rank. It also replaces the dock, which a supervised run does not have."""

    def __init__(self, recipe: Recipe, *, rank: int, world_size: int) -> None:
        """Prepare batches of ``rank`` of ``world_size`` data-parallel ones; call `load` before any other method."""
        assert recipe.sft is not None
        self._recipe, self._config = recipe, recipe.sft
        self._rank, self._world_size = rank, world_size
        self._flops = _flops_of(recipe)

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
        layout = pack(lengths, budget=budget, world_size=self._world_size, cost=self._flops or float)
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
                # unknown instead of 0: supervised tokens have no rewards and were not sampled
                reward_mean=math.nan,
                reward_std=math.nan,
                staleness_mean=math.nan,
                model_flops=None if self._flops is None else math.fsum(map(self._flops, lengths)),
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
            # they were not sampled: their version is that of the newest weights
            versions=np.full(len(said), max(0, step - 1), np.int32),
            advantages=said.astype(np.float32),
            rollouts=[(self._data.row_of(sequence), sequence) for sequence in sequences],
        )

    # -- what the loop asks of the dock

    def published(self, version: int) -> None:
        """Do nothing: there are no engines."""

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
                "    hint: restore the directory sft of the run; or submit a new run from its weights (--from)"
            )

    def finish(self, version: int) -> None:
        """Do nothing: no other process is involved."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


def rendered_directory(run_dir: Path) -> Path:
    """Return where a run has its rendered conversations."""
    return run_dir / "sft"


def _flops_of(recipe: Recipe) -> Callable[[int], float] | None:
    """Return a function from the tokens of a sequence to its operations; None if the model's sizes are unknown."""
    try:
        return training_cost(load_facts(recipe.model.path))
    except (ValueError, OSError):
        return None
