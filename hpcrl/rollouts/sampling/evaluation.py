"""Held-out evaluation during training: the same prompts each time, with their own sampling settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from hpcrl.config.environments import trained_on
from hpcrl.config.recipe import Recipe
from hpcrl.config.sampling import EvaluationSampling
from hpcrl.errors import EnvironmentFailedError, HpcrlError
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.environments import Environment, EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.data_order import heldout_shares
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.held_out import (
    DueVersions,
    HeldOutRollout,
    HeldOutSet,
    HeldOutTask,
    roll_out,
    told_failures,
)
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir

_log = logging.getLogger(__name__)
_Number = TypeVar("_Number", int, float)


class PastEvaluations(NamedTuple):
    """Evaluations by earlier attempts.

    Attributes
    ----------
    exact:
        Versions that sampled every token of their evaluation.
    due:
        Versions that were due and whose evaluation was made, at this version or at a later one where engines skipped
        it.
    """

    exact: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()


def held_out_sets(
    run: RunDir,
    recipe: Recipe,
    environments: Sequence[Environment],
    *,
    sampler_of: Callable[[EvaluationSampling], Sampler],
    up_to: int,
) -> list[HeldOutSet]:
    """Make the sets of a recipe.

    Parameters
    ----------
    sampler_of:
        Makes a sampler with these sampling settings.
    up_to:
        The step that the run continues after.
    """
    begun = evaluated_sets(run, up_to=up_to)
    return [
        HeldOutSet(
            config,
            recipe,
            environments,
            sampler=sampler_of(config.sampled(recipe.evaluation.sampling)),
            begun=begun.get(config.name, frozenset()),
        )
        for config in recipe.evaluation.sets
    ]


def evaluated_sets(run: RunDir, *, up_to: int) -> dict[str, frozenset[int]]:
    """Return the due versions up to ``up_to`` of which earlier attempts evaluated a set, by the name of the set."""
    found: dict[str, set[int]] = defaultdict(set)
    for event in read_events(run, kind="evaluation.set"):
        version, due, name = (event.data.get(key) for key in ("version", "due", "set"))
        if isinstance(version, int) and isinstance(due, int) and isinstance(name, str) and version <= up_to:
            found[name].add(due)
    return {name: frozenset(versions) for name, versions in found.items()}


def evaluated_versions(run: RunDir, *, up_to: int) -> PastEvaluations:
    """Return the evaluations of versions up to ``up_to`` by earlier attempts; later ones were abandoned."""
    every = (event.data for event in read_events(run, kind="evaluation"))
    data = [d for d in every if isinstance(d.get("version"), int) and d["version"] <= up_to]
    exact = frozenset(d["version"] for d in data if d["version"] == d.get("last_version"))
    # an inexact evaluation of the version that engines begin with is repeated
    due = frozenset(d.get("due", d["version"]) for d in data if d["version"] in exact or d["version"] < up_to)
    return PastEvaluations(exact, due)


class Evaluator:
    """Runs evaluations, one at a time, and reports each as an event ``evaluation``.

    Engines may skip a version that is due (see `DueVersions`): the event then says so (``due``).
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
        sets: Sequence[HeldOutSet] = (),
    ) -> None:
        """Choose the prompts; nothing is sent.

        Parameters
        ----------
        sampler:
            Sampler with ``evaluation.sampling``; by default with temperature 0.
        done:
            By earlier attempts.
        sets:
            Prompts that are evaluated by themselves.
        """
        trained = trained_on(recipe.environments)
        shares = heldout_shares([config.weight for config in trained], recipe.evaluation.prompts)
        by_name = {environment.name: environment for environment in environments}
        self._tasks = [
            HeldOutTask(environment, index)
            for environment, share in zip([by_name[config.name] for config in trained], shares, strict=True)
            for index in range(share)
        ]
        self._sampler, self._updater, self._events = sampler, updater, events
        self._sets = tuple(sets)
        self._due = DueVersions(recipe.evaluation.every_steps, done.due)
        self._failures = recipe.evaluation.failures
        self._exact = set(done.exact)
        self._one_worked = bool(done.due)
        self._one_at_a_time = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Return whether an evaluation is running."""
        return self._one_at_a_time.locked()

    def take(self, version: int) -> int | None:
        """Return the version whose evaluation is due now that engines serve ``version``, and mark it as begun.

        It is ``version``, or an older one that engines skipped; None where none is due.
        """
        return self._due.take(version)

    def take_sets(self, version: int, *, last: bool = False) -> list[tuple[HeldOutSet, int]]:
        """Return the sets that are due now that engines serve ``version``, each with the version that is due; from then
        on they count as begun.

        Parameters
        ----------
        last:
            It is the last version of the run: of this every set is evaluated.
        """
        found = ((each, each.take(version, last=last)) for each in self._sets)
        return [(each, due) for each, due in found if due is not None]

    async def evaluate(
        self, version: int, *, due: int | None, exactly: bool, sets: Sequence[tuple[HeldOutSet, int]] = ()
    ) -> None:
        """Evaluate the version that engines serve now.

        Parameters
        ----------
        version:
            Version that the engines serve.
        due:
            The version that was to be evaluated (`take`): this one, or one that engines skipped. None: only ``sets``
            are evaluated.
        exactly:
            Hold weight updates meanwhile. Otherwise a late token may come from a newer version, and the event's
            ``last_version`` says so.
        sets:
            Sets that are due (`take_sets`).

        Raises
        ------
        EnvironmentFailedError
            In the first evaluation of a run no held-out rollout was finished, and the first one that failed did so in
            an environment of the user's own.
        HpcrlError
            In the first evaluation of a run no held-out rollout was finished.
        """
        async with self._one_at_a_time:
            due = None if version in self._exact else due
            if due is None and not sets:
                return
            if due is not None and due != version:
                _log.warning("engines skipped version %d: it is evaluated at version %d", due, version)
            async with self._updater.held() if exactly else contextlib.nullcontext():
                if due is not None:
                    await self._evaluate(version, due)
                for each, of_set in sets:
                    await each.evaluate(version, due=of_set, events=self._events)

    async def _evaluate(self, version: int, due: int) -> None:
        started = time.monotonic()
        results = await asyncio.gather(*(roll_out(self._sampler, task) for task in self._tasks))
        finished = [
            (task, result.rollout)
            for task, result in zip(self._tasks, results, strict=True)
            if isinstance(result, HeldOutRollout)
        ]
        errors = [
            (task, error) for task, error in zip(self._tasks, results, strict=True) if isinstance(error, Exception)
        ]
        told = told_failures([(task.environment.name, error) for task, error in errors])
        if not finished and not self._one_worked:
            # a first evaluation without a finished rollout is a configuration error, which ends the run at once
            raise all_failed(version, errors)
        self._one_worked = True
        rewards = self._rewards(finished, errors)
        if not rewards:
            _log.warning("%s: it has no reward", all_failed(version, errors))
            self._events.emit(
                "evaluation.none_finished",
                version=version,
                due=due,
                failed=len(errors),
                **told,
            )
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
            **told,
            seconds=time.monotonic() - started,
        )

    def _rewards(
        self, finished: Sequence[tuple[HeldOutTask, Rollout]], errors: Sequence[tuple[HeldOutTask, Exception]]
    ) -> list[tuple[str, float]]:
        """Return the rewards that the mean is over, each with its environment, as ``evaluation.failures`` says."""
        rewards = [(task.environment.name, rollout.reward) for task, rollout in finished]
        if self._failures == "zero":
            rewards += [(task.environment.name, 0.0) for task, _ in errors]
        return rewards


def all_failed(version: int, errors: Sequence[tuple[HeldOutTask, Exception]]) -> HpcrlError:
    """Return the error of an evaluation in which no rollout finished: the environment's exception, if there is one."""
    what = f"none of the {len(errors)} rollouts that evaluate version {version} was finished"
    for _, error in errors:
        if isinstance(error, EnvironmentRaisedError | EnvironmentLostError):
            first, *more = str(error).splitlines()
            return EnvironmentFailedError("\n".join([f"{first} ({what})", *more]))
    _, first_error = errors[0]
    return HpcrlError(f"{what}; the first: {type(first_error).__name__}: {first_error}")


def _by_name(values: Iterator[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in values:
        found[name].append(value)
    return found


def _each(values: dict[str, list[float]], of: Callable[[list[float]], _Number]) -> dict[str, _Number]:
    return {name: of(each) for name, each in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
