"""The orchestrator's ``/metrics``: Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping

from hpcrl.rollouts.engine import Engine

__all__ = ["render_metrics"]


def render_metrics(counters: Mapping[str, int], gauges: Mapping[str, float], engines: Mapping[str, Engine]) -> str:
    """Metrics named ``hpcrl_rollouts_*``; per-engine values carry the label ``engine``."""
    lines: list[str] = []
    for name, value in counters.items():
        lines += [f"# TYPE hpcrl_rollouts_{name}_total counter", f"hpcrl_rollouts_{name}_total {value}"]
    for name, gauge in gauges.items():
        lines += [f"# TYPE hpcrl_rollouts_{name} gauge", f"hpcrl_rollouts_{name} {gauge:g}"]
    for name in ("version", "load", "stuck"):
        lines.append(f"# TYPE hpcrl_rollouts_engine_{name} gauge")
        lines += [
            f'hpcrl_rollouts_engine_{name}{{engine="{label}"}} {int(getattr(engine, name))}'
            for label, engine in engines.items()
        ]
    return "\n".join(lines) + "\n"
