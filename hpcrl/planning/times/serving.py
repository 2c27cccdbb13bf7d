"""Engines under load: rollouts a second by the number in flight."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpcrl.models.facts import ModelFacts
from hpcrl.planning.times.engine import DecodeModel, prefill_token
from hpcrl.planning.times.loop import ServedRate
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import EngineShape
from hpcrl.planning.times.terms import TimeTable
from hpcrl.planning.times.workload import RolloutPace, Workload

_BISECTIONS = 40
_FULL = 0.999
"""Share of its capacity at which a queue counts as full."""


class StepLine(NamedTuple):
    """Seconds of a step of one replica: ``base + per_sequence · sequences + per_kv_token · tokens of their contexts``,
    and ``prefill_per_token`` for each prompt token (of a replica that computes prompts)."""

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    prefill_per_token_s: float


@dataclass(frozen=True)
class ServingFleet:
    """The engines of a run.

    Attributes
    ----------
    decode:
        Engines that sample; where ``prefill`` is None, they compute prompts too, in the same steps.
    prefill:
        Engines that compute prompts, with their rates.
    slots:
        Sequences that a data-parallel rank can hold: ``max_num_seqs``, or fewer where the KV cache is smaller.
    """

    facts: ModelFacts
    workload: Workload
    decode: EngineShape
    decode_rates: Rates
    prefill: EngineShape | None = None
    prefill_rates: Rates | None = None
    slots: float | None = None

    __hash__ = object.__hash__

    @cached_property
    def _table(self) -> tuple[list[float], list[float], list[float]]:
        """Return the batch, seconds of a step, and tokens a second of a rank, in rising order of all three."""
        model = DecodeModel(self.facts, self.decode, self.decode_rates)
        most = max(1.0, self.slots or float(self.decode.max_num_seqs))
        batches = [1.0]
        while batches[-1] < most:
            batches.append(min(most, batches[-1] * 1.15 + 0.5))
        context = self.workload.mean("context")
        steps = [model.seconds(batch, context) for batch in batches]
        return batches, steps, [batch / step for batch, step in zip(batches, steps, strict=True)]

    @cached_property
    def prompt_tokens(self) -> float:
        """Return the tokens a rollout whose cache entries must be computed.

        These are the tokens of the prompt and of tools; the sampled tokens, where another engine decoded them; and the
        tokens of earlier turns that the prefix cache has evicted.
        """
        work = self.workload
        tokens, sampled, turns = work.mean("tokens"), work.mean("sampled"), work.mean("turns")
        lost = 1.0 - self.decode_rates.calibration.share("prefix_cache")
        again = lost * max(0.0, turns - 1.0) * tokens / 2
        return tokens - sampled + (sampled if self.prefill is not None else 0.0) + again

    @cached_property
    def prompt_token(self) -> TimeTable:
        """Return the seconds of one GPU for a prompt token."""
        shape, rates = (self.prefill, self.prefill_rates) if self.prefill is not None else (self.decode, None)
        return prefill_token(self.facts, shape, rates or self.decode_rates, context=self.workload.mean("tokens") / 2)

    @cached_property
    def _prompt_gpu_s(self) -> float:
        return self.prompt_token.known_seconds

    @cached_property
    def prompt_rate(self) -> float:
        """Return the prompt tokens a second of all engines that compute prompts."""
        shape = self.prefill or self.decode
        return shape.all_ranks / self._prompt_gpu_s

    @cached_property
    def most(self) -> tuple[float, str]:
        """Return the maximum rollouts a second with any number in flight, and its limit."""
        sampled = self.workload.mean("sampled")
        ranks = self.decode.replicas * self.decode.data_parallel
        decode = ranks * self._table[2][-1] / sampled
        prompts = self.prompt_rate / max(1.0, self.prompt_tokens)
        if self.prefill is None:
            # both run on the same GPUs: their shares of the time add up to 1
            return 1.0 / (1.0 / decode + 1.0 / prompts), "decode"
        return (prompts, "prefill") if prompts < decode else (decode, "slots")

    @cached_property
    def _pace_at(self) -> Callable[[float], tuple[float, float, float, float]]:
        """Return a function from a rate of rollouts a second to the state of engines.

        The state is the mean seconds of a rollout, the seconds of a sampled token and of another token, and the
        sequences that a rank decodes at once.

        Whatever does not depend on the rate is computed once: every bisection asks forty times.
        """
        work, shape, alone = self.workload, self.prefill or self.decode, self.prefill is not None
        tokens, sampled, waits_s = work.mean("tokens"), work.mean("sampled"), work.mean("waits")
        said, computed, prompt_rate = tokens - sampled, self.prompt_tokens, self.prompt_rate
        prompt_s, scale = self._prompt_gpu_s / shape.tensor_parallel, computed / max(1.0, said)
        ranks = self.decode.replicas * self.decode.data_parallel
        requests_s = work.mean("turns") * self._request_s
        batches, steps, rates = self._table

        def decoding(tokens_per_s: float) -> tuple[float, float]:
            """Return the batch and the step of a rank that samples a number of tokens a second."""
            index = bisect_left(rates, tokens_per_s)
            if index == 0:
                return max(tokens_per_s * steps[0], 1e-9), steps[0]
            if index == len(rates):
                return batches[-1], steps[-1]
            part = (tokens_per_s - rates[index - 1]) / (rates[index] - rates[index - 1])
            step = steps[index - 1] + part * (steps[index] - steps[index - 1])
            return batches[index - 1] + part * (batches[index] - batches[index - 1]), step

        def pace_at(rate: float) -> tuple[float, float, float, float]:
            busy = min(_FULL, rate * computed / prompt_rate)
            alive = 1.0 if alone else 1.0 - busy
            batch, step = decoding(rate * sampled / ranks / alive)
            token_s = step / alive
            # a request waits behind others: twice as long at half load
            prompt_token_s = prompt_s / (1.0 - busy) * scale
            return sampled * token_s + said * prompt_token_s + requests_s + waits_s, token_s, prompt_token_s, batch

        return pace_at

    @property
    def _request_s(self) -> float:
        return self.decode_rates.calibration.constant("request_overhead_s")

    def rate(self, in_flight: float) -> tuple[float, str]:
        """Return the rollouts a second with ``in_flight`` of them, and their limit: Little's law, by bisection."""
        most, why = self.most
        low, high, pace_at = 0.0, most * _FULL, self._pace_at
        if high * pace_at(high)[0] <= in_flight:
            return high, why
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if middle * pace_at(middle)[0] > in_flight:
                high = middle
            else:
                low = middle
        return low, "in flight"

    def step_line(self, batch: float) -> StepLine:
        """Return a decode replica's step time, linear around ``batch`` sequences a rank, for the simulator."""
        model = DecodeModel(self.facts, self.decode, self.decode_rates)
        context, ranks = self.workload.mean("context"), self.decode.data_parallel
        more = batch * 1.1 + 0.1
        here = model.seconds(batch, context)
        longer = (model.seconds(batch, 1.1 * context) - here) / (0.1 * context * batch)
        wider = (model.seconds(more, context) - here) / (more - batch) - longer * context
        base = here - batch * (wider + longer * context)
        return StepLine(base, wider / ranks, longer / ranks, self._prompt_gpu_s / (self.prefill or self.decode).ranks)

    def __call__(self, in_flight: float) -> ServedRate:
        """Return the durations, rate and batch with ``in_flight`` rollouts."""
        rate, limit = self.rate(in_flight)
        mean, token_s, prompt_token_s, batch = self._pace_at(rate)
        durations = self.workload.durations(RolloutPace(token_s, prompt_token_s, self._request_s))
        # more in flight than engines can serve: the others queue
        queue = max(0.0, in_flight / rate - mean)
        if queue > 0.01 * mean:
            durations = durations.mapped(lambda value: value + queue)
        return ServedRate(durations, rate, batch, token_s, limit)
