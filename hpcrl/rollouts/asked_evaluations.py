"""Evaluations that people ask a run for while it trains, on its own engines and at the version that these serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hpcrl.config.evaluation import EvaluationSetConfig
from hpcrl.config.recipe import Recipe
from hpcrl.config.sampling import EvaluationSampling
from hpcrl.rollouts.batches.server import ConflictError
from hpcrl.rollouts.environments import Environment
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.held_out import HeldOutSet
from hpcrl.runs.events import EventWriter

_log = logging.getLogger(__name__)
_SHARE = 8
"""Divisor of ``rollouts.max_in_flight`` that gives the maximum number of an evaluation's rollouts in flight."""


class AskedEvaluations:
    """One evaluation at a time. Its result is an event ``evaluation.asked``, and is kept for who asked."""

    def __init__(
        self,
        recipe: Recipe,
        environments: Sequence[Environment],
        *,
        sampler_of: Callable[[EvaluationSampling], Sampler],
        events: EventWriter,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Prepare; nothing is sent.

        Parameters
        ----------
        environments:
            Environments of the recipe, in its order.
        sampler_of:
            Makes a sampler with these sampling settings.
        spawn:
            Starts a task that ends with the orchestrator.
        """
        self._recipe, self._environments = recipe, environments
        self._sampler_of, self._events, self._spawn = sampler_of, events, spawn
        self._key = ""
        self._task: asyncio.Task[None] | None = None
        self._found: dict[str, Any] | Exception | None = None

    async def result(
        self, key: str, config: EvaluationSetConfig, *, seed: int, version: int, wait_s: float
    ) -> dict[str, Any] | None:
        """Return the result of the evaluation ``key``, which the first call begins; None before it is there.

        Parameters
        ----------
        config:
            Prompts and samples.
        seed:
            Seed of samples and intervals.
        version:
            Version that the engines serve now.
        wait_s:
            Maximum time in seconds to wait for the result.

        Raises
        ------
        ConflictError
            Another evaluation that was asked for is running, or this one failed.
        ValueError
            ``config`` names an environment that the recipe does not have.
        """
        if key != self._key:
            if self._task is not None and not self._task.done():
                raise ConflictError("another evaluation that was asked for is running; ask again when it has ended")
            unknown = {*(config.environments or ())} - {each.name for each in self._environments}
            if unknown:
                raise ValueError(f"the run has no environment {min(unknown)!r}")
            self._key, self._found = key, None
            self._task = self._spawn(self._evaluate(config, seed, version))
        assert self._task is not None
        await asyncio.wait([self._task], timeout=wait_s)
        if isinstance(self._found, Exception):
            raise ConflictError(f"the evaluation failed: {self._found}")
        return self._found

    async def _evaluate(self, config: EvaluationSetConfig, seed: int, version: int) -> None:
        try:
            held_out = HeldOutSet(
                config,
                self._recipe,
                self._environments,
                sampler=self._sampler_of(config.sampled(self._recipe.evaluation.sampling)),
                seed=seed,
                at_once=max(1, self._recipe.rollouts.max_in_flight // _SHARE),
            )
            found = await held_out.result(version, due=version)
        except Exception as error:  # noqa: BLE001 - whatever a person asks for does not end the run
            _log.warning("an evaluation that was asked for failed", exc_info=error)
            self._found = error
            return
        self._events.emit("evaluation.asked", **found)
        self._found = found
