"""Reports of requests: outputs on the way, at their end and after an error, and the metrics of finished requests."""

from __future__ import annotations

import time

import numpy as np

from hpcrl.inference.embedded.engine.request import EngineRequest, Output
from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.runner import ModelRunner, StepResult
from hpcrl.inference.embedded.engine.scheduler import Scheduler
from hpcrl.inference.metrics import EngineMetrics

Delivery = list[tuple[EngineRequest, Output]]
"""Outputs that are delivered together, in the order in which they were made."""


class OutputCollector:
    """Collects outputs of requests and ends requests. Used on the model thread only."""

    def __init__(self, scheduler: Scheduler, rows: Rows, runner: ModelRunner, metrics: EngineMetrics) -> None:
        self._scheduler, self._rows, self._runner, self._metrics = scheduler, rows, runner, metrics
        self._pending: Delivery = []
        self._last_step_s = 0.0

    def take(self) -> Delivery:
        """Return the outputs that were collected since the last call."""
        delivery, self._pending = self._pending, []
        return delivery

    def collect(self, result: StepResult) -> None:
        """Collect outputs of sequences that stream or ended in a step, and times of first and later tokens."""
        rows, metrics, now = self._rows, self._metrics, time.monotonic()
        first = rows.num_tokens[result.rows] == rows.num_prompt[result.rows] + 1
        for row in result.rows[first].tolist():
            request = rows.request(row)
            metrics.first_token.observe(now - request.arrived_s)
            metrics.prompt_tokens.inc(request.num_prompt)
            metrics.request_prompt_tokens.observe(request.num_prompt)
        later = len(result.rows) - int(first.sum())
        if later:
            metrics.inter_token.observe(now - self._last_step_s, count=later)
        self._last_step_s = now
        ended = {i for i, _, _ in result.finished}
        interval = rows.stream_interval[result.rows]
        earlier = rows.num_tokens[result.rows] - rows.num_prompt[result.rows] - 1
        for i in np.flatnonzero((interval > 0) & (earlier % np.maximum(interval, 1) == 0)).tolist():
            if i not in ended:
                request = rows.request(int(result.rows[i]))
                output = self._output(request)
                if request.experts_in_parts:
                    output.routed_experts = self._runner.experts_of(request)
                self._pending.append((request, output))
        for i, finish_reason, stop_reason in result.finished:
            self._finish(rows.request(int(result.rows[i])), finish_reason, stop_reason)

    def _finish(self, request: EngineRequest, finish_reason: str, stop_reason: int | None) -> None:
        experts = self._runner.experts_of(request)
        self._scheduler.remove(request)
        output = self._output(request)
        output.finish_reason, output.stop_reason, output.routed_experts = finish_reason, stop_reason, experts
        num_output = len(request.tokens) - request.num_prompt
        output.weight_versions = request.version_spans(num_output)
        if request.params.prompt_logprobs is not None:
            output.prompt_logprobs = request.prompt_logprobs
        request.ended = True
        self._pending.append((request, output))
        self._metrics.request_success.inc(value=finish_reason)
        self._metrics.request_generation_tokens.observe(num_output)
        self._metrics.end_to_end.observe(time.monotonic() - request.arrived_s)

    def _output(self, request: EngineRequest) -> Output:
        """Return the part of a request that was not reported yet."""
        row, p, start = request.row, request.num_prompt, request.num_reported
        if row is None:
            tokens, logprobs, ranks = request.tokens[p + start :], request.logprobs[start:], request.ranks[start:]
        else:
            n = int(self._rows.num_tokens[row])
            span = slice(p + start, n)
            tokens, logprobs = self._rows.tokens[row, span], self._rows.logprobs[row, span]
            ranks = self._rows.ranks[row, span]
        request.num_reported = start + len(tokens)
        wanted = request.params.logprobs is not None
        return Output(
            token_ids=tokens.tolist(),
            logprobs=logprobs.tolist() if wanted else [],
            ranks=ranks.tolist() if wanted else [],
            top=request.top[start:],
            num_cached_tokens=request.num_cached_tokens,
        )

    def abort(self, requests: list[EngineRequest]) -> None:
        """End requests with ``finish_reason`` ``abort``; ended ones, and those that did not arrive yet, are ignored."""
        for request in requests:
            # the scheduler holds neither ended requests nor those whose submission follows this command in the inbox
            if not request.ended and request.sequence_number:
                self._finish(request, "abort", None)

    def fail(self, request: EngineRequest, error: Exception) -> None:
        """End a request with an error; it may not have reached the engine."""
        if request.row is not None or request in self._scheduler.waiting:
            self._scheduler.remove(request)
        request.ended = True
        output = Output([], [], [], [], finish_reason="error", error=f"{type(error).__name__}: {error}")
        self._pending.append((request, output))
        self._metrics.request_success.inc(value="error")
