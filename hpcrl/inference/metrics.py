"""Counters, gauges and histograms in Prometheus' text format, under vLLM's names where the quantity is vLLM's.

Written by the model thread and by request handlers, read by ``/metrics``. Each number is changed by one thread,
so no lock is needed: a reader may see two numbers of different steps, as with any scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hpcrl.inference.kv_failures import PoolFailure

M = TypeVar("M", bound="_Metric")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class _Metric:
    kind = "untyped"

    def __init__(self, name: str, help_text: str, label: str | None) -> None:
        self.name, self.help_text, self.label = name, help_text, label

    def _labels(self, common: str, value: str | None) -> str:
        own = f'{self.label}="{_escape(value)}"' if self.label is not None and value is not None else ""
        return ",".join(part for part in (common, own) if part)

    @property
    def family(self) -> str:
        """Return the name to which help and type refer: that of the samples."""
        return self.name

    def samples(self, common: str) -> Iterator[str]:
        raise NotImplementedError


class Counter(_Metric):
    """A number that only grows; the exposed name ends in ``_total``."""

    kind = "counter"

    def __init__(self, name: str, help_text: str, label: str | None = None, values: Sequence[str] = ()) -> None:
        super().__init__(name, help_text, label)
        self._values: dict[str | None, float] = dict.fromkeys(values, 0.0) if label else {None: 0.0}

    @property
    def family(self) -> str:
        return f"{self.name}_total"

    def inc(self, amount: float = 1.0, value: str | None = None) -> None:
        self._values[value] = self._values.get(value, 0.0) + amount

    def set_total(self, total: float) -> None:
        """Take over a total that is counted elsewhere."""
        self._values[None] = total

    def samples(self, common: str) -> Iterator[str]:
        for value, number in list(self._values.items()):
            yield f"{self.family}{{{self._labels(common, value)}}} {number}"


class Gauge(_Metric):
    """A number that is asked for when it is read."""

    kind = "gauge"

    def __init__(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        super().__init__(name, help_text, None)
        self._read = read

    def samples(self, common: str) -> Iterator[str]:
        yield f"{self.name}{{{common}}} {float(self._read())}"


class Histogram(_Metric):
    """Counts of observations by bucket, as Prometheus has them."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], label: str | None = None) -> None:
        super().__init__(name, help_text, label)
        self._buckets = tuple(buckets)
        self._counts: dict[str | None, list[int]] = {}
        self._sums: dict[str | None, float] = {}
        if label is None:
            self.observe(0.0, count=0)

    def observe(self, number: float, *, value: str | None = None, count: int = 1) -> None:
        """Record ``count`` observations of ``number``."""
        counts = self._counts.setdefault(value, [0] * (len(self._buckets) + 1))
        counts[bisect_left(self._buckets, number)] += count
        self._sums[value] = self._sums.get(value, 0.0) + number * count

    def samples(self, common: str) -> Iterator[str]:
        for value, counts in list(self._counts.items()):
            labels, total = self._labels(common, value), 0
            for bound, count in zip((*self._buckets, None), counts, strict=True):
                total += count
                edge = "+Inf" if bound is None else f"{float(bound)}"
                yield f'{self.name}_bucket{{{labels}{"," if labels else ""}le="{edge}"}} {float(total)}'
            yield f"{self.name}_count{{{labels}}} {float(total)}"
            yield f"{self.name}_sum{{{labels}}} {self._sums[value]}"


class Registry:
    """All metrics of a server, with the labels they share."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._common = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        self._metrics: list[_Metric] = []

    def add(self, metric: M) -> M:
        self._metrics.append(metric)
        return metric

    def render(self) -> str:
        """Return the text of the answer to ``/metrics``."""
        lines: list[str] = []
        for metric in self._metrics:
            lines += [f"# HELP {metric.family} {metric.help_text}", f"# TYPE {metric.family} {metric.kind}"]
            lines += metric.samples(self._common)
        return "\n".join(lines) + "\n"


class EngineMetrics:
    """Metrics of the engine. Gauges and prefix-cache counts are added by the code that knows them."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self.registry = registry
        self.prompt_tokens = add(Counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token."))
        self.generation_tokens = add(Counter("vllm:generation_tokens", "Tokens sampled."))
        self.prefix_queries = add(Counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."))
        self.prefix_hits = add(Counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache."))
        self.external_queries = add(
            Counter("vllm:external_prefix_cache_queries", "Tokens whose KV was asked for elsewhere.")
        )
        self.external_hits = add(Counter("vllm:external_prefix_cache_hits", "Tokens whose KV came from elsewhere."))
        self.fetch_failures = add(
            Counter(
                "hpcrl_engine_kv_fetch_failures",
                "Prompts computed because their KV, announced by another engine, could not be fetched.",
                "source",
                ("prefill", "pool"),
            )
        )
        self.fetched_tokens = add(
            Counter(
                "hpcrl_engine_kv_fetched_tokens",
                "Tokens whose KV came from elsewhere, by where it came from.",
                "source",
                ("prefill", "pool"),
            )
        )
        self.pool_failures = add(
            Counter(
                "hpcrl_engine_kv_pool_failures",
                "Calls to the pool of KV that failed, by what was wrong.",
                "kind",
                [*PoolFailure],
            )
        )
        self.preemptions = add(Counter("vllm:num_preemptions", "Sequences put back into the queue for want of blocks."))
        self.request_success = add(
            Counter(
                "vllm:request_success", "Finished sequences by reason.", "finished_reason", ("stop", "length", "abort")
            )
        )
        self.iteration_tokens = add(Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS))
        self.request_prompt_tokens = add(Histogram("vllm:request_prompt_tokens", "Prompt tokens a sequence.", _TOKENS))
        self.request_generation_tokens = add(
            Histogram("vllm:request_generation_tokens", "Generated tokens a sequence.", _TOKENS)
        )
        self.first_token = add(
            Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        )
        self.inter_token = add(
            Histogram("vllm:inter_token_latency_seconds", "From one token of a sequence to its next.", _SHORT_SECONDS)
        )
        self.queue_time = add(Histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", _SECONDS))
        self.end_to_end = add(Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS))
        self.weight_operation = add(
            Histogram(
                "vllm:rl_weight_update_operation_duration_seconds",
                "Duration of a weight-transfer operation.",
                (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600),
                "operation",
            )
        )
        self.swap_pause = add(
            Histogram(
                "hpcrl_engine_weight_swap_pause_seconds",
                "Pause of the engine for a weight update.",
                _SHORT_SECONDS,
            )
        )
        self.routed_rows = add(
            Counter(
                "hpcrl_engine_routed_experts_rows",
                "Returned rows of routed experts, by source.",
                "source",
                ("computed", "prefix_cache", "fetched"),
            )
        )
        self.update_bytes = add(Counter("hpcrl_engine_weight_update_bytes", "Bytes of hand-offs read."))


def _escape(value: str | None) -> str:
    return (value or "").replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
