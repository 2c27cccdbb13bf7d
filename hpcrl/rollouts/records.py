"""What a finished rollout and a finished group are. They outlive the process in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.decoding import prepared
from hpcrl.dock.assemble import routes_of
from hpcrl.dock.columns import decode_columns
from hpcrl.dock.ledger.entries import Finished, PayloadPlace
from hpcrl.dock.routes import RoutedExperts

__all__ = [
    "Group",
    "Rollout",
    "SavedGroup",
    "StoredRollout",
    "Turn",
    "decode_record",
    "decode_rollout",
    "encode_rollout",
    "finished_entry",
]


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request of a rollout, as the simulator can replay it (`hpcrl.simulation`).

    Attributes
    ----------
    said:
        Tokens that were appended before it: the prompt, or what a tool said.
    sampled:
        Tokens that came back.
    wait_s:
        Seconds since the reply before (since the start, for the first): the environment's own time.
    reply_s:
        Seconds until the reply was there, retries and queues included.
    """

    said: int
    sampled: int
    wait_s: float
    reply_s: float


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory: one sequence of ``T`` tokens, exactly as the engine saw and sampled it.

    Attributes
    ----------
    member:
        Position in the group, from 0.
    token_ids:
        ``[T]`` int32.
    sampled:
        ``[T]`` uint8: 1 where the policy sampled the token.
    logprobs:
        ``[T]`` float32: the engine's log-probability of a sampled token, 0 elsewhere.
    versions:
        ``[T]`` int32: policy version that sampled the token; for the others the version of the rollout's cache
        salt, the oldest that its context may have been computed with.
    reward, parts:
        From the environment.
    seconds:
        From its start to the reward.
    ended_s:
        Seconds since the epoch at its end.
    turns:
        Its requests, in order.
    routed_experts:
        Of all ``T`` tokens, as far as engines said: the row of the last one is always missing. None where engines do
        not return them.
    teacher_logprobs:
        ``[T]`` float32: the teacher's log-probability of a sampled token, 0 elsewhere; None without a teacher.
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

    @property
    def teacher_divergence(self) -> float | None:
        """The sum over sampled tokens of the policy's log-probability minus the teacher's; None without a teacher."""
        if self.teacher_logprobs is None:
            return None
        apart = np.where(self.sampled != 0, self.logprobs - self.teacher_logprobs, 0)
        return float(apart.sum(dtype=np.float64))

    @property
    def first_version(self) -> int:
        """Version of the first sampled token."""
        return int(self.versions[int(self.sampled.argmax())])

    @property
    def last_version(self) -> int:
        """Highest version of its tokens."""
        return int(self.versions.max())

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled.sum())


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A `Rollout` whose arrays lie in the ledger's files and in the warehouse: what is needed to make a batch of it.

    Attributes
    ----------
    tokens, sampled_tokens:
        How many it has.
    first_version, last_version:
        As those of `Rollout`, or ``counts_as``.
    place:
        Of its columns.
    counts_as:
        The version that all its tokens count as after a restore; None: as they were sampled.
    teacher_divergence:
        As that of `Rollout`.
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

    @classmethod
    def of(cls, rollout: Rollout, place: PayloadPlace, *, counts_as: int | None = None) -> StoredRollout:
        """What is kept in memory of a rollout that is stored at ``place``."""
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
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one prompt that were finished, in member order.

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
        """Version of the oldest first token: what the staleness bound looks at."""
        return min(rollout.first_version for rollout in self.rollouts)

    @property
    def has_variance(self) -> bool:
        """Whether rewards differ; where they do not, all advantages are zero."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as checkpoints had it before there was a ledger, with its arrays."""

    index: int
    environment: str
    prompt_index: int
    rollouts: list[Rollout]


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What of a rollout is no array."""

    member: int
    reward: float
    parts: dict[str, float]
    seconds: float
    ended_s: float
    turns: list[Turn]


def finished_entry(
    rollout: Rollout, payload: PayloadPlace, *, group: int, member: int, environment: str, prompt_index: int
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
    )


def encode_rollout(rollout: Rollout) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """What `hpcrl.dock.columns.encode_columns` wants of a rollout: what is no array, and arrays as `Rollout` has them.

    Routed experts are two columns, ``routed_experts [T, layers, experts_per_token]`` and ``routed_present [T]`` uint8;
    with a teacher there is ``teacher_logprobs [T]`` float32.
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
    return msgspec.msgpack.encode(about), arrays


def decode_rollout(block: bytes | memoryview) -> Rollout:
    """The rollout of a block of columns; its arrays are views into it.

    Raises
    ------
    ValueError
        It is no such block, or lacks a column.
    """
    fields, arrays = decode_record(block, _ARRAYS, _About, "a rollout")
    return Rollout(**fields, routed_experts=routes_of(arrays), teacher_logprobs=arrays.get("teacher_logprobs"))


_ARRAYS = ("token_ids", "sampled", "logprobs", "versions")


def decode_record(
    block: bytes | memoryview, names: Sequence[str], about: type[msgspec.Struct], what: str
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The arrays of ``names`` and the fields of ``about`` in a block of columns, and all its arrays by name.

    Arrays are read-only views into ``block``, in the shapes and dtypes that were written: these are not looked at.

    Raises
    ------
    ValueError
        It is no such block, or lacks a column; ``what`` it should be is named.
    """
    said, arrays = decode_columns(block)
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    try:
        known = msgspec.msgpack.decode(said, type=prepared(about))
    except msgspec.DecodeError as error:
        raise ValueError(f"what {what} says of itself cannot be read: {error}") from error
    return {name: arrays[name] for name in names} | msgspec.structs.asdict(known), arrays
