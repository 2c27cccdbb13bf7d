"""The orchestrator's ``/metrics``: Prometheus text, by the rules that ``promtool check metrics`` has.

Names are those of `hpcrl.rollouts.telemetry.counters` and of the gauges in ``metrics.jsonl``, with the units that
Prometheus wants (seconds) and the suffix of counters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hpcrl.rollouts.engines.engine import Engine

__all__ = ["render_metrics"]

_COUNTERS = {
    "started": "Rollouts that began.",
    "finished": "Rollouts that ended with a reward.",
    "consumed": "Rollouts that were handed to the trainer.",
    "mixed_versions": "Finished rollouts with tokens of two or more policy versions.",
    "dropped_engine": "Rollouts that were given up after the last retry of a request.",
    "dropped_environment": "Rollouts whose environment or teacher failed, or whose prompt left no room for an answer.",
    "malformed_calls": "Tool calls of finished rollouts that could not be run.",
    "turns_ended_otherwise": "Turns of finished rollouts that ended by another token than the chat template's.",
    "refused_parts": "Parts of rewards that were left out because they are no finite numbers.",
    "dropped_group": "Finished rollouts of groups of which too few members finished.",
    "dropped_stale": "Finished rollouts that were too old to be used.",
    "dropped_zero_variance": "Finished rollouts of groups whose rewards were all equal, where these are dropped.",
    "cancelled_stale": "Rollouts that were aborted because they could not have been used any more.",
    "zero_variance_groups": "Groups whose rewards were all equal.",
    "engine_requests": "Generation requests that were sent.",
    "engine_retries": "Generation requests that repeat a failed one.",
    "unusable_answers": "Answers of engines that were damaged, or that training cannot use.",
    "tokens_kept": "Tokens that had arrived from engines that were lost.",
    "turns_recalled": "Turns of rollouts in progress that an interruption did not cost.",
    "turns_given_up": "Turns that were saved and not used: too old, damaged, or the environment said something else.",
    "rows_answer": "Tokens whose experts the engine that answered returned.",
    "rows_shared_prefix": "Tokens whose experts are known from another rollout of the same prompt and salt.",
    "rows_unknown": "Tokens whose experts nobody returned.",
    "routes_bytes": "Bytes of the rows of experts of finished rollouts.",
    "rows_prefill": "Tokens of prompts whose experts a prefill engine returned behind the answer.",
    "teacher_requests": "Requests to the teacher of a distillation.",
    "teacher_retries": "Requests to the teacher that repeat a failed one.",
}


class _Measured(NamedTuple):
    """How a number is exposed: name without prefix, factor to its unit, help."""

    name: str
    factor: float
    help_text: str


_MEASURED = {
    "in_flight": _Measured("in_flight", 1.0, "Rollouts that run now."),
    "in_flight_limit": _Measured("in_flight_limit", 1.0, "Rollouts that may run now."),
    "groups_running": _Measured("groups_running", 1.0, "Groups that run now."),
    "groups_waiting": _Measured("groups_waiting", 1.0, "Groups that wait to be consumed."),
    "version": _Measured("version", 1.0, "Policy version that all engines serve."),
    "loop_lag_p50_ms": _Measured("loop_lag_p50_seconds", 1e-3, "Median lag of the event loop in the last minute."),
    "loop_lag_p99_ms": _Measured("loop_lag_p99_seconds", 1e-3, "99th percentile of that lag."),
    "loop_lag_max_ms": _Measured("loop_lag_max_seconds", 1e-3, "Largest lag of the event loop since the start."),
    "warehouse_bytes": _Measured("warehouse_bytes", 1.0, "Memory that finished rollouts take."),
    "warehouse_refused": _Measured("warehouse_refused_total", 1.0, "Rollouts for which there was no room there."),
    "columns_not_removed": _Measured(
        "columns_not_removed_total", 1.0, "Times that the filesystem did not let columns go that nobody needs."
    ),
    "cpu_s": _Measured("cpu_seconds_total", 1.0, "CPU time of the orchestrator."),
    "children_cpu_s": _Measured("children_cpu_seconds_total", 1.0, "CPU time of tool processes that have ended."),
}
_ENGINE = {
    "version": "Policy version that the engine serves; -1 while it is away.",
    "load": "Rollouts that are given to the engine.",
    "stuck": "Whether the engine has work and samples nothing.",
}


def render_metrics(counters: Mapping[str, int], gauges: Mapping[str, float], engines: Mapping[str, Engine]) -> str:
    """Metrics named ``hpcrl_rollouts_*``; per-engine values carry the label ``engine``."""
    lines: list[str] = []
    for name, value in counters.items():
        lines += _family(f"{name}_total", _COUNTERS[name], {"": value})
    for name, gauge in gauges.items():
        shown, factor, help_text = _MEASURED[name]
        lines += _family(shown, help_text, {"": gauge * factor})
    for name, help_text in _ENGINE.items():
        values = {f'{{engine="{label}"}}': int(getattr(engine, name)) for label, engine in engines.items()}
        lines += _family(f"engine_{name}", help_text, values)
    return "\n".join(lines) + "\n"


def _family(name: str, help_text: str, values: Mapping[str, float]) -> list[str]:
    full, kind = f"hpcrl_rollouts_{name}", "counter" if name.endswith("_total") else "gauge"
    samples = [f"{full}{labels} {value:.10g}" for labels, value in values.items() if math.isfinite(value)]
    return [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", *samples] if samples else []
