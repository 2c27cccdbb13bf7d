"""One conversation with the policy: one token sequence, exact ids in and out.

A conversation only grows. What an environment says is rendered and appended; what the engine sampled is
appended as it came, with its log-probability and version. The sequence that is trained on is therefore the one
the engine saw, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcrl.config.recipe import SamplingConfig
from hpcrl.rollouts.engine_client import SamplingParams
from hpcrl.rollouts.engine_pool import Engine, EnginePool, EngineSession
from hpcrl.rollouts.environments import Message, Outcome, Reply
from hpcrl.rollouts.records import Rollout
from hpcrl.rollouts.seeding import stable_hash
from hpcrl.rollouts.transcript import Transcript

__all__ = ["Conversation", "Sampler"]


class Sampler:
    """How conversations are held: with which engines, template and limits. Shared by many of them."""

    def __init__(
        self,
        pool: EnginePool,
        transcript: Transcript,
        *,
        temperature: float,
        sampling: SamplingConfig,
        max_model_len: int,
    ) -> None:
        """Remember settings.

        Parameters
        ----------
        temperature:
            0 is greedy, for evaluations.
        max_model_len:
            Longest sequence of an engine in tokens.
        """
        self.pool, self.transcript, self.temperature = pool, transcript, temperature
        self.max_new_tokens, self.max_model_len = sampling.max_new_tokens, max_model_len


class Conversation:
    """An `hpcrl.rollouts.environments.Policy`.

    Attributes
    ----------
    seed:
        Of this rollout; each turn samples with a seed of its own, derived from it.
    """

    def __init__(
        self, sampler: Sampler, session: EngineSession, *, seed: int, opening: list[int] | None = None
    ) -> None:
        """Begin; nothing is sent.

        Parameters
        ----------
        session:
            Of the group.
        opening:
            Token ids of the prompt, where the caller has rendered it already.
        """
        self.seed = seed
        self._sampler, self._session, self._opening = sampler, session, opening
        self._salt: int | None = None
        self._salt_engine: Engine | None = None
        self._turns, self._cut = 0, False
        self._token_ids: list[int] = []
        self._sampled: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._first_version: int | None = None

    @property
    def first_version(self) -> int | None:
        """Version of the first sampled token; before its arrival, that of the engine when it was asked.

        None before the first request.
        """
        return self._salt if self._first_version is None else self._first_version

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Say the next turn (see `hpcrl.rollouts.environments.Policy`).

        Raises
        ------
        ValueError
            The last reply was cut; the environment must not go on.
        EngineError
            No engine answered.
        """
        if self._cut:
            raise ValueError("a reply that was not finished cannot be followed by another")
        self._append_said(self._render(messages))
        room = self._sampler.max_model_len - len(self._token_ids)
        if room <= 0:
            self._cut = True
            return Reply(text="", finished=False)
        params = SamplingParams(
            temperature=self._sampler.temperature,
            max_tokens=min(room, self._sampler.max_new_tokens),
            seed=stable_hash("turn", self.seed, self._turns),
            stop_token_ids=[self._sampler.transcript.eos_token_id],
        )
        generation = await self._sampler.pool.generate(
            self._session, self._token_ids, params, cache_salt=self._cache_salt
        )
        self._turns += 1
        if self._first_version is None:
            self._first_version = generation.versions[0]
        self._token_ids += generation.token_ids
        self._sampled += [1] * len(generation.token_ids)
        self._logprobs += generation.logprobs
        self._versions += generation.versions
        self._cut = generation.finish_reason != "stop"
        return Reply(text=self._sampler.transcript.text(generation.token_ids), finished=not self._cut)

    def rollout(self, member: int, outcome: Outcome, *, seconds: float) -> Rollout | None:
        """The finished rollout; None where nothing was sampled."""
        if self._turns == 0:
            return None
        # what was said after the last sampled token has no part in training
        end = len(self._sampled) - self._sampled[::-1].index(1)
        sampled = np.asarray(self._sampled[:end], dtype=np.uint8)
        return Rollout(
            member=member,
            token_ids=np.asarray(self._token_ids[:end], dtype=np.int32),
            sampled=sampled,
            logprobs=np.asarray(self._logprobs[:end], dtype=np.float32),
            # what was said to the policy is in its context, and that is cached under the salt's version
            versions=np.where(sampled, self._versions[:end], -1 if self._salt is None else self._salt).astype(np.int32),
            reward=float(outcome.reward),
            parts={name: float(value) for name, value in outcome.parts.items()},
            seconds=seconds,
        )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        if self._token_ids:
            return self._sampler.transcript.continuation(messages)
        if self._opening is not None:
            return self._opening
        return self._sampler.transcript.opening(messages)

    def _append_said(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._sampled += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [0] * len(token_ids)

    async def _cache_salt(self) -> str:
        """The engine's version when the first request is sent: cached prefixes of other versions are not used.

        A rollout that starts while weights change waits, because nobody could say which version its prompt would
        be computed with. Later turns keep the salt, as their own earlier turns are under it. A rollout that had to
        move to another engine shares nothing there: that engine may serve another version.
        """
        while self._first_version is None:
            engine = self._session.engine
            await engine.open_for_new.wait()
            if engine is self._session.engine:
                self._salt, self._salt_engine = engine.version, engine
                return str(self._salt)
        if self._session.engine is self._salt_engine:
            return str(self._salt)
        return f"{self._salt}-{self.seed:x}"
