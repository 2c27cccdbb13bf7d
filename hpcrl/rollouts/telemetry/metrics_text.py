"""Prometheus text of the orchestrator's ``/metrics``, by the rules of ``promtool check metrics``.

Names are those of `hpcrl.rollouts.core.counters` and of the gauges in ``metrics.jsonl``, with the units that
Prometheus wants (seconds) and the suffix of counters. ``prometheus_client`` would take nine times as long
in the event loop (docs/observing.md). Alert rules and dashboard use these names (`hpcrl.runs.monitoring`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.runs.fleet import WorkerView

_COUNTERS = {
    "started": "Rollouts that began.",
    "finished": "Rollouts that ended with a reward.",
    "consumed": "Rollouts that were handed to the trainer.",
    "mixed_versions": "Finished rollouts with tokens of two or more policy versions.",
    "dropped_engine": "Rollouts that were given up after the last retry of a request.",
    "dropped_environment": "Rollouts whose environment or teacher failed, or whose prompt left no room for an answer.",
    "sandboxes_evicted": "Rollouts whose sandbox was ended for the memory limit of all sandboxes of its node.",
    "dropped_branches": "Rollouts that would have had too many sequences.",
    "branched": "Finished rollouts with more than one sequence.",
    "declared_branches": "How often environments let conversations begin anew, as behind a summary.",
    "judge_tampered": "Finished rollouts that interfered with their judge.",
    "malformed_calls": "Tool calls of finished rollouts that could not be run.",
    "turns_ended_otherwise": "Turns of finished rollouts that ended by another token than the chat template's.",
    "refused_parts": "Parts of rewards that were left out because they are not finite numbers.",
    "dropped_group": "Finished rollouts of groups of which too few members finished.",
    "dropped_stale": "Finished rollouts that were too old to be used.",
    "dropped_zero_variance": "Finished rollouts of groups whose rewards were all equal, where these are dropped.",
    "cancelled_stale": "Rollouts that were aborted because they could not have been used any more.",
    "zero_variance_groups": "Groups whose rewards were all equal.",
    "engine_requests": "Generation requests that were sent.",
    "engine_retries": "Generation requests that repeat a failed one.",
    "unusable_answers": "Answers of engines that were damaged, or that training cannot use.",
    "tokens_kept": "Tokens that had arrived from engines that were lost.",
    "turns_recalled": "Turns of rollouts in progress that were kept over an interruption.",
    "turns_given_up": "Saved turns that were not used: too old, damaged, or the environment sent other messages.",
    "rows_answer": "Tokens whose routed experts the answering engine returned.",
    "rows_shared_prefix": "Tokens whose routed experts are known from another rollout of the same prompt and salt.",
    "rows_unknown": "Tokens without recorded routed experts.",
    "routes_bytes": "Bytes of the routed experts of finished rollouts.",
    "rows_prefill": "Tokens of prompts whose routed experts a prefill engine returned after the answer.",
    "teacher_requests": "Requests to the teacher of a distillation.",
    "teacher_retries": "Requests to the teacher that repeat a failed one.",
    "gateway_requests": "Turns that programs asked for by OpenAI's API.",
    "gateway_joins": "Repeated requests of programs that got the answer of the request before.",
    "gateway_aborts": "Turns that programs did not wait for.",
    "gateway_overrides": "Values of such requests that were replaced by those of the recipe.",
}


class _Measured(NamedTuple):
    """Description of an exposed number: name without prefix, factor to its unit, help."""

    name: str
    factor: float
    help_text: str


_MEASURED = {
    "in_flight": _Measured("in_flight", 1.0, "Rollouts that run now."),
    "in_flight_limit": _Measured("in_flight_limit", 1.0, "Maximum number of rollouts that may run now."),
    "in_queue": _Measured("in_queue", 1.0, "Finished rollouts that wait for the trainer."),
    "in_queue_staleness_mean": _Measured("in_queue_staleness_mean", 1.0, "Their mean staleness in the next step."),
    "in_queue_staleness_max": _Measured("in_queue_staleness_max", 1.0, "Their largest staleness in the next step."),
    "in_flight_staleness_mean": _Measured("in_flight_staleness_mean", 1.0, "Mean staleness of rollouts that run now."),
    "in_flight_staleness_max": _Measured("in_flight_staleness_max", 1.0, "Largest staleness of rollouts that run now."),
    "wait_for_policy_s": _Measured(
        "wait_for_policy_seconds_total", 1.0, "Time for which rollouts could not begin before a newer version."
    ),
    "groups_running": _Measured("groups_running", 1.0, "Groups that run now."),
    "groups_waiting": _Measured("groups_waiting", 1.0, "Groups that wait to be consumed."),
    "version": _Measured("version", 1.0, "Policy version that all engines serve."),
    "loop_lag_p50_ms": _Measured("loop_lag_p50_seconds", 1e-3, "Median lag of the event loop in the last minute."),
    "loop_lag_p99_ms": _Measured("loop_lag_p99_seconds", 1e-3, "99th percentile of the lag in the last minute."),
    "loop_lag_max_ms": _Measured("loop_lag_max_seconds", 1e-3, "Largest lag of the event loop since the start."),
    "gateway_waiting": _Measured("gateway_waiting", 1.0, "Requests of programs that wait for the processor."),
    "gateway_wait_p99_ms": _Measured("gateway_wait_p99_seconds", 1e-3, "99th percentile of the latest of these waits."),
    "gateway_waited_s": _Measured("gateway_waited_seconds_total", 1.0, "Sum of these waits."),
    "warehouse_bytes": _Measured("warehouse_bytes", 1.0, "Memory that finished rollouts take."),
    "warehouse_refused": _Measured("warehouse_refused_total", 1.0, "Finished rollouts that did not fit there."),
    "columns_not_removed": _Measured("columns_not_removed_total", 1.0, "Failed removals of unneeded columns."),
    "weights_fabric_bytes": _Measured("weights_fabric_bytes_total", 1.0, "Bytes of versions pulled over the fabric."),
    "weights_node_bytes": _Measured("weights_node_bytes_total", 1.0, "Bytes of versions that came from other nodes."),
    "weights_share_bytes": _Measured("weights_share_bytes_total", 1.0, "Bytes of versions read from the share."),
    "weights_fabric_s": _Measured("weights_fabric_seconds_total", 1.0, "Time of all pulls over the fabric."),
    "weights_fabric_failures": _Measured("weights_fabric_failures_total", 1.0, "Pulls over the fabric that failed."),
    "cpu_s": _Measured("cpu_seconds_total", 1.0, "CPU time of the orchestrator."),
    "children_cpu_s": _Measured("children_cpu_seconds_total", 1.0, "CPU time of tool processes that have ended."),
}
_ENGINE = {
    "version": "Policy version that the engine serves; -1 while it is away.",
    "load": "Rollouts that are given to the engine.",
    "stuck": "Whether the engine has work and samples nothing.",
}


_WORKER = {
    "up": _Measured("up", 1.0, "Whether the worker of environments is there."),
    "calls": _Measured("calls", 1.0, "Rollouts and prompts that the worker works on."),
    "losses": _Measured("losses_total", 1.0, "How often the worker was lost in this attempt."),
}


def render_metrics(
    counters: Mapping[str, int],
    gauges: Mapping[str, float],
    engines: Mapping[str, Engine],
    workers: Sequence[WorkerView] = (),
) -> str:
    """Return metrics named ``hpcrl_rollouts_*``; those of one engine or worker carry its label."""
    lines: list[str] = []
    for name, value in counters.items():
        lines += _family(f"{name}_total", _COUNTERS[name], {"": value})
    for name, gauge in gauges.items():
        shown, factor, help_text = _MEASURED[name]
        lines += _family(shown, help_text, {"": gauge * factor})
    for name, help_text in _ENGINE.items():
        values = {f'{{engine="{label}"}}': int(getattr(engine, name)) for label, engine in engines.items()}
        lines += _family(f"engine_{name}", help_text, values)
    for name, (shown, _, help_text) in _WORKER.items():
        values = {f'{{worker="{worker.replica}"}}': int(getattr(worker, name)) for worker in workers}
        lines += _family(f"worker_{shown}", help_text, values)
    return "\n".join(lines) + "\n"


def _family(name: str, help_text: str, values: Mapping[str, float]) -> list[str]:
    full, kind = f"hpcrl_rollouts_{name}", "counter" if name.endswith("_total") else "gauge"
    samples = [f"{full}{labels} {value:.10g}" for labels, value in values.items() if math.isfinite(value)]
    return [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", *samples] if samples else []
