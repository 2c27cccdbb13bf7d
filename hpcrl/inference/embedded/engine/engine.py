"""The model thread: takes requests, runs steps, hands outputs over once a step.

Everything that changes scheduler, cache or model happens on this thread. Other threads leave a command in the
inbox, which is emptied between steps; that is also where weights change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from hpcrl.inference.embedded.engine.attention import KVCache
from hpcrl.inference.embedded.engine.blocks import BlockPool
from hpcrl.inference.embedded.engine.cached_blocks import CachedBlocks
from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.failed_steps import FailedSteps
from hpcrl.inference.embedded.engine.outputs import Delivery, OutputCollector
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.runner import ModelRunner
from hpcrl.inference.embedded.engine.sampler import TokenSampler
from hpcrl.inference.embedded.engine.scheduler import Scheduler
from hpcrl.inference.metrics import EngineMetrics, Gauge
from hpcrl.modeling.decoder import Decoder
from hpcrl.processes.uncancellable_future import promise

_log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_MODES = ("abort", "wait", "keep")


class Engine:
    """Continuous batching over one model. `start` begins the thread, `stop` ends it.

    Attributes
    ----------
    cached:
        The prefix cache, for the model thread alone (`call`).
    """

    def __init__(self, model: Decoder, config: EngineSettings, metrics: EngineMetrics) -> None:
        """Allocate the KV cache; nothing runs yet."""
        arch, dtype = model.arch, model.embed_tokens.weight.dtype
        self.config, self.arch, self._metrics = config, arch, metrics
        self._rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size)
        # blocks hold no states of recurrent layers, so that for these a prefix must be computed again
        caching = config.enable_prefix_caching and arch.state is None
        self._pool = BlockPool(config.num_blocks, caching=caching)
        cache = KVCache(arch, config.num_blocks, config.block_size, dtype)
        self.cached = CachedBlocks(self._pool, cache)
        noise = np.random.default_rng(config.seed)
        self._scheduler = Scheduler(
            self._rows,
            self._pool,
            load_blocks=self.cached.load,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=arch.vocab_size,
            draw_seed=lambda: int(noise.integers(0, 2**63 - 1)),
        )
        self._runner = ModelRunner(
            model,
            cache,
            self._rows,
            TokenSampler(arch.vocab_size, config.logprobs_mode),
            routed_rows=metrics.routed_rows if config.return_routed_experts else None,
        )
        self._outputs = OutputCollector(self._scheduler, self._rows, self._runner, metrics)
        self._failed_steps = FailedSteps(self._scheduler, self._rows, self._outputs)
        self.weight_version = config.weight_version
        self.failure: BaseException | None = None
        self._paused: str | None = None
        self._draining: list[tuple[Future[None], bool]] = []
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._deliver: Callable[[Delivery], None] = lambda _: None
        self._share: Callable[[list[tuple[bytes, bytes]]], None] | None = None
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        self._add_gauges(metrics)

    def _add_gauges(self, metrics: EngineMetrics) -> None:
        add, scheduler = metrics.registry.add, self._scheduler
        add(Gauge("vllm:num_requests_running", "Sequences in the batch.", lambda: len(scheduler.running)))
        add(Gauge("vllm:num_requests_waiting", "Sequences in the queue.", lambda: len(scheduler.waiting)))
        add(Gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", lambda: self._pool.usage))

    # -- any thread -------------------------------------------------------------------------------------------

    def start(
        self,
        deliver: Callable[[Delivery], None],
        share: Callable[[list[tuple[bytes, bytes]]], None] | None = None,
    ) -> None:
        """Begin.

        Parameters
        ----------
        deliver:
            Called on the model thread after each step with the outputs of all requests; must not block.
        share:
            The same, with name and content of the blocks that the step has filled: those that have a salt, of which
            other engines know for which weights they are.
        """
        self._deliver, self._share = deliver, share
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step it is in; requests still inside are dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the model thread between two steps, even if its caller stops waiting."""
        future: Future[T] = promise()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the error belongs to the caller, who may have stopped waiting
                _log.exception("a command failed")
                future.set_exception(error)

        self._post(command)
        return future

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""

        def command() -> None:
            try:
                self._scheduler.add(request)
            except Exception as error:  # noqa: BLE001 - it is the fate of this request alone
                self._outputs.fail(request, error)

        self._post(command)

    def abort(self, requests: Iterable[EngineRequest]) -> Future[None]:
        """End requests now; each gets a last output with ``finish_reason`` ``abort``. Ended ones are ignored."""
        doomed = list(requests)
        return self.call(lambda: self._outputs.abort(doomed))

    def pause(self, mode: str, *, clear_cache: bool) -> Future[None]:
        """Stop running new requests; the future is done when the pause is complete.

        Parameters
        ----------
        mode:
            ``abort`` ends all requests, ``wait`` lets those that have started finish, ``keep`` freezes them.
        clear_cache:
            Also forget the prefix cache. As in vLLM this takes the KV of frozen requests too: they are computed
            again after the pause, with the weights of then. To keep KV across new weights, say no.
        """
        assert mode in PAUSE_MODES
        future: Future[None] = promise()

        def command() -> None:
            try:
                begin()
            except Exception as error:  # noqa: BLE001 - as in `call`
                _log.exception("a pause failed")
                future.set_exception(error)

        def begin() -> None:
            self._paused = mode
            if mode == "abort":
                self._outputs.abort(list(self._scheduler.requests()))
            if mode == "keep":
                if clear_cache:
                    self._scheduler.preempt_all()
                    self._pool.reset()
                future.set_result(None)
            else:
                self._draining.append((future, clear_cache))

        self._post(command)
        return future

    def resume(self) -> Future[None]:
        """Run requests again."""

        def command() -> None:
            self._paused = None
            for future, _ in self._draining:
                future.set_result(None)
            self._draining.clear()

        return self.call(command)

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> Future[bool]:
        """Forget cached prefixes; return False if blocks are in use. Running requests may be preempted for it."""

        def command() -> bool:
            if reset_running_requests:
                self._scheduler.preempt_all()
            return self._pool.reset()

        return self.call(command)

    def exchange_weights(self, model: Decoder, version: str) -> Future[Decoder]:
        """Serve another copy of the model from the next step on; KV of requests in flight stays.

        Parameters
        ----------
        model:
            The copy.
        version:
            Its label. It changes in the same step as the weights.

        Returns
        -------
        Future
            The copy that was served before.
        """

        def command() -> Decoder:
            began = time.perf_counter()
            old, self._runner.model = self._runner.model, model
            self._label(version)
            self._metrics.swap_pause.observe(time.perf_counter() - began)
            return old

        return self.call(command)

    def label_weights(self, version: str, has: Callable[[], str | None]) -> Future[bool]:
        """Label weights that came into the served model itself, between two steps.

        Parameters
        ----------
        version:
            The label.
        has:
            Sets the label between two steps, if the weights are those of ``version``; otherwise nothing is changed.

        Returns
        -------
        Future
            Whether the label is ``version`` now.
        """

        def command() -> bool:
            if has() != version:
                return False
            if self.weight_version != version:
                self._label(version)
            return True

        return self.call(command)

    def _label(self, version: str) -> None:
        self.weight_version = version
        for request in self._scheduler.requests():
            if request.version_starts:
                request.note_version(version, self._rows.known_tokens(request) - request.num_prompt)

    def vacate(self, function: Callable[[ModelRunner], T]) -> Future[T]:
        """Freeze requests, forget all KV, and do something with what runs the model: nothing else uses it then.

        Requests are computed again when they are resumed, with the weights of then.
        """

        def command() -> T:
            self._paused = "keep"
            self._scheduler.preempt_all()
            self._pool.reset()
            return function(self._runner)

        return self.call(command)

    def inspect_model(self, function: Callable[[Decoder], T]) -> Future[T]:
        """Inspect the served model between two steps."""
        return self.call(lambda: function(self._runner.model))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # -- model thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    while not (self._inbox or self._stopping or self._has_work()):
                        self._wake.wait()
                    inbox, self._inbox = self._inbox, []
                for command in inbox:
                    command()
                if self._has_work():
                    self._step_or_fail()
                self._finish_pauses()
                if delivery := self._outputs.take():
                    self._deliver(delivery)
        except Exception as error:  # noqa: BLE001 - whatever it was, waiting callers must hear of it
            _log.exception("the model thread failed")
            self.failure = error
            self._deliver(self._outputs.take())

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        if self._paused == "keep":
            return False
        if self._paused is None:
            return scheduler.has_requests
        return bool(scheduler.running) or scheduler.has_preempted

    def _step_or_fail(self) -> None:
        """Make a step. Where it fails, only the request fails because of which it does.

        Raises
        ------
        Exception
            Of the step: too many fail for any one request to be the reason.
        """
        alone = self._failed_steps.alone
        try:
            self._step(alone)
        except Exception as error:
            # a request's numbers may make anything fail
            _log.exception("a step failed")
            if not self._failed_steps.isolate(error):
                raise
        else:
            self._failed_steps.step_worked(alone)

    def _step(self, alone: EngineRequest | None) -> None:
        scheduler, metrics = self._scheduler, self._metrics
        step = scheduler.schedule(only_preempted=self._paused is not None, alone=alone)
        refused, scheduler.refused = scheduler.refused, []
        for request, error in refused:
            self._outputs.fail(request, error)
        if step is None:
            return
        now = time.monotonic()
        for request in step.admitted:
            if request.started_s is None:
                request.started_s = now
                metrics.queue_time.observe(now - request.arrived_s)
                request.note_version(self.weight_version, 0)
        inputs, logits, selected = self._runner.run(step)
        scheduler.advance(step)
        filled, scheduler.filled = scheduler.filled, []
        result = self._runner.sample(step, inputs, logits, selected)
        if self._share is not None and filled and not result.broken:
            self._share([(key, self.cached.content(block)) for block, key in filled])
        if len(result.rows):
            self._failed_steps.token_sampled()
        self._outputs.collect(result)
        if result.broken:
            self._failed_steps.end_broken([self._rows.request(row) for row in result.broken])
        metrics.iteration_tokens.observe(int(step.counts.sum()))
        metrics.generation_tokens.inc(len(result.rows))
        for counter, total in (
            (metrics.prefix_queries, scheduler.prefix_queries),
            (metrics.prefix_hits, scheduler.prefix_hits),
            (metrics.preemptions, scheduler.num_preemptions),
        ):
            counter.set_total(total)

    def _finish_pauses(self) -> None:
        """Complete pauses whose requests have drained."""
        if self._draining and not self._has_work():
            for future, clear_cache in self._draining:
                if clear_cache:
                    self._pool.reset()
                future.set_result(None)
            self._draining.clear()
