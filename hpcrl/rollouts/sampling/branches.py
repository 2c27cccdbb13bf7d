"""The sequences of one rollout: its conversation, and where the history was changed, one more for each branch.

A rollout is a tree of tokens. It is kept as its sequences, each from the first token to a leaf. A branch begins with a
prompt of its own, of which the first tokens may be those of an earlier sequence: the shared prefix. A token that was
sampled is trained in the sequence that sampled it; in later sequences that begin with it, it is context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.routes import RoutedExperts
from hpcrl.rollouts.core.records import Rollout, Turn
from hpcrl.rollouts.core.token_sequence import TokenSequence
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import (
    Answered,
    Assembled,
    RoutedExpertsRows,
    RoutedExpertsSettings,
    SequenceRows,
    assembled,
)


class TooManyBranchesError(Exception):
    """A rollout would have more sequences than it may. It is not a ValueError, because environments see those."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"its history was changed so often that it would have more than {most} sequences (rollouts.max_branches)"
        )


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence. ``unanswered``: tokens appended behind its last sampled one, the shared prefix left out."""

    tokens: TokenSequence
    rows: RoutedExpertsRows | None
    parent: int
    shared: int
    unanswered: int
    declared: bool
    turns: int = 0
    withdrawn: bool = False


class Branches:
    """Sequences as they grow, and the turns that they are made of. Sequences have numbers from 0, as they begin.

    Every call that takes a ``sequence`` means the one that was begun last where it is left out.
    """

    def __init__(
        self,
        *,
        max_branches: int,
        routes: RoutedExpertsSettings | None = None,
        store: KnownRows | None = None,
    ) -> None:
        """Begin without any sequence.

        Parameters
        ----------
        max_branches:
            Maximum number of sequences.
        routes:
            Settings of routed experts; None: engines do not return them.
        store:
            Experts of prompts that rollouts share.
        """
        self._max, self._routes, self._store = max_branches, routes, store
        self._sequences: list[_Sequence] = []
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def turns(self) -> int:
        """Turns of all sequences that have ended."""
        return len(self._turns)

    def tokens(self, sequence: int = -1) -> TokenSequence:
        """Return the tokens of a sequence; they are changed by `said` and `sampled` alone."""
        return self._sequences[sequence].tokens

    def rows(self, sequence: int = -1) -> RoutedExpertsRows | None:
        """Return the rows of experts of a sequence, which say what a request asks for; None where there are none."""
        return self._sequences[sequence].rows

    def begin(self, prompt_ids: NDArray[np.int32], *, shared_with: int | None = None, declared: bool = False) -> int:
        """Begin a sequence with a whole prompt; returns its number.

        Parameters
        ----------
        prompt_ids:
            ``[S]`` int32, at least one token: all that the engine is given.
        shared_with:
            The sequence whose beginning it has; None: that of the longest common prefix.
        declared:
            The environment let the conversation begin anew.

        Raises
        ------
        TooManyBranchesError
            There are as many as there may be.
        """
        if sum(not one.withdrawn for one in self._sequences) >= self._max:
            raise TooManyBranchesError(self._max)
        asked = range(len(self._sequences)) if shared_with is None else (shared_with,)
        common = {number: self.common_prefix(prompt_ids, number) for number in asked}
        parent = max(common, key=common.__getitem__, default=-1)
        shared = common.get(parent, 0)
        rows = None
        if self._routes is not None:
            before = self._sequences[parent].rows if shared else None
            rows = RoutedExpertsRows(self._routes, self._store) if before is None else before.branch(shared)
        made = _Sequence(TokenSequence(), rows, parent if shared else -1, shared, len(prompt_ids) - shared, declared)
        made.tokens.append_said(prompt_ids)
        self._sequences.append(made)
        return len(self._sequences) - 1

    def common_prefix(self, prompt_ids: NDArray[np.int32], sequence: int = -1) -> int:
        """Return how many tokens of a prompt are those of a sequence, from the first on."""
        own = self._sequences[sequence].tokens.token_ids
        most = min(len(own), len(prompt_ids))
        different = np.flatnonzero(own[:most] != prompt_ids[:most])
        return int(different[0]) if len(different) else most

    def said(self, token_ids: NDArray[np.int32], sequence: int = -1) -> None:
        """Append ``[S]`` int32 tokens that the policy did not sample."""
        one = self._sequences[sequence]
        one.tokens.append_said(token_ids)
        one.unanswered += len(token_ids)

    def withdraw(self, sequence: int = -1) -> None:
        """Remove the tokens behind the last sampled one; a sequence without sampled tokens does not count any more."""
        number = range(len(self._sequences))[sequence]
        one = self._sequences[number]
        length = len(one.tokens) - one.unanswered
        one.tokens.truncate(length)
        one.unanswered, one.withdrawn = 0, not one.turns
        for other in self._sequences:
            # what it shares may be followed by something else here
            if other.parent == number and other.shared > length:
                other.unanswered += 0 if other.turns else other.shared - length
                other.shared = length

    def unanswered(self, sequence: int = -1) -> NDArray[np.int32]:
        """Return a copy of the tokens behind the last sampled one, ``[S]``, without the shared prefix."""
        one = self._sequences[sequence]
        return one.tokens.token_ids[len(one.tokens) - one.unanswered :].copy()

    def turn(self, *, sampled: int, wait_s: float, reply_s: float, sequence: int = -1) -> Turn:
        """Return the turn whose answer has ``sampled`` tokens, for `sampled` and for keepers of turns."""
        number = range(len(self._sequences))[sequence]
        one = self._sequences[number]
        shared, declared = (0, 0) if one.turns else (one.shared, int(one.declared))
        return Turn(one.unanswered, sampled, wait_s, reply_s, number, shared, declared)

    def sampled(
        self,
        turn: Turn,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        *,
        experts: Answered | None = None,
    ) -> None:
        """Append the tokens that the policy has sampled behind the context of the sequence.

        Parameters
        ----------
        turn:
            From `turn`, or from before an interruption.
        token_ids, logprobs, versions:
            ``[N]``, at least one token.
        experts:
            From `RoutedExpertsRows.examined` of this sequence's `rows`; None where the answer has none.
        """
        one = self._sequences[turn.sequence]
        if experts is not None and one.rows is not None:
            # the last token has not gone into the model yet
            one.rows.take(len(one.tokens) + len(token_ids) - 1, experts)
        one.tokens.append_sampled(token_ids, logprobs, versions)
        one.turns, one.unanswered = one.turns + 1, 0
        self._turns.append(turn)

    async def rollout(
        self,
        member: int,
        *,
        reward: float,
        parts: Mapping[str, float],
        seconds: float,
        ended_s: float,
        context_version: int,
    ) -> Rollout | None:
        """Return the finished rollout; None where nothing was sampled.

        Tokens behind the last sampled one of a sequence are left out, and sequences without sampled tokens.

        Parameters
        ----------
        ended_s:
            Seconds since the epoch.
        context_version:
            Oldest version that the context may have been computed with.
        """
        layout = self._layout()
        if not layout:
            return None
        ids, sampled, logprobs, versions = (
            np.concatenate(columns) if len(layout) > 1 else columns[0]
            for columns in zip(*(one.tokens.arrays(end) for one, end, _, _ in layout), strict=True)
        )
        ends = [end for _, end, _, _ in layout]
        several = len(layout) > 1
        return Rollout(
            member=member,
            token_ids=ids,
            sampled=sampled,
            logprobs=logprobs,
            # tokens that were not sampled are context, which is cached under the salt's version; tokens that were kept
            # from a lost engine may be older than the salt on the next one
            versions=np.where(sampled, versions, context_version).astype(np.int32),
            reward=float(reward),
            parts={name: float(value) for name, value in parts.items()},
            seconds=seconds,
            ended_s=ended_s,
            turns=self._renumbered(),
            routed_experts=await self._experts(layout),
            starts=np.cumsum([0, *ends[:-1]]).astype(np.int32) if several else None,
            shared=np.array([shared for _, _, _, shared in layout], np.int32) if several else None,
        )

    def _layout(self) -> list[tuple[_Sequence, int, int, int]]:
        """Return the kept sequences: tokens of each, the place of the one it has its prefix from, length of that."""
        ends = [one.tokens.end_of_sampled() for one in self._sequences]
        places: list[int] = []  # of each sequence, or of the one that stands for it
        found: list[tuple[_Sequence, int, int, int]] = []
        lengths: list[int] = []  # of what is kept of each
        for one, end in zip(self._sequences, ends, strict=True):
            shared = min(one.shared, lengths[one.parent]) if one.parent >= 0 else 0
            parent = places[one.parent] if one.parent >= 0 else -1
            if end:
                places.append(len(found))
                lengths.append(end)
                found.append((one, end, parent, shared))
            else:
                places.append(parent)
                lengths.append(shared)
        return found

    def _renumbered(self) -> list[Turn]:
        """Return turns with the numbers of the sequences that are kept, and with what these share with each other."""
        layout = self._layout()
        numbers = {id(one): number for number, (one, _, _, _) in enumerate(layout)}
        found, begun = [], set()
        for turn in self._turns:
            one = self._sequences[turn.sequence]
            number = numbers[id(one)]
            said, shared = turn.said, 0
            if number not in begun:
                begun.add(number)
                shared = layout[number][3]
                said += turn.shared - shared
            found.append(msgspec.structs.replace(turn, said=said, sequence=number, shared=shared))
        return found

    async def _experts(self, layout: list[tuple[_Sequence, int, int, int]]) -> RoutedExperts | None:
        if self._routes is None:
            return None
        parts = [
            SequenceRows(one.rows, end, parent, shared) for one, end, parent, shared in layout if one.rows is not None
        ]
        size = sum(part.rows.nbytes for part in parts)
        made: Assembled | None = await beside_loop(partial(assembled, parts), size)
        return None if made is None else parts[0].rows.settled(made)
