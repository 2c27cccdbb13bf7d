"""Metrics of all parts of a run in one text."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from harness import make_run, running
from stub_engine import StubEngine

from hpcrl.credentials import Credentials
from hpcrl.rollouts.run_metrics import Part, merge

ENGINE = """# HELP vllm:tokens Tokens.
# TYPE vllm:tokens counter
vllm:tokens_total{model="m"} %d
# HELP vllm:ttft_seconds First token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="+Inf"} 3
vllm:ttft_seconds_count 3
"""


def test_samples_of_a_metric_stand_together_with_the_labels_of_their_part() -> None:
    one, two, gone = (Part("engine", i, "") for i in range(3))
    text = merge([(one, ENGINE % 1), (two, ENGINE % 2), (gone, None)])
    assert text.splitlines() == [
        "# TYPE hpcrl_part_up gauge",
        'hpcrl_part_up{role="engine",replica="0"} 1',
        'hpcrl_part_up{role="engine",replica="1"} 1',
        'hpcrl_part_up{role="engine",replica="2"} 0',
        "# HELP vllm:tokens Tokens.",
        "# TYPE vllm:tokens counter",
        'vllm:tokens_total{role="engine",replica="0",model="m"} 1',
        'vllm:tokens_total{role="engine",replica="1",model="m"} 2',
        "# HELP vllm:ttft_seconds First token.",
        "# TYPE vllm:ttft_seconds histogram",
        'vllm:ttft_seconds_bucket{role="engine",replica="0",le="+Inf"} 3',
        'vllm:ttft_seconds_count{role="engine",replica="0"} 3',
        'vllm:ttft_seconds_bucket{role="engine",replica="1",le="+Inf"} 3',
        'vllm:ttft_seconds_count{role="engine",replica="1"} 3',
    ]


async def test_the_orchestrator_collects_them(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await two.stop()
        # as somebody who only looks at the run
        headers = Credentials.of_run(loop.run.path).headers
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{loop.dock_url}/metrics/run") as answer:
            lines = (await answer.text()).splitlines()
        # one of the two is gone
        assert 'hpcrl_part_up{role="engine",replica="0"} 1' in lines
        assert 'hpcrl_part_up{role="engine",replica="1"} 0' in lines
        assert any(line.startswith('hpcrl_rollouts_finished_total{role="orchestrator",replica="0"}') for line in lines)
