"""Messages from the orchestrator to the trainer, as MessagePack: the rollouts of a rank's shard, and their weights.

Columns are not sent: the orchestrator sends their places (`ReferencedShard`), and the rank assembles its shard
(`hpcrl.dock.assemble`). A shard with all columns in it (`BatchShard`) can be sent as well, for records and tests.

A batch is cut into one shard a trainer rank, and each shard into micro-batches of at most
``trainer.micro_batch_tokens`` tokens, in which several sequences lie one behind the other. A rollout has one sequence,
or one for each of its branches; these may be in different micro-batches, and on different ranks. All shards of a batch
have the same number of micro-batches, because ranks meet in collectives; a rank without data gets empty micro-batches.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.routes import RoutedExperts
from hpcrl.dock.warehouse.interface import Location
from hpcrl.storage.msgspec_types import decode_msgpack

FORMAT_VERSION = 1
REFERENCES_VERSION = 2
"""Format version of shards that name their rollouts and have no columns."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Packed sequences. ``T`` tokens of ``n`` sequences; ``T`` and ``n`` may be 0.

    Attributes
    ----------
    token_ids:
        ``[T]`` int32.
    cu_seqlens:
        ``[n + 1]`` int32, start of each sequence and the end of the last; positions restart at each start.
    loss_mask:
        ``[T]`` uint8: 1 where the token was sampled by the policy (its log-probability is conditioned on the
        tokens before it), and no earlier sequence of its rollout has it. The first token of a sequence is never
        sampled.
    logprobs:
        ``[T]`` float32: the engine's log-probability of each sampled token, 0 elsewhere.
    versions:
        ``[T]`` int32: policy version that sampled the token; for the others the version of the rollout's cache
        salt, the oldest that its context may have been computed with.
    advantages:
        ``[T]`` float32: advantage of each sampled token, 0 elsewhere.
    routed_experts:
        Routed experts of each token; None where no engine recorded any.
    rollouts:
        Group and member of the rollout of each sequence.
    sequences:
        Number of each sequence in its rollout; empty where all are the first ones.
    teacher_logprobs:
        ``[T]`` float32: the teacher's log-probability of each sampled token, NaN in rollouts that no teacher scored;
        None where it scored none of them.
    """

    token_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    routed_experts: RoutedExperts | None = None
    rollouts: list[tuple[int, int]] = []
    sequences: list[int] = []
    teacher_logprobs: NDArray[np.float32] | None = None

    @property
    def begun_rollouts(self) -> list[tuple[int, int]]:
        """Group and member of each rollout whose first sequence is here: in a whole batch each is once among them."""
        numbers = self.sequences or [0] * len(self.rollouts)
        return [rollout for rollout, number in zip(self.rollouts, numbers, strict=True) if number == 0]


class BatchStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of a whole batch from the orchestrator; field meanings as in `hpcrl.runs.metrics.StepRecord`.

    Attributes
    ----------
    total_sampled_tokens:
        Sampled tokens of the whole batch, over all shards: the loss is normalised by it.
    total_tokens:
        Tokens of all sequences of the whole batch.
    environments:
        Indices of the groups of each environment; empty in batches of earlier versions.
    """

    reward_mean: float
    reward_std: float
    reward_by_env: dict[str, float]
    reward_parts: dict[str, float]
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    total_tokens: int
    total_sampled_tokens: int
    rollouts: dict[str, float]
    reward_count: int = 0
    reward_count_by_env: dict[str, int] = {}
    reward_count_by_part: dict[str, int] = {}
    teacher_kl: float | None = None
    branches_mean: float = 1.0
    branches_max: int = 1
    prefix_repeated_tokens: int = 0
    environments: dict[str, list[int]] = {}
    model_flops: float | None = None
    wait_for_policy_s: float | None = None

    def environment_numbers(self) -> dict[int, int]:
        """Return the position in ``environments`` of the environment of each group, by the index of the group."""
        return {group: number for number, groups in enumerate(self.environments.values()) for group in groups}

    @classmethod
    def of_tokens(cls, total: int = 0, *, sampled: int = 0) -> BatchStats:
        """Describe a batch that does not come from an orchestrator: only how many tokens it has is known."""
        return cls(
            reward_mean=0.0,
            reward_std=0.0,
            reward_by_env={},
            reward_parts={},
            staleness_mean=0.0,
            staleness_max=0,
            staleness_histogram={},
            total_tokens=total,
            total_sampled_tokens=sampled,
            rollouts={},
        )


class BatchShard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a batch that one data-parallel rank trains on.

    Attributes
    ----------
    step:
        Optimizer step (from 1) that the batch is for; the trainer's policy version is ``step - 1``.
    rank, world_size:
        Data-parallel rank of the part, and number of these ranks: ranks of one context-parallel group share one.
    """

    step: int
    rank: int
    world_size: int
    micro_batches: list[MicroBatch]
    stats: BatchStats
    format_version: int = FORMAT_VERSION


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of a rollout of a batch, by reference, with what only the orchestrator knows.

    Attributes
    ----------
    group, member:
        Which rollout it is of.
    tokens:
        How long the sequence is.
    advantage:
        Advantage of each of its sampled tokens.
    place:
        Place of its columns.
    counts_as:
        The version that all its tokens count as, where a restore has changed that; None: those that its columns say.
    sequence:
        Its number in the rollout.
    begin:
        Its first token among those of the rollout.
    rollout_tokens:
        Of all sequences of the rollout; 0: there is no other one.
    """

    group: int
    member: int
    tokens: int
    advantage: float
    place: PayloadPlace
    counts_as: int | None = None
    sequence: int = 0
    begin: int = 0
    rollout_tokens: int = 0


class ReferencedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A `BatchShard` whose columns lie elsewhere.

    Attributes
    ----------
    micro_batches:
        Sequences of each, in their order.
    location:
        Address of the warehouse; None without one.
    payload_dir:
        Directory of the run's columns, on the shared filesystem.
    teacher_weight:
        Weight of the teacher's log-probability minus the engine's in the advantage of a token; 0: without a teacher.
    """

    step: int
    rank: int
    world_size: int
    micro_batches: list[list[Sample]]
    stats: BatchStats
    location: Location | None
    payload_dir: str
    format_version: int = REFERENCES_VERSION
    teacher_weight: float = 0.0


class _Format(msgspec.Struct):
    format_version: int = FORMAT_VERSION


def encode_array(value: Any) -> Any:
    """Encode an array as dtype, shape and raw bytes (a `msgspec` hook)."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": np.ascontiguousarray(value).tobytes()}
    raise NotImplementedError(f"cannot encode {type(value)}")


def decode_array(kind: type, value: Any) -> Any:
    """Decode the result of `encode_array` as a read-only view (a `msgspec` hook)."""
    # msgspec passes the generic alias of NDArray fields
    if getattr(kind, "__origin__", kind) is np.ndarray:
        try:
            return np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"])
        except (KeyError, TypeError, OverflowError, SyntaxError) as error:
            raise ValueError(f"an array cannot be read: {error}") from error
    raise NotImplementedError(f"cannot decode {kind}")


def encode_shard(shard: BatchShard | ReferencedShard) -> bytes:
    """Return the encoded bytes of a shard."""
    return msgspec.msgpack.encode(shard, enc_hook=encode_array)


def decode_shard(data: bytes) -> BatchShard:
    """Return the shard of ``data``; its arrays are read-only views into it.

    Raises
    ------
    ValueError
        It is not a shard of a format this code knows.
    """
    try:
        shard: BatchShard = decode_msgpack(data, BatchShard, dec_hook=decode_array)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a batch shard: {error}") from error
    if shard.format_version != FORMAT_VERSION:
        raise ValueError(f"batch format {shard.format_version}, this hpcrl reads {FORMAT_VERSION}")
    return shard


def decode_answer(data: bytes) -> BatchShard | ReferencedShard:
    """Return the shard of ``data``, with its columns or without (ValueError as `decode_shard`)."""
    try:
        found = decode_msgpack(data, _Format).format_version
        if found == REFERENCES_VERSION:
            return decode_msgpack(data, ReferencedShard)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a batch shard: {error}") from error
    return decode_shard(data)
