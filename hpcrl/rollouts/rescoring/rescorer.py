"""Rewards of stored rollouts: the environment judges the stored replies again, or other checkers do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from hpcrl.config.environments import DatasetEnv, EnvironmentConfig, LatencyConfig, ReasoningGymEnv
from hpcrl.config.recipe import Recipe
from hpcrl.config.rewards import RewardConfig
from hpcrl.dock.ledger.replay import Held
from hpcrl.evaluation.audit import AuditedReply
from hpcrl.evaluation.rescored import RescoredRollout
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.environments import (
    Environment,
    EnvironmentLostError,
    EnvironmentRaisedError,
    Message,
    Outcome,
    Prompt,
    Reply,
    Split,
    build_environments,
    hosted,
    prompt_of,
)
from hpcrl.rollouts.environments.base import WithoutEndpoint
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome
from hpcrl.rollouts.environments.rewards.answers import AnswerCheck
from hpcrl.rollouts.environments.rewards.judge import Judge
from hpcrl.rollouts.environments.rewards.processes import CheckerError
from hpcrl.rollouts.rescoring.stored import StoredReplies, UnknownRewardError
from hpcrl.rollouts.sampling.held_out import HeldOutTask

_AT_ONCE = 16
"""Maximum number of rollouts that are judged at the same time."""
_PROMPTS = 1024
"""Maximum number of cached prompts: the members of a group share one."""
_PROCESSES = 4


class StoredPolicy(WithoutEndpoint):
    """Gives the stored replies of a rollout, whatever the environment says."""

    def __init__(self, replies: Sequence[Reply], *, seed: int) -> None:
        self.seed, self._replies, self._given = seed, replies, 0

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Return the next stored reply (`UnknownRewardError` where there is none)."""
        if self._given == len(self._replies):
            raise UnknownRewardError("its environment asks for more turns now than are stored")
        self._given += 1
        return self._replies[self._given - 1]


class Rescorer:
    """Computes rewards again.

    Attributes
    ----------
    kinds:
        Kinds of the parts of rewards, by environment, as far as they are known.
    """

    def __init__(
        self, recipe: Recipe, replies: StoredReplies, *, names: Sequence[str], rewards: Sequence[RewardConfig]
    ):
        """Make the environments.

        Parameters
        ----------
        names:
            Names of the required environments.
        rewards:
            Take the place of those of the recipe; empty: the environments judge as they are.

        Raises
        ------
        ConfigError
            An environment or a checker cannot be made.
        """
        self._seed, self._replies = recipe.seed, replies
        self._split: Split = "heldout" if recipe.job.payload == "evaluation" else "train"
        configs = [_changed(config, rewards) for config in recipe.environments if config.name in names]
        self._needs_answer = AnswerCheck(rewards).needed
        self._judge = Judge("given", rewards, processes=_PROCESSES) if rewards else None
        try:
            made = build_environments(recipe.model_copy(update={"environments": tuple(configs)})) if configs else ()
        except BaseException:
            self._close_judge()
            raise
        self._environments: dict[str, Environment] = {environment.name: environment for environment in made}
        # for these kinds the environment itself has the original rewards, and the answers
        self._own = {config.name for config in configs if isinstance(config, DatasetEnv) or not rewards}
        self.kinds = {config.name: _kinds(config, rewards) for config in configs}
        self._prompts: dict[tuple[str, int], asyncio.Task[Prompt]] = {}

    async def score(self, rollouts: Sequence[tuple[Held, str]]) -> list[tuple[RescoredRollout, AuditedReply | None]]:
        """Compute the rewards of rollouts, each with its state, in their order; the second is None without a reward."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def limited(held: Held, state: str) -> tuple[RescoredRollout, AuditedReply | None]:
            async with limit:
                return await self._score(held, state)

        return await asyncio.gather(*(limited(*each) for each in rollouts))

    async def _score(self, held: Held, state: str) -> tuple[RescoredRollout, AuditedReply | None]:
        entry = held.entry
        about: dict[str, Any] = {
            "group": entry.group,
            "member": entry.member,
            "environment": entry.environment,
            "prompt_index": entry.prompt_index,
            "state": state,
            "step": held.step,
            "before": entry.reward,
        }
        try:
            prompt, replies, outcome = await self._outcome(held)
        except UnknownRewardError as error:
            return RescoredRollout(**about, unknown=str(error)), None
        except (EnvironmentRaisedError, EnvironmentLostError, CheckerError, OutcomeError) as error:
            return RescoredRollout(**about, failed=str(error)), None
        scored = RescoredRollout(**about, after=outcome.reward, parts=dict(outcome.parts))
        return scored, AuditedReply(
            id=scored.id,
            prompt=xxhash.xxh3_64_hexdigest(msgspec.json.encode(prompt.messages)),
            reward=outcome.reward,
            parts=scored.parts,
            tokens=entry.sampled_tokens,
            finished=replies[-1].finished,
            text=replies[-1].text,
        )

    async def _outcome(self, held: Held) -> tuple[Prompt, tuple[Reply, ...], Outcome]:
        entry = held.entry
        environment = self._environments.get(entry.environment)
        if environment is None:
            raise UnknownRewardError(f"the recipe has no environment {entry.environment!r}")
        prompt = await self._prompt(environment, entry.prompt_index)
        replies = self._replies.read(held, prompt)
        if entry.environment in self._own:
            policy = StoredPolicy(replies, seed=self._rollout_seed(environment, held))
            return prompt, replies, checked_outcome(await environment.rollout(prompt, policy))
        assert self._judge is not None
        if self._needs_answer:
            raise UnknownRewardError(f"environment {entry.environment!r} has no answers that a checker could compare")
        row = {
            "environment": entry.environment,
            "prompt_index": entry.prompt_index,
            "messages": [dict(message) for message in prompt.messages],
        }
        return prompt, replies, checked_outcome(await self._judge.judge(replies[-1], "", row))

    def _rollout_seed(self, environment: Environment, held: Held) -> int:
        """Return the seed that the rollout had."""
        entry = held.entry
        if self._split == "heldout":
            return HeldOutTask(environment, entry.prompt_index, entry.member, self._seed).rollout_seed
        return stable_hash("rollout", self._seed, entry.group, entry.member)

    async def _prompt(self, environment: Environment, index: int) -> Prompt:
        key = (environment.name, index)
        if key not in self._prompts:
            if len(self._prompts) >= _PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = asyncio.create_task(self._made_prompt(environment, index))
        return await self._prompts[key]

    async def _made_prompt(self, environment: Environment, index: int) -> Prompt:
        return await prompt_of(environment, self._split, index)

    async def aclose(self) -> None:
        """End the processes of environments and checkers."""
        self._close_judge()
        for environment in hosted(list(self._environments.values())):
            await environment.aclose()

    def _close_judge(self) -> None:
        if self._judge is not None:
            self._judge.close()


def _changed(config: EnvironmentConfig, rewards: Sequence[RewardConfig]) -> EnvironmentConfig:
    """Return an environment that does not wait on purpose, with other rewards where it has a list of them."""
    update: dict[str, Any] = {"latency": LatencyConfig()}
    if rewards and isinstance(config, DatasetEnv):
        update["rewards"] = tuple(rewards)
    return config.model_copy(update=update)


def _kinds(config: EnvironmentConfig, rewards: Sequence[RewardConfig]) -> Mapping[str, str]:
    if not rewards and isinstance(config, DatasetEnv | ReasoningGymEnv):
        rewards = config.rewards
    kinds = {reward.name or reward.kind: reward.kind for reward in rewards}
    if isinstance(config, ReasoningGymEnv) and "score" not in kinds:
        return {"score": "reasoning_gym", **kinds}
    return kinds
