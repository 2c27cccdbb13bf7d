"""Samples the turns of one rollout: seeds, cache salt, kept turns. Conversations and the gateway share it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.core.saved_turns import SavedTurn, TurnKeeper
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.engines.client import EngineProtocolError, SamplingParams
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.rollouts.environments.base import Outcome, Tool
from hpcrl.rollouts.rendering import Parsed
from hpcrl.rollouts.sampling.branches import Branches
from hpcrl.rollouts.sampling.routed_experts import Answered
from hpcrl.rollouts.sampling.sampler import Sampler


class SampledTurn(NamedTuple):
    """A turn that is appended to its sequence.

    Attributes
    ----------
    number:
        Number of the turn in the rollout, from 0, in the order in which turns began.
    prompt:
        ``[P]`` int32: all tokens before it.
    """

    turn: SavedTurn
    number: int
    prompt: NDArray[np.int32]

    @property
    def finished(self) -> bool:
        """Return whether no limit cut it."""
        return self.turn.finish_reason == "stop"


class TurnSampler:
    """Samples turns of one rollout, each at the end of one of its sequences. Several may be sampled at once.

    Attributes
    ----------
    sampler:
        Engines, chat format and limits.
    seed:
        Seed of this rollout; each turn samples with a seed of its own, derived from it.
    branches:
        The sequences.
    """

    def __init__(
        self, sampler: Sampler, session: EngineSession, *, seed: int, keeper: TurnKeeper | None = None
    ) -> None:
        """Begin; nothing is sent.

        Parameters
        ----------
        session:
            Session of the group.
        keeper:
            Has the turns from before an interruption, and records those that end. None: turns are not saved.
        """
        self.sampler, self.seed, self._session, self._keeper = sampler, seed, session, keeper
        self.branches = Branches(max_branches=sampler.max_branches, routes=sampler.routes, store=sampler.rows)
        self._running: set[int] = set()
        self._salt: int | None = None
        self._salt_engine: tuple[Engine, int] | None = None
        self._first_version: int | None = None
        self._replied_s = time.monotonic()

    @property
    def first_version(self) -> int | None:
        """Version of the first sampled token; before its arrival, that of the engine when it was asked.

        None before the first request.
        """
        return self._salt if self._first_version is None else self._first_version

    def room(self, sequence: int = -1) -> int:
        """Return how many tokens there may still be in a sequence."""
        return self.sampler.max_model_len - len(self.branches.tokens(sequence))

    async def sample(
        self, sequence: int = -1, *, before: Callable[[SampledTurn], Awaitable[None]] | None = None
    ) -> SampledTurn:
        """Append a turn to a sequence that has room: the one of before an interruption that followed it, or a new one.

        Parameters
        ----------
        before:
            Called before the turn is appended and kept: where it raises, or is cancelled, there is no such turn.

        Raises
        ------
        EngineError
            No engine answered.
        EngineProtocolError
            An answer cannot be used for training.
        """
        branches, keeper = self.branches, self._keeper
        if keeper is not None:
            keeper.flush()
        sequence = range(len(branches))[sequence]
        number = max((branches.turns, *(other + 1 for other in self._running)))
        said = branches.unanswered(sequence)
        expected = branches.turn(sampled=0, wait_s=0.0, reply_s=0.0, sequence=sequence)
        prompt = branches.tokens(sequence).token_ids
        self._running.add(number)
        try:
            saved = None if keeper is None else keeper.recall(number, said, expected)
            if saved is not None:
                self._salt = saved.salt if self._salt is None else min(self._salt, saved.salt)
            turn = await self._ask(number, said, sequence) if saved is None else saved
            experts = await self._examined(turn, number, sequence)
            sampled = SampledTurn(turn, number, prompt)
            if before is not None:
                await before(sampled)
        finally:
            self._running.discard(number)
        if keeper is not None and saved is None:
            # the ledger has turns in the order in which they ended, and one at a time
            keeper.flush()
            keeper.ended(branches.turns, turn)
        if self._first_version is None:
            self._first_version = int(turn.versions[0])
        branches.sampled(turn.turn, turn.token_ids, turn.logprobs, turn.versions, experts=experts)
        return sampled

    def parse(self, sampled: SampledTurn, tools: Sequence[Tool]) -> Parsed:
        """Return the parsed reply of a turn. This may take milliseconds."""
        turn, stops = sampled.turn, self.sampler.stops
        token_ids = turn.token_ids.tolist()
        # what has begun the thinking may be shared with an earlier sequence
        said = sampled.prompt if turn.turn.shared else turn.said
        parsed = self.sampler.renderer.parse(
            stops.spoken(token_ids), said=said.tolist(), tools=tools, turn=sampled.number
        )
        return stops.without_stop(parsed, token_ids[-1]) if sampled.finished else parsed

    async def rollout(self, member: int, outcome: Outcome, *, seconds: float) -> Rollout | None:
        """Return the finished rollout; None where nothing was sampled."""
        return await self.branches.rollout(
            member,
            reward=outcome.reward,
            parts=outcome.parts,
            seconds=seconds,
            ended_s=time.time(),
            context_version=self._oldest_context(),
        )

    async def _ask(self, number: int, said: NDArray[np.int32], sequence: int) -> SavedTurn:
        """Ask an engine for a turn."""
        sampler, sampling, stops = self.sampler, self.sampler.sampling, self.sampler.stops
        branches = self.branches
        tokens, rows = branches.tokens(sequence), branches.rows(sequence)
        params = SamplingParams(
            temperature=sampler.temperature,
            max_tokens=min(self.room(sequence), sampling.max_new_tokens),
            seed=self._turn_seed(number),
            stop_token_ids=list(stops.token_ids),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=list(stops.strings) or msgspec.UNSET,
            skip_special_tokens=False if stops.strings else msgspec.UNSET,
            stream_interval=sampler.stream_interval,
            routed_experts_prompt_start=msgspec.UNSET if rows is None else rows.start(len(tokens)),
        )
        asked_s = time.monotonic()
        answer = await sampler.pool.generate(
            self._session, tokens.encoded, params, cache_salt=self._cache_salt, rows=rows is None or rows.wants_rows
        )
        answer = await beside_loop(partial(stops.cut, answer), answer.token_ids.nbytes)
        now = time.monotonic()
        times = round(asked_s - self._replied_s, 6), round(now - asked_s, 6)
        self._replied_s = now
        return SavedTurn(
            said=said,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            salt=-1 if self._salt is None else self._salt,
            turn=branches.turn(sampled=len(answer.token_ids), wait_s=times[0], reply_s=times[1], sequence=sequence),
            experts=answer.experts,
        )

    def _turn_seed(self, number: int) -> int:
        """Return the seed of a turn: of the rollout and the turn, and of the recipe's own where it has one."""
        own = self.sampler.sampling.seed
        return stable_hash("turn", self.seed, number, *(() if own is None else (own,)))

    async def _examined(self, turn: SavedTurn, number: int, sequence: int) -> Answered | None:
        """Return the experts of an answer, as the sequence takes them; None where they are not used."""
        rows = self.branches.rows(sequence)
        if rows is None or turn.experts is None or not rows.wants_rows:
            return None
        # later turns have prefixes that no other conversation has, and the salt of a mirrored one is of other weights;
        # versions of one engine do not decrease, and none is below the salt: others kept tokens of one that was lost,
        # whose weights may have chosen the experts of the prompt
        of_others = turn.versions.min() < max(turn.salt, turn.versions[0])
        own = number > 0 or turn.salt < 0 or turn.mirrored or of_others
        opening = None if own else (turn.salt, turn.said)
        try:
            return await beside_loop(partial(rows.examined, turn.experts, opening), turn.experts.nbytes)
        except ValueError as error:
            raise EngineProtocolError(f"{self._session.engine.name}: routed experts of an answer: {error}") from error

    def _oldest_context(self) -> int:
        known = [version for version in (self._salt, self._first_version) if version is not None]
        return min(known, default=-1)

    async def _cache_salt(self) -> str:
        """Return the engine's version at the first request: cached prefixes of other versions are not used.

        A rollout that starts while weights change waits, because it is unknown which version its prompt would be
        computed with. Later turns keep the salt, as their own earlier turns are under it. A rollout that had to
        move to another engine, or whose engine was started anew, shares nothing there: it may serve another version.
        """
        if self._first_version is None:
            engine = await self.sampler.pool.wait_open(self._session)
            # another first request of this rollout may have the salt of an older version
            self._salt = engine.version if len(self._running) < 2 or self._salt is None else self._salt
            self._salt_engine = (engine, engine.incarnation)
            return str(self._salt)
        if (self._session.engine, self._session.engine.incarnation) == self._salt_engine:
            return str(self._salt)
        return f"{self._salt}-{self.seed:x}"
