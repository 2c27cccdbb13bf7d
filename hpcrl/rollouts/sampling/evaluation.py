"""Held-out evaluation during the run: the same prompts each time, with a sampling of its own, beside training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hpcrl.config.recipe import Recipe
from hpcrl.errors import EnvironmentFailedError, HpcrlError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import Environment, EnvironmentLostError, EnvironmentRaisedError, prompt_of
from hpcrl.rollouts.environments.outcomes import checked_outcome
from hpcrl.rollouts.records import Rollout
from hpcrl.rollouts.sampling.conversation import Conversation, Sampler
from hpcrl.rollouts.sampling.data_order import heldout_shares
from hpcrl.rollouts.sampling.failures import NoRoomError, describe_failure
from hpcrl.rollouts.sampling.seeding import stable_hash
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir

__all__ = ["Evaluator", "PastEvaluations", "evaluated_versions"]

_log = logging.getLogger(__name__)
_Number = TypeVar("_Number", int, float)


class PastEvaluations(NamedTuple):
    """What earlier attempts evaluated.

    Attributes
    ----------
    exact:
        Versions of which every token was.
    due:
        Versions that were due, and whose evaluation was made: at this version, or at a later one where engines
        skipped it.
    """

    exact: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()


def evaluated_versions(run: RunDir, *, up_to: int) -> PastEvaluations:
    """Evaluations of versions up to ``up_to`` by earlier attempts; later ones belong to an abandoned past."""
    every = (event.data for event in read_events(run, kind="evaluation"))
    data = [d for d in every if isinstance(d.get("version"), int) and d["version"] <= up_to]
    exact = frozenset(d["version"] for d in data if d["version"] == d.get("last_version"))
    # of the version that engines begin with an inexact one is made again
    due = frozenset(d.get("due", d["version"]) for d in data if d["version"] in exact or d["version"] < up_to)
    return PastEvaluations(exact, due)


@dataclass(frozen=True, slots=True)
class _Task:
    environment: Environment
    index: int


class Evaluator:
    """Runs evaluations, one at a time, and reports each as an event ``evaluation``.

    Engines may skip a version that is due: they load the newest, and are busy while others appear. It is then
    evaluated at the next version that they serve, and the event says so (``due``).
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        environments: Sequence[Environment],
        sampler: Sampler,
        updater: WeightUpdater,
        events: EventWriter,
        done: PastEvaluations,
    ) -> None:
        """Choose the prompts; nothing is sent.

        Parameters
        ----------
        sampler:
            As ``evaluation.sampling`` says; by default with temperature 0.
        done:
            By earlier attempts.
        """
        shares = heldout_shares([config.weight for config in recipe.environments], recipe.evaluation.prompts)
        self._tasks = [
            _Task(environment, index)
            for environment, share in zip(environments, shares, strict=True)
            for index in range(share)
        ]
        self._every, self._sampler, self._updater, self._events = (
            recipe.evaluation.every_steps,
            sampler,
            updater,
            events,
        )
        self._failures = recipe.evaluation.failures
        self._exact, self._begun = set(done.exact), set(done.due)
        self._one_worked = bool(done.due)
        self._one_at_a_time = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether an evaluation is going on."""
        return self._one_at_a_time.locked()

    def take(self, version: int) -> int | None:
        """The version whose evaluation is due now that engines serve ``version``; from then on it counts as begun.

        It is ``version``, or an older one that engines skipped; None where the recipe wants none.
        """
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

    async def evaluate(self, version: int, *, due: int, exactly: bool) -> None:
        """Evaluate the version that engines serve now.

        Parameters
        ----------
        version:
            What they serve.
        due:
            The version that was to be evaluated (`take`): this one, or one that engines skipped.
        exactly:
            Hold weight updates meanwhile. Otherwise a late token may come from a newer version, and the event's
            ``last_version`` says so.

        Raises
        ------
        EnvironmentFailedError
            In the first evaluation of a run no held-out rollout was finished, and the first one that failed did so in
            an environment of the user's own.
        HpcrlError
            In the first evaluation of a run no held-out rollout was finished.
        """
        async with self._one_at_a_time:
            if version in self._exact:
                return
            if due != version:
                _log.warning("engines skipped version %d: it is evaluated at version %d", due, version)
            if not exactly:
                await self._evaluate(version, due)
                return
            async with self._updater.held():
                await self._evaluate(version, due)

    async def _evaluate(self, version: int, due: int) -> None:
        started = time.monotonic()
        results = await asyncio.gather(*(self._roll_out(task) for task in self._tasks))
        finished = [
            (task, rollout) for task, rollout in zip(self._tasks, results, strict=True) if isinstance(rollout, Rollout)
        ]
        errors = [
            (task, error) for task, error in zip(self._tasks, results, strict=True) if isinstance(error, Exception)
        ]
        if not finished and not self._one_worked:
            # what never worked is a mistake that people want to hear of before the queue has cost them a night
            raise _all_failed(version, errors)
        self._one_worked = True
        rewards = self._rewards(finished, errors)
        if not rewards:
            _log.warning("%s: it has no reward", _all_failed(version, errors))
            self._events.emit("evaluation.none_finished", version=version, due=due, failed=len(errors), **_told(errors))
            return
        by_env = _by_name(iter(rewards))
        parts = _by_name(
            (f"{task.environment.name}/{part}", value)
            for task, rollout in finished
            for part, value in rollout.parts.items()
        )
        first = min((rollout.first_version for _, rollout in finished), default=version)
        last = max((rollout.last_version for _, rollout in finished), default=version)
        if finished and first == last:
            self._exact.add(first)
        self._events.emit(
            "evaluation",
            version=first,
            last_version=last,
            due=due,
            reward=_mean([reward for _, reward in rewards]),
            by_env=_each(by_env, _mean),
            parts=_each(parts, _mean),
            prompts=len(finished),
            failed=len(errors),
            counted=len(rewards),
            counted_by_env=_each(by_env, len),
            counted_by_part=_each(parts, len),
            failures=self._failures,
            **_told(errors),
            seconds=time.monotonic() - started,
        )

    def _rewards(
        self, finished: Sequence[tuple[_Task, Rollout]], errors: Sequence[tuple[_Task, Exception]]
    ) -> list[tuple[str, float]]:
        """Return the rewards that the mean is over, each with its environment, as ``evaluation.failures`` says."""
        rewards = [(task.environment.name, rollout.reward) for task, rollout in finished]
        if self._failures == "zero":
            rewards += [(task.environment.name, 0.0) for task, _ in errors]
        return rewards

    async def _roll_out(self, task: _Task) -> Rollout | Exception:
        """One held-out rollout, or why it failed."""
        started = time.monotonic()
        session = self._sampler.pool.session(f"heldout-{task.environment.name}-{task.index}")
        seed = stable_hash("heldout", task.environment.name, task.index)
        try:
            prompt = await prompt_of(task.environment, "heldout", task.index)
            conversation = Conversation(self._sampler, session, seed=seed, tools=prompt.tools)
            outcome = checked_outcome(await task.environment.rollout(prompt, conversation))
        except EngineError as error:
            _log.warning("a held-out rollout failed: %s", error)
            return error
        except HpcrlError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code
            told = isinstance(error, EnvironmentRaisedError | EnvironmentLostError)
            name, trace = task.environment.name, None if told else error
            _log.warning("a held-out rollout of %r failed: %s", name, error, exc_info=trace)
            return error
        finally:
            session.leave()
        rollout = await conversation.rollout(0, outcome, seconds=time.monotonic() - started)
        return rollout or NoRoomError()


def _all_failed(version: int, errors: Sequence[tuple[_Task, Exception]]) -> HpcrlError:
    """What an evaluation in which nothing was finished fails with: the environment's own exception, where it is one."""
    what = f"none of the {len(errors)} rollouts that evaluate version {version} was finished"
    for _, error in errors:
        if isinstance(error, EnvironmentRaisedError | EnvironmentLostError):
            first, *more = str(error).splitlines()
            return EnvironmentFailedError("\n".join([f"{first} ({what})", *more]))
    _, first_error = errors[0]
    return HpcrlError(f"{what}; the first: {type(first_error).__name__}: {first_error}")


def _told(errors: Sequence[tuple[_Task, Exception]]) -> dict[str, object]:
    """Return what an event says of held-out rollouts that failed: how many by environment and cause, and the first."""
    by_env: dict[str, int] = defaultdict(int)
    by_cause: dict[str, int] = defaultdict(int)
    first: dict[str, str] = {}
    for task, error in errors:
        cause, found = describe_failure(error)
        by_env[task.environment.name] += 1
        by_cause[cause.value] += 1
        first = first or {"environment": task.environment.name, "what": found.what, "where": found.where}
    return {"failed_by_env": dict(by_env), "failed_by_cause": dict(by_cause), "first_failure": first or None}


def _by_name(values: Iterator[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in values:
        found[name].append(value)
    return found


def _each(values: dict[str, list[float]], of: Callable[[list[float]], _Number]) -> dict[str, _Number]:
    return {name: of(each) for name, each in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
