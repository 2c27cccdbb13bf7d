"""A simulation as text: one row a figure, one column a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrl.simulation.results.result import SimulationResult

_Show = Callable[[SimulationResult], str]


def rows(results: Sequence[SimulationResult]) -> list[tuple[str, list[str]]]:
    """Return the names and values of all figures, in order."""
    return [(name, [show(result) for result in results]) for name, show in _ROWS if any(map(_shown(name), results))]


def _shown(name: str) -> Callable[[SimulationResult], bool]:
    def shown(result: SimulationResult) -> bool:
        return not (name.startswith("node failures") or "failure" in name) or result.mtbf_h is not None

    return shown


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.2f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _histogram(result: SimulationResult) -> str:
    total = sum(result.staleness.histogram.values())
    return " ".join(f"{lag}:{count / total:.0%}" for lag, count in result.staleness.histogram.items()) or "-"


def _dropped(result: SimulationResult) -> str:
    kinds = [f"{name} {count}" for name, count in result.outcomes.items() if count and name != "consumed"]
    return f"{result.dropped_share:.1%}" + (f" ({', '.join(kinds)})" if kinds else "")


def _kv(result: SimulationResult) -> str:
    mean, peak = result.engine.kv_mean, result.engine.kv_peak
    return f"{mean:.0%}, at most {peak:.0%}" if peak <= 1.001 else f"{mean:,.0f} tokens, at most {peak:,.0f}"


def _of_environments(result: SimulationResult) -> str:
    return f", and {result.env_nodes} of environments" if result.env_nodes else ""


_ROWS: list[tuple[str, _Show]] = [
    ("trainer + engine nodes", lambda r: f"{r.trainer_nodes} + {r.engine_nodes}" + _of_environments(r)),
    ("rollouts a step", lambda r: f"{r.rollouts_per_step:,}"),
    ("steps", lambda r: f"{r.steps:,}"),
    ("step time, mean", lambda r: _seconds(r.step_s.mean)),
    ("  half below", lambda r: _seconds(r.step_s.p50)),
    ("  9 of 10 below", lambda r: _seconds(r.step_s.p90)),
    ("  longest", lambda r: _seconds(r.step_s.maximum)),
    ("steps a minute", lambda r: f"{r.steps_per_minute:.3g}"),
    ("rollout, half below", lambda r: _seconds(r.rollout_s.p50)),
    ("  longest", lambda r: _seconds(r.rollout_s.maximum)),
    ("trainer waits", lambda r: _share(r.phases.get("wait_batch", 0.0))),
    ("trainer computes", lambda r: _share(r.phases.get("forward_backward", 0.0) + r.phases.get("optimizer", 0.0))),
    ("trainer publishes", lambda r: _share(r.phases.get("publish", 0.0))),
    ("trainer saves", lambda r: _share(r.phases.get("checkpoint", 0.0))),
    ("engines wait", lambda r: "?" if r.engines_wait is None else _share(r.engines_wait)),
    ("engines work", lambda r: _share(r.engine.busy)),
    ("engines frozen by updates", lambda r: _share(r.engine.frozen)),
    ("engines without a request", lambda r: _share(r.engine.idle)),
    ("sampled tokens a second", lambda r: f"{r.engine.sampled_tokens_per_s:,.0f}"),
    ("KV in use", _kv),
    ("staleness, mean (bound)", lambda r: f"{r.staleness.mean:.2f} ({r.staleness.bound})"),
    ("  histogram", _histogram),
    ("rollouts not used", _dropped),
    ("node failures", lambda r: str(r.failures.count)),
    ("  failures with a spare node", lambda r: str(r.failures.replaced)),
    ("  steps lost by failures", lambda r: str(r.failures.lost_steps)),
    ("  time lost by failures", lambda r: _seconds(r.failures.lost_s + r.failures.down_s)),
    ("goodput (nodes)", lambda r: _share(r.goodput.share)),
    ("GPU-hours, useful of all", lambda r: f"{r.goodput.useful_gpu_hours:,.0f} of {r.goodput.gpu_hours:,.0f}"),
    ("engines simulated", lambda r: f"{r.engines_simulated} of {r.engines}"),
]
