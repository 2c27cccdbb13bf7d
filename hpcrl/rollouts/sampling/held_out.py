"""Held-out rollouts: one of a prompt, and all of a set with what they come to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.evaluation import EvaluationSetConfig
from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError
from hpcrl.evaluation.summary import FailurePolicy, SampleSummary, ScoredSample, summarise, summarise_by_environment
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import Environment, EnvironmentLostError, EnvironmentRaisedError, prompt_of
from hpcrl.rollouts.environments.data_order import heldout_shares
from hpcrl.rollouts.environments.outcomes import checked_outcome
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.failures import NoRoomError, describe_failure
from hpcrl.runs.events import EventWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOutTask:
    """Sample of a held-out prompt; ``seed`` other than 0 gives other draws."""

    environment: Environment
    index: int
    sample: int = 0
    seed: int = 0

    @property
    def rollout_seed(self) -> int:
        """Return the seed of the rollout, a function of environment, prompt, sample and ``seed`` for every version."""
        # the first sample keeps the seed from when there was only one sample
        more = (self.sample, self.seed) if self.seed else (self.sample,) if self.sample else ()
        return stable_hash("heldout", self.environment.name, self.index, *more)


class HeldOutRollout(NamedTuple):
    """Held-out rollout that finished; ``truncated``: its last reply was cut at a limit."""

    rollout: Rollout
    truncated: bool


async def roll_out(sampler: Sampler, task: HeldOutTask) -> HeldOutRollout | Exception:
    """Roll out one sample, or return why it failed.

    Raises
    ------
    HpcrlError
        The error is not a failure of a rollout.
    """
    started = time.monotonic()
    environment, index, sample = task.environment, task.index, task.sample
    more = (sample,) if sample else ()
    session = sampler.pool.session("-".join(map(str, ("heldout", environment.name, index, *more))))
    try:
        prompt = await prompt_of(environment, "heldout", index)
        conversation = Conversation(sampler, session, seed=task.rollout_seed, tools=prompt.tools)
        outcome = checked_outcome(await environment.rollout(prompt, conversation))
    except EngineError as error:
        _log.warning("a held-out rollout failed: %s", error)
        return error
    except HpcrlError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code
        told = isinstance(error, EnvironmentRaisedError | EnvironmentLostError)
        name, trace = environment.name, None if told else error
        _log.warning("a held-out rollout of %r failed: %s", name, error, exc_info=trace)
        return error
    finally:
        session.leave()
    rollout = await conversation.rollout(sample, outcome, seconds=time.monotonic() - started)
    return NoRoomError() if rollout is None else HeldOutRollout(rollout, conversation.truncated)


def told_failures(errors: Sequence[tuple[str, Exception]]) -> dict[str, Any]:
    """Return the fields of an event about failed rollouts: numbers by environment and cause, and the first failure."""
    by_env: dict[str, int] = defaultdict(int)
    by_cause: dict[str, int] = defaultdict(int)
    first: dict[str, str] = {}
    for name, error in errors:
        cause, found = describe_failure(error)
        by_env[name] += 1
        by_cause[cause.value] += 1
        first = first or {"environment": name, "what": found.what, "where": found.where}
    return {"failed_by_env": dict(by_env), "failed_by_cause": dict(by_cause), "first_failure": first or None}


class DueVersions:
    """Versions that are to be evaluated: the first, and then one per interval.

    Engines may skip a version that is due: they load the newest, and are busy while others appear. Its evaluation is
    then made at the next version that they serve.
    """

    def __init__(self, every: int, begun: frozenset[int]) -> None:
        """Initialise; versions ``begun`` are evaluated already. 0 for ``every``: only the first version is due."""
        self._every, self._begun = every, set(begun)

    def take(self, version: int) -> int | None:
        """Return the version that is due now that engines serve ``version``, and mark it as begun; None without one."""
        if version == 0:
            due = 0
        elif self._every > 0:
            due = version - version % self._every
        else:
            return None
        # the first version is served before there are others
        if due in self._begun or (due == 0 and version > 0):
            return None
        self._begun.add(due)
        return due


class HeldOutSet:
    """Set of held-out prompts with samples of each; its evaluations are events ``evaluation.set``."""

    def __init__(
        self,
        config: EvaluationSetConfig,
        recipe: Recipe,
        environments: Sequence[Environment],
        *,
        sampler: Sampler,
        begun: frozenset[int] = frozenset(),
        seed: int = 0,
        at_once: int | None = None,
    ) -> None:
        """Choose the prompts; nothing is sent.

        Parameters
        ----------
        environments:
            Those of the recipe, in its order.
        sampler:
            That draws as the set says.
        begun:
            Versions that were evaluated by earlier attempts.
        seed:
            Seed of the draws (see `HeldOutTask`), and of intervals where it is not 0, in place of the recipe's.
        at_once:
            Maximum number of rollouts at a time; None: ``rollouts.max_in_flight``.
        """
        chosen = [
            (environment, each.weight)
            for environment, each in zip(environments, recipe.environments, strict=True)
            if (each.weight > 0 if config.environments is None else each.name in config.environments)
        ]
        shares = heldout_shares([weight for _, weight in chosen], config.prompts)
        self.name, self.config = config.name, config
        self.tasks = [
            HeldOutTask(environment, index, sample, seed)
            for (environment, _), share in zip(chosen, shares, strict=True)
            for index in range(share)
            for sample in range(config.samples)
        ]
        evaluation = recipe.evaluation
        self._sampler, self._failures, self._seed = sampler, evaluation.failures, seed or recipe.seed
        self._at_once = recipe.rollouts.max_in_flight if at_once is None else at_once
        every = evaluation.every_steps if config.every_steps is None else config.every_steps
        self._due, self._last = DueVersions(every, begun), max(begun, default=-1)
        self._exact: set[int] = set()

    def take(self, version: int, *, last: bool = False) -> int | None:
        """Return the version that is due (see `DueVersions.take`); of the last version of a run an evaluation is."""
        due = self._due.take(version)
        if due is None and last and version > self._last:
            due = version
        self._last = self._last if due is None else max(self._last, due)
        return due

    async def evaluate(self, version: int, *, due: int, events: EventWriter) -> None:
        """Evaluate the set, and report it as an event; parameters as for `result`.

        Nothing is done where all tokens of an earlier evaluation are of this version: it was made in place of one that
        engines skipped.
        """
        if version in self._exact:
            return
        events.emit("evaluation.set", **await self.result(version, due=due))

    async def result(self, version: int, *, due: int) -> dict[str, Any]:
        """Roll out all samples with the version that engines serve, and return the fields of an event about them.

        Parameters
        ----------
        version:
            Version that the engines serve.
        due:
            The version that was to be evaluated.
        """
        started = time.monotonic()
        results = await roll_out_all(self._sampler, self.tasks, at_once=self._at_once)
        finished = [result.rollout for result in results if isinstance(result, HeldOutRollout)]
        errors = [
            (task.environment.name, result)
            for task, result in zip(self.tasks, results, strict=True)
            if isinstance(result, Exception)
        ]
        samples = [scored(task, result) for task, result in zip(self.tasks, results, strict=True)]
        first = min((rollout.first_version for rollout in finished), default=version)
        last = max((rollout.last_version for rollout in finished), default=version)
        if finished and first == last:
            self._exact.add(first)
        return {
            "set": self.name,
            "version": first,
            "last_version": last,
            "due": due,
            "samples_per_prompt": self.config.samples,
            **drawn(self._sampler),
            **summaries(samples, self.config, self._failures, self._seed),
            **told_failures(errors),
            "seconds": time.monotonic() - started,
        }


async def roll_out_all(
    sampler: Sampler,
    tasks: Sequence[HeldOutTask],
    *,
    at_once: int,
    each: Callable[[HeldOutTask, HeldOutRollout | Exception], Awaitable[None]] | None = None,
) -> list[HeldOutRollout | Exception]:
    """Roll out tasks, at most ``at_once`` at a time; return results in order and call ``each`` with each."""
    limit = asyncio.Semaphore(at_once)

    async def one(task: HeldOutTask) -> HeldOutRollout | Exception:
        async with limit:
            result = await roll_out(sampler, task)
            if each is not None:
                await each(task, result)
        return result

    return await asyncio.gather(*map(one, tasks))


def scored(task: HeldOutTask, result: HeldOutRollout | Exception) -> ScoredSample:
    """Return the values of a result that statistics need."""
    name = task.environment.name
    if isinstance(result, Exception):
        return ScoredSample(environment=name, prompt=task.index, reward=None)
    return ScoredSample(environment=name, prompt=task.index, reward=result.rollout.reward, truncated=result.truncated)


def drawn(sampler: Sampler) -> dict[str, Any]:
    """Return the fields of an event about the sampling."""
    return {"temperature": sampler.temperature, "sampling": sampler.sampling.model_dump(mode="json")}


def summaries(
    samples: Sequence[ScoredSample], config: EvaluationSetConfig, failures: FailurePolicy, seed: int
) -> dict[str, Any]:
    """Return the summary of samples as plain data, with ``by_env``: that of each environment."""

    def plain(summary: SampleSummary) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
        return found

    about: dict[str, Any] = {"k": config.samples, "pass_reward": config.pass_reward, "failures": failures, "seed": seed}
    each = summarise_by_environment(samples, **about)
    return plain(summarise(samples, **about)) | {"by_env": {name: plain(found) for name, found in each.items()}}
