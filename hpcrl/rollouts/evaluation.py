"""Held-out evaluation during the run: the same prompts each time, greedy, beside training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError
from hpcrl.rollouts.conversation import Conversation, Sampler
from hpcrl.rollouts.data_order import heldout_shares
from hpcrl.rollouts.engine_client import EngineError
from hpcrl.rollouts.environments import Environment, prompt_of
from hpcrl.rollouts.records import Rollout
from hpcrl.rollouts.seeding import stable_hash
from hpcrl.rollouts.weight_updates import WeightUpdater
from hpcrl.runs.events import EventWriter, read_events
from hpcrl.runs.rundir import RunDir

__all__ = ["Evaluator", "evaluated_versions"]

_log = logging.getLogger(__name__)


def evaluated_versions(run: RunDir, *, up_to: int) -> set[int]:
    """Versions up to ``up_to`` that an earlier attempt evaluated exactly; later ones belong to an abandoned past."""
    data = [event.data for event in read_events(run) if event.kind == "evaluation"]
    return {d["version"] for d in data if d["version"] == d["last_version"] and d["version"] <= up_to}


@dataclass(frozen=True, slots=True)
class _Task:
    environment: Environment
    index: int


class Evaluator:
    """Runs evaluations, one at a time, and reports each as an event ``evaluation``."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        environments: Sequence[Environment],
        sampler: Sampler,
        updater: WeightUpdater,
        events: EventWriter,
        done: Iterable[int] = (),
    ) -> None:
        """Choose the prompts; nothing is sent.

        Parameters
        ----------
        sampler:
            With temperature 0.
        done:
            Versions that need no evaluation any more.
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
        self._done = set(done)
        self._one_at_a_time = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether an evaluation is going on."""
        return self._one_at_a_time.locked()

    def due(self, version: int) -> bool:
        """Whether the recipe wants ``version`` evaluated and it was not."""
        wanted = version == 0 or (self._every > 0 and version % self._every == 0)
        return wanted and version not in self._done

    async def evaluate(self, version: int, *, exactly: bool) -> None:
        """Evaluate the version that engines serve now.

        Parameters
        ----------
        version:
            What they serve.
        exactly:
            Hold weight updates meanwhile. Otherwise a late token may come from a newer version, and the event's
            ``last_version`` says so.

        Raises
        ------
        HpcrlError
            No held-out rollout was finished.
        """
        async with self._one_at_a_time:
            if version in self._done:
                return
            if not exactly:
                await self._evaluate(version)
                return
            async with self._updater.held():
                await self._evaluate(version)

    async def _evaluate(self, version: int) -> None:
        started = time.monotonic()
        results = await asyncio.gather(*(self._roll_out(task) for task in self._tasks))
        finished = [(task, rollout) for task, rollout in zip(self._tasks, results, strict=True) if rollout is not None]
        if not finished:
            raise HpcrlError(f"the evaluation of version {version} failed: none of {len(results)} rollouts finished")
        by_env: dict[str, list[float]] = defaultdict(list)
        parts: dict[str, list[float]] = defaultdict(list)
        for task, rollout in finished:
            name = task.environment.name
            by_env[name].append(rollout.reward)
            for part, value in rollout.parts.items():
                parts[f"{name}/{part}"].append(value)
        first = min(rollout.first_version for _, rollout in finished)
        last = max(rollout.last_version for _, rollout in finished)
        if first == last:
            self._done.add(first)
        self._events.emit(
            "evaluation",
            version=first,
            last_version=last,
            reward=_mean([rollout.reward for _, rollout in finished]),
            by_env={name: _mean(values) for name, values in by_env.items()},
            parts={name: _mean(values) for name, values in parts.items()},
            prompts=len(finished),
            failed=len(results) - len(finished),
            seconds=time.monotonic() - started,
        )

    async def _roll_out(self, task: _Task) -> Rollout | None:
        """One held-out rollout; None where it failed."""
        started = time.monotonic()
        session = self._sampler.pool.session(f"heldout-{task.environment.name}-{task.index}")
        conversation = Conversation(
            self._sampler, session, seed=stable_hash("heldout", task.environment.name, task.index)
        )
        try:
            prompt = await prompt_of(task.environment, "heldout", task.index)
            outcome = await task.environment.rollout(prompt, conversation)
        except EngineError as error:
            _log.warning("a held-out rollout failed: %s", error)
            return None
        except HpcrlError:
            raise
        except Exception:  # noqa: BLE001 - foreign code
            _log.exception("a held-out rollout of %r failed", task.environment.name)
            return None
        finally:
            session.leave()
        return conversation.rollout(0, outcome, seconds=time.monotonic() - started)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
