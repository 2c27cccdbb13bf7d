"""Metrics of all parts of a run in one text."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from harness import make_run, running
from prometheus_rules import problems
from stub_engine import StubEngine

from hpcrl.inference.metrics import Counter, EngineMetrics, Gauge, Registry
from hpcrl.network.credentials import Credentials
from hpcrl.rollouts.telemetry.run_metrics import MetricsPart, merge_metrics

ENGINE = """# HELP vllm:tokens_total Tokens.
# TYPE vllm:tokens_total counter
vllm:tokens_total{model="m"} %d
# HELP vllm:ttft_seconds First token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="+Inf"} 3
vllm:ttft_seconds_count 3
"""


def test_samples_of_a_metric_stand_together_with_the_labels_of_their_part() -> None:
    one, two, gone = (MetricsPart("engine", i, "") for i in range(3))
    text = merge_metrics([(one, ENGINE % 1), (two, ENGINE % 2), (gone, None)])
    assert text.splitlines() == [
        "# HELP hpcrl_part_up Whether the part answered.",
        "# TYPE hpcrl_part_up gauge",
        'hpcrl_part_up{role="engine",replica="0"} 1',
        'hpcrl_part_up{role="engine",replica="1"} 1',
        'hpcrl_part_up{role="engine",replica="2"} 0',
        "# HELP vllm:tokens_total Tokens.",
        "# TYPE vllm:tokens_total counter",
        'vllm:tokens_total{role="engine",replica="0",model="m"} 1',
        'vllm:tokens_total{role="engine",replica="1",model="m"} 2',
        "# HELP vllm:ttft_seconds First token.",
        "# TYPE vllm:ttft_seconds histogram",
        'vllm:ttft_seconds_bucket{role="engine",replica="0",le="+Inf"} 3',
        'vllm:ttft_seconds_count{role="engine",replica="0"} 3',
        'vllm:ttft_seconds_bucket{role="engine",replica="1",le="+Inf"} 3',
        'vllm:ttft_seconds_count{role="engine",replica="1"} 3',
    ]


def test_metrics_of_an_engine_are_as_prometheus_wants_them() -> None:
    registry = Registry({"model_name": 'a "name"', "engine": "0"})
    metrics = EngineMetrics(registry)
    registry.add(Gauge("hpcrl_engine_tests", "Tests that run.", lambda: 1.0))
    requests = registry.add(Counter("hpcrl_engine_test_requests", "Requests of tests.", "worker"))
    requests.inc(value="http://host:1")
    requests.inc(value="http://host:2")
    metrics.weight_operation.observe(1.0, value="start")
    metrics.prompt_tokens.inc(3)
    text = registry.render()
    assert problems(text) == []
    assert "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{" in text
    both = merge_metrics([(MetricsPart("engine", 0, ""), text), (MetricsPart("engine", 1, ""), text)])
    assert problems(both) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# HELP a_total x\n# TYPE a_total counter\na_total 1\na_total 2\n", "twice"),
        ("# HELP a x\n# TYPE a counter\na_total 1\n", "no help text"),
        ("# HELP a_total x\n# TYPE a_total gauge\na_total 1\n", "no counter"),
        ("# HELP a:b x\n# TYPE a:b gauge\na:b 1\n", "colon"),
        ("# HELP a_ms x\n# TYPE a_ms gauge\na_ms 1\n", "abbreviated"),
        ('# HELP a x\n# TYPE a gauge\na 1\n# HELP b x\n# TYPE b gauge\nb 1\na{c="1"} 1\n', "stand together"),
        ('# HELP a x\n# TYPE a gauge\na{b="1" 1\n', "no sample"),
    ],
)
def test_the_rules_find_what_is_wrong(text: str, problem: str) -> None:
    assert any(problem in each for each in problems(text)), problems(text)


async def test_the_orchestrator_collects_them(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await two.stop()
        # as somebody who only looks at the run
        headers = Credentials.of_run(loop.run.path).headers
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{loop.dock_url}/metrics/run") as answer:
            text = await answer.text()
        lines = text.splitlines()
        # stub engines say nothing about their metrics
        assert [each for each in problems(text) if each.startswith("hpcrl")] == []
        assert problems(loop.orchestrator.metrics()) == []
        # one of the two is gone
        assert 'hpcrl_part_up{role="engine",replica="0"} 1' in lines
        assert 'hpcrl_part_up{role="engine",replica="1"} 0' in lines
        assert any(line.startswith('hpcrl_rollouts_finished_total{role="orchestrator",replica="0"}') for line in lines)
