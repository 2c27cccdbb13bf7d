"""The Prometheus text of the orchestrator."""

from __future__ import annotations

import math

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.telemetry.metrics_text import render_metrics
from hpcrl.runs.fleet import WorkerView


def test_every_counter_is_there_and_no_number_that_is_not_finite() -> None:
    gauges = {"in_flight": 3.0, "version": math.nan, "cpu_s": math.inf}
    lines = render_metrics(Counters(started=5, refused_parts=2).as_dict(), gauges, {}).splitlines()
    samples = {line.split()[0]: float(line.split()[1]) for line in lines if line and not line.startswith("#")}
    assert all(map(math.isfinite, samples.values()))
    assert samples["hpcrl_rollouts_started_total"] == 5
    assert samples["hpcrl_rollouts_refused_parts_total"] == 2
    assert samples["hpcrl_rollouts_in_flight"] == 3
    assert "hpcrl_rollouts_version" not in samples
    assert len(samples) == len(Counters.__struct_fields__) + 1


def test_each_worker_of_environments_has_its_values() -> None:
    workers = [WorkerView(replica=0, up=True, calls=7), WorkerView(replica=1, up=False, losses=3)]
    lines = render_metrics({}, {}, {}, workers).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'hpcrl_rollouts_worker_up{worker="0"} 1',
        'hpcrl_rollouts_worker_up{worker="1"} 0',
        'hpcrl_rollouts_worker_calls{worker="0"} 7',
        'hpcrl_rollouts_worker_calls{worker="1"} 0',
        'hpcrl_rollouts_worker_losses_total{worker="0"} 0',
        'hpcrl_rollouts_worker_losses_total{worker="1"} 3',
    ]
    assert "worker" not in render_metrics({}, {}, {})
