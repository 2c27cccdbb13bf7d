"""Evaluates the start model of a run. A sample that is done is in the ledger, and no later attempt makes it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from hpcrl.errors import ConfigError, EnvironmentFailedError
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.environments import build_environments, hosted
from hpcrl.rollouts.environments.workers.worker_events import workers_of
from hpcrl.rollouts.evaluating.engines import START_VERSION, label_engines, pool_of
from hpcrl.rollouts.evaluating.ledger import SampleLedger
from hpcrl.rollouts.gateway import Gateway
from hpcrl.rollouts.parts import gateway_host
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.sampling.conversation import Sampler
from hpcrl.rollouts.sampling.evaluation import all_failed
from hpcrl.rollouts.sampling.held_out import (
    HeldOutRollout,
    HeldOutSet,
    HeldOutTask,
    drawn,
    roll_out_all,
    scored,
    summaries,
    told_failures,
)
from hpcrl.runs.evaluation_result import result_path
from hpcrl.runs.record import RunRecord
from hpcrl.runs.refusals import report_of
from hpcrl.runs.role import RoleContext
from hpcrl.storage.files import write_json

_log = logging.getLogger(__name__)

_BEAT_S = 2.0
_KEEPALIVE_S = 4.0
"""Keep-alive time in seconds, shorter than that of a server (uvicorn's is 5 s)."""


class EvaluationRun:
    """Attempt of an evaluation."""

    def __init__(self, context: RoleContext) -> None:
        """Read the recipe, whose only set of held-out prompts is evaluated, and make its environments.

        Raises
        ------
        EnvironmentFailedError
            An environment cannot be made.
        """
        self._context, self._recipe = context, context.run.recipe()
        (self._config,) = self._recipe.evaluation.sets
        try:
            self._events = context.events()
            self._workers = workers_of(context, self._recipe, self._events)
            self._environments = build_environments(self._recipe, workers=self._workers)
        except ConfigError as error:
            lines = "\n".join(f"{f.key}: {f.what}\n    hint: {f.hint}" for f in error.findings)
            raise EnvironmentFailedError(lines) from error
        self._done = 0

    async def run(self) -> None:
        """Evaluate, and write the result.

        Raises
        ------
        BaseExceptionGroup
            With the error of the part that failed.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._events.close)
            for environment in hosted(self._environments):
                stack.push_async_callback(environment.aclose)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            headers, timeout = self._context.credentials.headers, aiohttp.ClientTimeout(total=None)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
            http = await stack.enter_async_context(session)
            if self._workers is not None:
                stack.push_async_callback(self._workers.aclose)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._context.ready()
            beside = [tasks.create_task(self._beat())]
            endpoints = self._context.endpoints()
            if self._workers is not None:
                beside += self._workers.start(endpoints.fixed("env"), http, spawn=tasks.create_task)
            pool = pool_of(self._context, self._recipe, http, self._events)
            wait_s = self._recipe.orchestrator.wait_timeout_s
            await pool.wait_healthy(timeout_s=wait_s)
            beside += [tasks.create_task(pool.watch()), tasks.create_task(label_engines(pool, timeout_s=wait_s))]
            chat, path = self._recipe.model.chat, Path(self._recipe.model.path)
            renderer = Renderer.of_model(
                path, chat_format=chat.format, variables=chat.variables, thinking=chat.thinking
            )
            held_out = self._config.sampled(self._recipe.evaluation.sampling)
            sampling = held_out.beside(self._recipe.rollouts.sampling)
            gateway = Gateway(
                Counters(),
                report=report_of(self._context, "gateway"),
                host=gateway_host(self._recipe, endpoints),
            )
            stack.push_async_callback(gateway.aclose)
            sampler = Sampler(
                pool,
                renderer,
                temperature=sampling.temperature,
                sampling=sampling,
                max_model_len=self._recipe.engine.max_model_len,
                stream_interval=0 if self._recipe.engine.prefill else self._recipe.rollouts.stream_interval,
                max_branches=self._recipe.rollouts.max_branches,
                gateway=gateway,
            )
            await self._evaluate(sampler)
            for task in beside:
                task.cancel()

    async def _beat(self) -> None:
        """Report to the supervisor that the event loop runs, and how many samples are done."""
        reporter = self._context.progress()
        while True:
            reporter.beat("running", rollouts=self._done)
            await asyncio.sleep(_BEAT_S)

    async def _evaluate(self, sampler: Sampler) -> None:
        began, run = time.monotonic(), self._context.run
        chosen = HeldOutSet(self._config, self._recipe, self._environments, sampler=sampler).tasks
        tasks = [replace(task, seed=self._recipe.seed) for task in chosen]
        # a delayed earlier attempt must not write into the ledger
        await asyncio.to_thread(RolloutFiles.claim, run.rollouts_dir, self._context.attempt)
        limit_s = self._recipe.handoff.retry_s
        ledger = await asyncio.to_thread(
            lambda: SampleLedger(run.rollouts_dir, tasks, attempt=self._context.attempt, limit_s=limit_s)
        )
        try:
            results = await self._samples(sampler, tasks, ledger)
        finally:
            await asyncio.to_thread(ledger.close)
        errors = [(task, result) for task, result in zip(tasks, results, strict=True) if isinstance(result, Exception)]
        if len(errors) == len(tasks):
            raise all_failed(START_VERSION, errors)
        samples = [scored(task, result) for task, result in zip(tasks, results, strict=True)]
        found: dict[str, Any] = {
            "set": self._config.name,
            "version": START_VERSION,
            "last_version": START_VERSION,
            "due": START_VERSION,
            "samples_per_prompt": self._config.samples,
            **drawn(sampler),
            **summaries(samples, self._config, self._recipe.evaluation.failures, self._recipe.seed),
            **told_failures([(task.environment.name, error) for task, error in errors]),
            "seconds": time.monotonic() - began,
        }
        about = {"format_version": 1, "run": run.name, "recipe": self._recipe.name, "model": self._recipe.model.path}
        if (origin := RunRecord.read(run).origin) is not None:
            about["weights"] = str(origin)
        await asyncio.to_thread(write_json, result_path(run), {**about, **found})
        self._events.emit("evaluation.set", **found)

    async def _samples(
        self, sampler: Sampler, tasks: list[HeldOutTask], ledger: SampleLedger
    ) -> list[HeldOutRollout | Exception]:
        ends = sampler.renderer.stop_token_ids
        done = await asyncio.to_thread(lambda: ledger.done(tasks, stop_token_ids=ends))
        self._done = len(done)
        if done:
            _log.info("%d of %d samples were made by earlier attempts", len(done), len(tasks))
        left = [position for position in range(len(tasks)) if position not in done]

        async def keep(task: HeldOutTask, result: HeldOutRollout | Exception) -> None:
            await ledger.finished(task, result)
            self._done += 1

        made = await roll_out_all(
            sampler, [tasks[position] for position in left], at_once=self._recipe.rollouts.max_in_flight, each=keep
        )
        found: dict[int, HeldOutRollout | Exception] = {**done, **dict(zip(left, made, strict=True))}
        return [found[position] for position in range(len(tasks))]
