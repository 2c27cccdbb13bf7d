"""Records of a finished rollout and of a finished group, which the ledger keeps across processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.assemble import routes_of
from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import Finished, PayloadPlace
from hpcrl.dock.routes import RoutedExperts
from hpcrl.dock.sequences import sequence_lengths
from hpcrl.storage.msgspec_types import prepared


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Request of a rollout, as the simulator can replay it (`hpcrl.simulation`).

    Attributes
    ----------
    said:
        Tokens that were appended before it: the prompt, or the result of a tool. If its sequence begins with tokens of
        another one, only the tokens behind them count.
    sampled:
        Number of sampled tokens.
    wait_s:
        Seconds since the reply before (since the start, for the first): the environment's own time.
    reply_s:
        Seconds until the reply was there, retries and queues included.
    sequence:
        Number of its sequence in the rollout.
    shared:
        Tokens of an earlier sequence that its sequence begins with, where it is the first turn of that; 0 for others.
    declared:
        1 in the first turn of a declared branch, where the environment let the conversation begin anew; 0 in others.
    """

    said: int
    sampled: int
    wait_s: float
    reply_s: float
    sequence: int = 0
    shared: int = 0
    declared: int = 0


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory: ``T`` tokens in one sequence or several, exactly as the engine saw and sampled them.

    Sequences lie one behind the other, each from its first token to its last sampled one. Where the history was
    changed, the rollout has branched, and a sequence may begin with tokens of an earlier one. What was sampled there is
    marked in the earlier sequence, and is context in the later one.

    Attributes
    ----------
    member:
        Position in the group, from 0.
    token_ids:
        ``[T]`` int32.
    sampled:
        ``[T]`` uint8: 1 where the policy sampled the token, in the first sequence that has it.
    logprobs:
        ``[T]`` float32: the engine's log-probability of a sampled token, 0 elsewhere.
    versions:
        ``[T]`` int32: policy version that sampled the token; for the others the version of the rollout's cache
        salt, the oldest that its context may have been computed with.
    reward, parts:
        Reward of the environment, and its named parts.
    seconds:
        Seconds from its start to the reward.
    ended_s:
        Seconds since the epoch at its end.
    turns:
        Its requests, in order.
    routed_experts:
        Routed experts of all ``T`` tokens, as far as engines returned them: the row of the last token of a sequence is
        always missing. None where engines do not return them.
    teacher_logprobs:
        ``[T]`` float32: the teacher's log-probability of a sampled token, 0 elsewhere; None without a teacher.
    starts:
        ``[n]`` int32: the first token of each sequence; None where there is one.
    shared:
        ``[n]`` int32: tokens at the beginning of each sequence that an earlier one has; None where there is one.
    """

    member: int
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float
    parts: dict[str, float]
    seconds: float
    ended_s: float = 0.0
    turns: list[Turn] = []
    routed_experts: RoutedExperts | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    starts: NDArray[np.int32] | None = None
    shared: NDArray[np.int32] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return sequence_lengths(self.starts, len(self.token_ids))

    @property
    def sequences(self) -> list[NDArray[np.int32]]:
        """Token ids of each sequence: views."""
        ends = np.cumsum(self.lengths)
        return np.split(self.token_ids, ends[:-1])

    @property
    def last_token(self) -> int:
        """The token that its last turn ended with."""
        number = self.turns[-1].sequence if self.turns else -1
        return int(self.sequences[number][-1])

    @property
    def repeated_tokens(self) -> int:
        """Tokens of sequences that an earlier one has already."""
        return 0 if self.shared is None else int(self.shared.sum())

    @property
    def teacher_divergence(self) -> float | None:
        """Return the sum over sampled tokens of policy minus teacher log-probability; None without a teacher."""
        if self.teacher_logprobs is None:
            return None
        apart = np.where(self.sampled != 0, self.logprobs - self.teacher_logprobs, 0)
        return float(apart.sum(dtype=np.float64))

    @property
    def first_version(self) -> int:
        """Return the version of the first sampled token."""
        return int(self.versions[int(self.sampled.argmax())])

    @property
    def last_version(self) -> int:
        """Return the highest version of its tokens."""
        return int(self.versions.max())

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled.sum())


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A `Rollout` whose arrays are in the ledger's files and in the warehouse, with the fields that a batch needs.

    Attributes
    ----------
    tokens, sampled_tokens:
        Numbers of its tokens.
    first_version, last_version:
        Same as in `Rollout`, or ``counts_as``.
    place:
        Location of its columns.
    counts_as:
        The version that all its tokens count as after a restore; None: as they were sampled.
    teacher_divergence, repeated_tokens:
        As those of `Rollout`.
    lengths:
        Tokens of each sequence; empty: there is one.
    """

    member: int
    reward: float
    parts: dict[str, float]
    seconds: float
    ended_s: float
    turns: list[Turn]
    tokens: int
    sampled_tokens: int
    first_version: int
    last_version: int
    place: PayloadPlace
    counts_as: int | None = None
    teacher_divergence: float | None = None
    lengths: list[int] = []
    repeated_tokens: int = 0

    @property
    def branches(self) -> int:
        """Return the number of its sequences."""
        return max(1, len(self.lengths))

    @classmethod
    def of(cls, rollout: Rollout, place: PayloadPlace, *, counts_as: int | None = None) -> StoredRollout:
        """Return the part of a rollout that stays in memory once it is stored at ``place``."""
        return cls(
            member=rollout.member,
            reward=rollout.reward,
            parts=rollout.parts,
            seconds=rollout.seconds,
            ended_s=rollout.ended_s,
            turns=rollout.turns,
            tokens=len(rollout.token_ids),
            sampled_tokens=rollout.sampled_tokens,
            first_version=rollout.first_version if counts_as is None else counts_as,
            last_version=rollout.last_version if counts_as is None else counts_as,
            place=place,
            counts_as=counts_as,
            teacher_divergence=rollout.teacher_divergence,
            lengths=rollout.lengths,
            repeated_tokens=rollout.repeated_tokens,
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Finished rollouts of one prompt, in member order.

    Attributes
    ----------
    index:
        Number of the group in the data order of the run.
    environment:
        Its name.
    prompt_index:
        Index of the training prompt.
    """

    index: int
    environment: str
    prompt_index: int
    rollouts: list[StoredRollout]

    @property
    def version(self) -> int:
        """Return the version of the oldest first token, to which the staleness bound applies."""
        return min(rollout.first_version for rollout in self.rollouts)

    @property
    def has_variance(self) -> bool:
        """Return whether rewards differ; where they do not, all advantages are zero."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Group in a checkpoint of a version without a ledger, with its arrays."""

    index: int
    environment: str
    prompt_index: int
    rollouts: list[Rollout]


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a rollout that are not arrays."""

    member: int
    reward: float
    parts: dict[str, float]
    seconds: float
    ended_s: float
    turns: list[Turn]


def finished_entry(
    rollout: Rollout,
    payload: PayloadPlace,
    *,
    group: int,
    member: int,
    environment: str,
    prompt_index: int,
    truncated: bool | None = None,
) -> Finished:
    """Return the ledger's entry of a finished rollout whose columns lie in ``payload``."""
    return Finished(
        group=group,
        member=member,
        environment=environment,
        prompt_index=prompt_index,
        reward=rollout.reward,
        tokens=len(rollout.token_ids),
        sampled_tokens=rollout.sampled_tokens,
        first_version=rollout.first_version,
        last_version=rollout.last_version,
        ended_s=rollout.ended_s,
        payload=payload,
        sequences=len(rollout.lengths),
        truncated=truncated,
    )


def encode_rollout(rollout: Rollout) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Return the fields and arrays of a rollout for `hpcrl.dock.columns.encode_columns`.

    Routed experts are two columns, ``routed_experts [T, layers, experts_per_token]`` and ``routed_present [T]`` uint8;
    with a teacher there is ``teacher_logprobs [T]`` float32, with several sequences ``starts`` and ``shared``.
    """
    about = _About(
        member=rollout.member,
        reward=rollout.reward,
        parts=rollout.parts,
        seconds=rollout.seconds,
        ended_s=rollout.ended_s,
        turns=rollout.turns,
    )
    arrays: dict[str, NDArray[Any]] = {name: getattr(rollout, name) for name in _ARRAYS}
    if rollout.routed_experts is not None:
        arrays["routed_experts"] = rollout.routed_experts.experts
        arrays["routed_present"] = rollout.routed_experts.known.view(np.uint8)
    if rollout.teacher_logprobs is not None:
        arrays["teacher_logprobs"] = rollout.teacher_logprobs
    if rollout.starts is not None and rollout.shared is not None:
        arrays |= {"starts": rollout.starts, "shared": rollout.shared}
    return msgspec.msgpack.encode(about), arrays


def decode_rollout(block: bytes | memoryview) -> Rollout:
    """Return the rollout of a block of columns; its arrays are views into the block.

    Raises
    ------
    ValueError
        The block is not one of a rollout, lacks a column, or its sequences are not those of its tokens.
    """
    fields, arrays = decode_record(block, _ARRAYS, _About, "a rollout")
    starts, shared = arrays.get("starts"), arrays.get("shared")
    lengths = sequence_lengths(starts, len(arrays["token_ids"]))
    if (starts is None) != (shared is None) or (shared is not None and shared.shape != (len(lengths),)):
        raise ValueError(f"a rollout of {len(lengths)} sequences does not say what they share")
    return Rollout(
        **fields,
        routed_experts=routes_of(arrays),
        teacher_logprobs=arrays.get("teacher_logprobs"),
        starts=starts,
        shared=shared,
    )


_ARRAYS = ("token_ids", "sampled", "logprobs", "versions")


def decode_record(
    block: bytes | memoryview, names: Sequence[str], about: type[msgspec.Struct], what: str
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the arrays of ``names`` and the fields of ``about`` in a block of columns, and all its arrays by name.

    Arrays are read-only views into ``block`` with the shapes and dtypes that were written; they are not validated.

    Raises
    ------
    ValueError
        The block cannot be decoded, or lacks a column; the message names the expected content ``what``.
    """
    said, arrays = decode_columns(block)
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    try:
        known = msgspec.msgpack.decode(said, type=prepared(about))
    except msgspec.DecodeError as error:
        raise ValueError(f"the description of {what} cannot be read: {error}") from error
    return {name: arrays[name] for name in names} | msgspec.structs.asdict(known), arrays
