"""A shard of a batch put together on the rank that trains on it, from the columns of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.routes import RoutedExperts
from hpcrl.dock.routes import joined as joined_routes
from hpcrl.dock.wire import BatchShard, MicroBatch, ReferencedShard, Sample
from hpcrl.errors import RolloutsLostError

_MAX_LOG_RATIO = 20.0
"""Maximum of a log-ratio where the teacher nearly excludes a token, as in the losses (`hpcrl.trainer.step.losses`)."""
Read = Callable[[PayloadPlace], memoryview]
"""The block at a place, verified (OSError, ValueError)."""


def assemble_batch(shard: ReferencedShard, read: Read) -> BatchShard:
    """Return the shard with its columns.

    Columns of a micro-batch that holds one sequence are views into its block; others are copied once. A block is read
    once, however many sequences of it the shard has.

    Raises
    ------
    RolloutsLostError
        Columns of a rollout cannot be read, or do not belong to such a rollout.
    """
    blocks: dict[PayloadPlace, memoryview] = {}

    def read_once(place: PayloadPlace) -> memoryview:
        if place not in blocks:
            blocks[place] = read(place)
        return blocks[place]

    several = any(sample.rollout_tokens for samples in shard.micro_batches for sample in samples)
    read_block = read_once if several else read
    return BatchShard(
        step=shard.step,
        rank=shard.rank,
        world_size=shard.world_size,
        micro_batches=[_micro_batch(samples, read_block, shard.teacher_weight) for samples in shard.micro_batches],
        stats=shard.stats,
    )


def routes_of(columns: dict[str, NDArray[Any]]) -> RoutedExperts | None:
    """Return the routed experts among the columns of a rollout of ``T`` tokens; None where engines recorded none.

    Columns are ``routed_experts [T, layers, experts_per_token]``, unsigned integers, and ``routed_present [T]`` uint8;
    they are not copied. ValueError is raised where their shapes do not agree.
    """
    if "routed_experts" not in columns:
        return None
    return RoutedExperts.of(columns["routed_experts"], columns["routed_present"])


def _micro_batch(samples: Sequence[Sample], read: Read, teacher_weight: float) -> MicroBatch:
    blocks = [_columns(sample, read) for sample in samples]

    def joined(name: str, dtype: type) -> NDArray[Any]:
        return _joined([columns[name] for columns in blocks], dtype)

    lengths = [sample.tokens for sample in samples]
    routes = [routes_of(columns) for columns in blocks]
    advantages = [
        columns["sampled"].astype(np.float32) * _token_advantages(sample, columns, teacher_weight)
        for sample, columns in zip(samples, blocks, strict=True)
    ]
    return MicroBatch(
        token_ids=joined("token_ids", np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=joined("sampled", np.uint8),
        logprobs=joined("logprobs", np.float32),
        versions=joined("versions", np.int32),
        advantages=_joined(advantages, np.float32),
        routed_experts=routes[0] if len(routes) == 1 else joined_routes(routes, lengths),
        rollouts=[(sample.group, sample.member) for sample in samples],
        sequences=[sample.sequence for sample in samples] if any(sample.sequence for sample in samples) else [],
        teacher_logprobs=_teacher_logprobs(blocks),
    )


def _teacher_logprobs(blocks: Sequence[dict[str, NDArray[Any]]]) -> NDArray[np.float32] | None:
    """Return a teacher's scores of all tokens, NaN in rollouts that none scored; None where it scored none of them."""
    name = "teacher_logprobs"
    if not any(name in columns for columns in blocks):
        return None
    unknown = (np.full(len(columns["token_ids"]), np.nan, np.float32) for columns in blocks)
    found = [columns.get(name, without) for columns, without in zip(blocks, unknown, strict=True)]
    return _joined(found, np.float32).astype(np.float32, copy=False)


def _token_advantages(sample: Sample, columns: dict[str, NDArray[Any]], teacher_weight: float) -> Any:
    """Return the advantage of each token, ``[T]`` or one number: of the reward, and of what a teacher finds likelier.

    Rollouts that were finished before the run had a teacher have the first alone.
    """
    own = np.float32(sample.advantage)
    if not teacher_weight or "teacher_logprobs" not in columns:
        return own
    apart = np.clip(columns["teacher_logprobs"] - columns["logprobs"], -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return own + np.float32(teacher_weight) * apart.astype(np.float32)


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _columns(sample: Sample, read: Read) -> dict[str, NDArray[Any]]:
    """Return the columns of a sequence, without those that say where sequences begin."""
    tokens = sample.rollout_tokens or sample.tokens
    try:
        columns = decode_columns(read(sample.place))[1]
        lengths = {name: len(columns[name]) for name in ("token_ids", "sampled", "logprobs", "versions")}
    except (OSError, ValueError, KeyError) as error:
        raise RolloutsLostError(
            f"the columns of rollout {sample.group}/{sample.member} cannot be read: {error}\n"
            "    hint: hpcrl rollouts verify RUN says what else is damaged; the next attempt rolls it out again"
        ) from error
    if "teacher_logprobs" in columns:
        lengths["teacher_logprobs"] = len(columns["teacher_logprobs"])
    if set(lengths.values()) != {tokens}:
        raise RolloutsLostError(
            f"rollout {sample.group}/{sample.member} has {tokens} tokens, its columns {lengths}\n"
            "    hint: hpcrl rollouts verify RUN says what else is damaged"
        )
    if sample.rollout_tokens:
        own = slice(sample.begin, sample.begin + sample.tokens)
        columns = {name: column[own] for name, column in columns.items() if name not in ("starts", "shared")}
    if sample.counts_as is not None:
        columns["versions"] = np.full_like(columns["versions"], sample.counts_as)
    return columns
