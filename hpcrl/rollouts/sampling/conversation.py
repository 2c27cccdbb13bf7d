"""One conversation with the policy: one token sequence, exact ids in and out.

A conversation only grows. What an environment says is rendered and appended; what the engine sampled is
appended as it came, with its log-probability and version. The sequence that is trained on is therefore the one
the engine saw, token by token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.config.sampling import SamplingConfig
from hpcrl.dock.routes import RoutedExperts
from hpcrl.rollouts.engines.client import EngineProtocolError, SamplingParams
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.rollouts.environments import Message, Outcome, Reply, Tool
from hpcrl.rollouts.records import Rollout, Turn
from hpcrl.rollouts.rendering import CUT_THINKING, Parsed, Renderer
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.rollouts.sampling.seeding import stable_hash
from hpcrl.rollouts.sampling.sequence import TokenSequence
from hpcrl.rollouts.sampling.stops import TurnStops
from hpcrl.rollouts.saved_turns import SavedTurn, TurnKeeper

__all__ = ["Conversation", "Sampler"]


class Sampler:
    """How conversations are held: with which engines, chat format and limits. Shared by many of them."""

    def __init__(
        self,
        pool: EnginePool,
        renderer: Renderer,
        *,
        temperature: float,
        sampling: SamplingConfig,
        max_model_len: int,
        stream_interval: int = 0,
        routes: RoutedExpertsSettings | None = None,
        rows: KnownRows | None = None,
    ) -> None:
        """Remember settings.

        Parameters
        ----------
        temperature:
            0 is greedy, for evaluations; that of ``sampling`` is not read.
        sampling:
            Everything else about how tokens are drawn.
        max_model_len:
            Longest sequence of an engine in tokens.
        stream_interval:
            Tokens of a part of an answer; 0: answers come whole.
        routes:
            How experts of tokens are kept; None: engines do not return them.
        rows:
            Experts of prompts that conversations share; None: each has its own alone.
        """
        self.rows = rows
        self.stream_interval = stream_interval or msgspec.UNSET
        self.pool, self.renderer, self.temperature, self.routes = pool, renderer, temperature, routes
        self.sampling, self.max_model_len = sampling, max_model_len
        self.stops = TurnStops(renderer, sampling)


class Conversation:
    """An `hpcrl.rollouts.environments.Policy`.

    Attributes
    ----------
    seed:
        Of this rollout; each turn samples with a seed of its own, derived from it.
    malformed_calls:
        Tool calls of the policy that cannot be run.
    turns_ended_otherwise:
        Turns before others that the policy has ended by another token than the chat template would have.
    """

    def __init__(
        self,
        sampler: Sampler,
        session: EngineSession,
        *,
        seed: int,
        opening: list[int] | None = None,
        tools: Sequence[Tool] = (),
        keeper: TurnKeeper | None = None,
    ) -> None:
        """Begin; nothing is sent.

        Parameters
        ----------
        session:
            Of the group.
        opening:
            Token ids of the prompt, where the caller has rendered it already.
        tools:
            What the policy may call.
        keeper:
            Has the turns of before an interruption, and is told of those that end. None: nothing is kept.
        """
        self.seed, self._keeper = seed, keeper
        self._sampler, self._session, self._opening = sampler, session, opening
        self._salt: int | None = None
        self._salt_engine: tuple[Engine, int] | None = None
        self._turns: list[Turn] = []
        self._tools, self._parsed, self._ended_by = tools, Parsed(""), -1
        self.malformed_calls = self.turns_ended_otherwise = 0
        self._cut = self._thought = False
        self._replied_s = time.monotonic()
        self._began = datetime.now()  # a chat template that tells the date tells one date all through
        self._tokens = TokenSequence()
        self._first_version: int | None = None
        self._routes = None if sampler.routes is None else RoutedExpertsRows(sampler.routes, sampler.rows)

    @property
    def first_version(self) -> int | None:
        """Version of the first sampled token; before its arrival, that of the engine when it was asked.

        None before the first request.
        """
        return self._salt if self._first_version is None else self._first_version

    @property
    def truncated(self) -> bool:
        """Whether the last reply was cut at a limit."""
        return self._cut

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Say the next turn (see `hpcrl.rollouts.environments.Policy`).

        Raises
        ------
        ValueError
            The last reply was cut; the environment must not go on. Or the chat template cuts earlier thinking.
        EngineError
            No engine answered.
        EngineProtocolError
            An answer cannot be used for training.
        """
        if self._cut:
            raise ValueError("a reply that was not finished cannot be followed by another")
        if self._keeper is not None:
            self._keeper.flush()
        said = np.asarray(self._render(messages), np.int32)
        self._tokens.append_said(said)
        room = self._sampler.max_model_len - len(self._tokens)
        if room <= 0:
            self._cut = True
            return Reply(text="", finished=False, tokens=0)
        turn = None if self._keeper is None else self._keeper.recall(len(self._turns), said)
        if turn is not None:
            self._salt = turn.salt
        else:
            turn = await self._sample(said, room)
        if self._routes is not None and turn.experts is not None:
            await self._keep_experts(self._routes, turn)
        if self._first_version is None:
            self._first_version = int(turn.versions[0])
        self._tokens.append_sampled(turn.token_ids, turn.logprobs, turn.versions)
        self._cut = turn.finish_reason != "stop"
        self._turns.append(turn.turn)
        parsed = await beside_loop(partial(self._parse, turn), turn.token_ids.nbytes + said.nbytes)
        self._parsed, self._ended_by = parsed, int(turn.token_ids[-1])
        self._thought |= bool(parsed.thinking)
        self.malformed_calls += sum(call.status != "ok" for call in parsed.calls)
        return Reply(
            text=parsed.text,
            finished=not self._cut,
            thinking=parsed.thinking,
            calls=parsed.calls,
            tokens=len(turn.token_ids),
        )

    async def _sample(self, said: NDArray[np.int32], room: int) -> SavedTurn:
        """Ask an engine for the next turn."""
        sampler = self._sampler
        params = SamplingParams(
            temperature=sampler.temperature,
            max_tokens=min(room, sampler.sampling.max_new_tokens),
            seed=self._turn_seed(),
            stop_token_ids=list(sampler.stops.token_ids),
            top_p=sampler.sampling.top_p,
            top_k=sampler.sampling.top_k,
            min_p=sampler.sampling.min_p,
            stop=list(sampler.stops.strings) or msgspec.UNSET,
            skip_special_tokens=False if sampler.stops.strings else msgspec.UNSET,
            stream_interval=sampler.stream_interval,
            routed_experts_prompt_start=msgspec.UNSET
            if self._routes is None
            else self._routes.start(len(self._tokens)),
        )
        asked_s = time.monotonic()
        answer = await sampler.pool.generate(
            self._session,
            self._tokens.encoded,
            params,
            cache_salt=self._cache_salt,
            rows=self._routes is None or self._routes.wants_rows,
        )
        answer = await beside_loop(partial(sampler.stops.cut, answer), answer.token_ids.nbytes)
        now = time.monotonic()
        times = round(asked_s - self._replied_s, 6), round(now - asked_s, 6)
        self._replied_s = now
        turn = SavedTurn(
            said=said,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            salt=-1 if self._salt is None else self._salt,
            turn=Turn(len(said), len(answer.token_ids), *times),
            experts=answer.experts,
        )
        if self._keeper is not None:
            self._keeper.ended(len(self._turns), turn)
        return turn

    def _turn_seed(self) -> int:
        """Return the seed of the next turn: of the rollout and the turn, and of the recipe's own where it has one."""
        own = self._sampler.sampling.seed
        return stable_hash("turn", self.seed, len(self._turns), *(() if own is None else (own,)))

    def _parse(self, turn: SavedTurn) -> Parsed:
        """Parse the turn that was appended last."""
        token_ids, stops = turn.token_ids.tolist(), self._sampler.stops
        parsed = self._sampler.renderer.parse(
            stops.spoken(token_ids), said=turn.said.tolist(), tools=self._tools, turn=len(self._turns) - 1
        )
        return stops.without_stop(parsed, token_ids[-1]) if turn.finish_reason == "stop" else parsed

    async def rollout(self, member: int, outcome: Outcome, *, seconds: float) -> Rollout | None:
        """The finished rollout; None where nothing was sampled."""
        if not self._turns:
            return None
        # what was said after the last sampled token has no part in training
        end = self._tokens.end_of_sampled()
        routed_experts = None if self._routes is None else await self._all_experts(self._routes, end)
        token_ids, sampled, logprobs, versions = self._tokens.arrays(end)
        return Rollout(
            member=member,
            token_ids=token_ids,
            sampled=sampled,
            logprobs=logprobs,
            # what was said to the policy is in its context, and that is cached under the salt's version; tokens that
            # were kept from a lost engine may be older than the salt on the next one
            versions=np.where(sampled, versions, self._oldest_context()).astype(np.int32),
            reward=float(outcome.reward),
            parts={name: float(value) for name, value in outcome.parts.items()},
            seconds=seconds,
            ended_s=time.time(),
            turns=self._turns,
            routed_experts=routed_experts,
        )

    async def _keep_experts(self, routes: RoutedExpertsRows, turn: SavedTurn) -> None:
        assert turn.experts is not None
        if not routes.wants_rows:
            return
        # later turns have prefixes that no other conversation has, and the salt of a mirrored one is of other weights;
        # versions of one engine do not decrease, and none is below the salt: others kept tokens of one that was lost,
        # whose weights may have chosen the experts of the prompt
        of_others = turn.versions.min() < max(turn.salt, turn.versions[0])
        own = self._turns or turn.salt < 0 or turn.mirrored or of_others
        opening = None if own else (turn.salt, turn.said)
        try:
            answered = await beside_loop(partial(routes.examined, turn.experts, opening), turn.experts.nbytes)
        except ValueError as error:
            raise EngineProtocolError(f"{self._session.engine.name}: experts of an answer: {error}") from error
        routes.take(len(self._tokens) + len(turn.token_ids) - 1, answered)

    async def _all_experts(self, routes: RoutedExpertsRows, end: int) -> RoutedExperts | None:
        assembled = await beside_loop(partial(routes.assembled, end), routes.nbytes)
        return None if assembled is None else routes.settled(assembled)

    def _oldest_context(self) -> int:
        known = [version for version in (self._salt, self._first_version) if version is not None]
        return min(known, default=-1)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        renderer = self._sampler.renderer
        if len(self._tokens):
            extension = renderer.extension(
                messages,
                ended_by=self._ended_by,
                calls=self._parsed.calls,
                tools=self._tools,
                thought=self._thought,
                now=self._began,
            )
            if extension is None:
                raise ValueError(CUT_THINKING)
            self.turns_ended_otherwise += extension.ended_otherwise
            return extension.token_ids
        if self._opening is not None:
            return self._opening
        return renderer.opening(messages, tools=self._tools, now=self._began)

    async def _cache_salt(self) -> str:
        """The engine's version when the first request is sent: cached prefixes of other versions are not used.

        A rollout that starts while weights change waits, because nobody could say which version its prompt would
        be computed with. Later turns keep the salt, as their own earlier turns are under it. A rollout that had to
        move to another engine, or whose engine was started anew, shares nothing there: it may serve another version.
        """
        if self._first_version is None:
            engine = await self._sampler.pool.wait_open(self._session)
            self._salt, self._salt_engine = engine.version, (engine, engine.incarnation)
            return str(self._salt)
        if (self._session.engine, self._session.engine.incarnation) == self._salt_engine:
            return str(self._salt)
        return f"{self._salt}-{self.seed:x}"
