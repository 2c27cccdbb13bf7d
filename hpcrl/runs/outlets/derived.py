"""Numbers of a step that its record does not have, for sinks: ratios, percentiles, GPU-hours, engines at that time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from hpcrl.config.plan import Plan, Role
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.held_hours import HeldHours, recorded_hours

_SHARES = {"p50": 0.5, "p90": 0.9}
_NEW_S = 15.0
"""Maximum age in seconds of a step whose engines are those that are seen now."""
_ENGINE_NUMBERS = ("kv_usage", "running", "waiting", "prefix_hit_rate", "preemptions", "tokens_per_s")
"""Fields of `hpcrl.runs.fleet.EngineView`."""


class _Length(msgspec.Struct, frozen=True, gc=False):
    sampled_tokens: int


class DerivedMetrics:
    """Computes them for the steps of a run, in order.

    Parameters
    ----------
    attempt:
        The attempt that runs, or the last one.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._consumed = ConsumedRollouts(run.rollouts_dir)
        self._hours: HeldHours | None = None
        self._hours_of = 0
        self._trainer_gpus = trainer_gpus(run.plan())
        self._peak_flops = peak_flops(run)

    def of(self, record: StepRecord) -> dict[str, float]:
        """Return the numbers of a step by name, without those that are unknown."""
        return {
            **step_ratios(record, self._trainer_gpus),
            **model_flops_utilization(record, self._trainer_gpus, self._peak_flops),
            **orchestrator_numbers(record),
            **staleness_percentiles(record),
            **mean_lengths(record),
            **self._lengths(record.step),
            **self._gpu_hours(record),
            **self._engines(record),
        }

    def _lengths(self, step: int) -> dict[str, float]:
        try:
            lines = self._consumed.of(step)
        except OSError:  # they are only read by people
            return {}
        found = sorted(each.sampled_tokens for line in lines if (each := decode_lenient(line, _Length)) is not None)
        if not found:
            return {}
        quantiles = {f"sampled_length_{name}": float(nearest_quantile(found, share)) for name, share in _SHARES.items()}
        return {**quantiles, "sampled_length_max": float(found[-1])}

    def _gpu_hours(self, record: StepRecord) -> dict[str, float]:
        if self._hours is None or record.attempt != self._hours_of:
            hours, self._hours_of = recorded_hours(self._run), record.attempt
            # the newest attempt may continue
            spans = (*hours.spans[:-1], (hours.spans[-1][0], math.inf)) if hours.spans else ()
            self._hours = hours._replace(spans=spans)
        found = self._hours.gpu_hours(self._hours.until(record.time_s))
        return {} if found is None else {"gpu_hours": found}

    def _engines(self, record: StepRecord) -> dict[str, float]:
        if record.attempt != self._attempt or time.time() - record.time_s > _NEW_S:
            return {}
        view = FleetView.read(self._run, self._attempt)
        return {} if view is None else dict(fleet_numbers(view))


def trainer_gpus(plan: Plan) -> int:
    """Return the GPUs of the trainer: one for each of its ranks where their nodes have GPUs, else 0."""
    ranks = 0
    for group in plan.groups:
        if group.role is Role.TRAINER and plan.layout.components and plan.component(group).gpus_per_node:
            ranks += group.replicas * group.ranks
    return ranks


def peak_flops(run: RunDir) -> float | None:
    """Return the peak operations a second of a GPU of the trainer, in the dtype of its model and without sparsity.

    None where the profile does not have it, and for adapters, whose backward pass has other operations than
    `hpcrl.runs.metrics.StepRecord.model_flops`. Products in FP8 count as those of the dtype.
    """
    trainer, node = run.recipe().trainer, run.cluster().node_of(Role.TRAINER)
    if node is None or trainer.lora is not None:
        return None
    peak = node.gpu.tflops.get(trainer.dtype)
    return None if peak is None else peak * 1e12


def model_flops_utilization(record: StepRecord, gpus: int, peak: float | None) -> dict[str, float]:
    """Return ``mfu``: the operations of the batch over those that ``gpus`` could have done in the step.

    The step includes its waits. Operations are those of the model: what is computed again, by memory tools or for a
    reference model, does not count (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Parameters
    ----------
    peak:
        Operations a second of a GPU; None: unknown, as the result is then.
    """
    seconds = math.fsum(record.phases_s.values())
    if record.model_flops is None or peak is None or not gpus or seconds <= 0.0:
        return {}
    return {"mfu": record.model_flops / (seconds * gpus * peak)}


def orchestrator_numbers(record: StepRecord) -> dict[str, float]:
    """Return rollouts that were too old, and the tokens whose experts are not replayed, as a share."""
    found = {}
    counts = [record.rollouts.get(name) for name in ("dropped_stale", "cancelled_stale")]
    if known := [count for count in counts if count is not None]:
        found["stale_rollouts"] = math.fsum(known)
    if record.replayed_share is not None:
        found["routing_fallback_share"] = 1.0 - record.replayed_share
    return found


def step_ratios(record: StepRecord, trainer_gpus: int) -> dict[str, float]:
    """Return the seconds of a step, its throughput by GPU, and the mismatch KL as a share of the entropy.

    Parameters
    ----------
    trainer_gpus:
        GPUs of the trainer; 0 where it has none.
    """
    found = {"step_s": math.fsum(record.phases_s.values())}
    if trainer_gpus:
        found["tokens_per_s_per_gpu"] = record.tokens_per_s / trainer_gpus
    if record.entropy > 0.0:
        found["kl_ent_ratio"] = record.mismatch_kl / record.entropy
    return {name: value for name, value in found.items() if math.isfinite(value)}


def staleness_percentiles(record: StepRecord) -> dict[str, float]:
    """Return percentiles of the staleness of the rollouts of a step."""
    lags = sorted((int(lag), count) for lag, count in record.staleness_histogram.items() if lag.lstrip("-").isdigit())
    values = [lag for lag, count in lags for _ in range(count)]
    if not values:
        return {}
    return {f"staleness_{name}": float(nearest_quantile(values, share)) for name, share in _SHARES.items()}


def mean_lengths(record: StepRecord) -> dict[str, float]:
    """Return the mean tokens of a rollout; none for a record of an earlier version, which has no count."""
    if not record.reward_count:
        return {}
    return {
        "length_mean": record.tokens / record.reward_count,
        "sampled_length_mean": record.sampled_tokens / record.reward_count,
    }


def fleet_numbers(view: FleetView) -> Iterator[tuple[str, float]]:
    """Yield mean, minimum and maximum over engines of what is known of them, as ``fleet/NUMBER/mean``."""
    for name in _ENGINE_NUMBERS:
        yield from _spread(name, [getattr(engine, name) for engine in view.engines])
    if view.newest is not None:
        yield from _spread("versions_behind", [_behind(engine, view.newest) for engine in view.engines])
    if view.engines:
        yield "fleet_engines", float(len(view.engines))
        yield "fleet_silent", float(sum(not engine.answers or engine.stuck for engine in view.engines))


def _behind(engine: EngineView, newest: int) -> int | None:
    return None if engine.version < 0 else max(0, newest - engine.version)


def _spread(name: str, values: Sequence[float | None]) -> Iterator[tuple[str, float]]:
    known = [float(value) for value in values if value is not None]
    if known:
        numbers: Mapping[str, float] = {"mean": math.fsum(known) / len(known), "min": min(known), "max": max(known)}
        yield from ((f"fleet/{name}/{what}", value) for what, value in numbers.items())


def nearest_quantile(values: Sequence[int], share: float) -> int:
    """Return the value at a share (0 to 1) of sorted values: the nearest one, not one between two."""
    return values[round(share * (len(values) - 1))]
