"""Single numbers out of an engine's Prometheus text."""

from __future__ import annotations

import pytest

from hpcrl.runs.engine_metrics import engine_samples

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:generation_tokens_total{engine="0"} 1.25e+02
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:prompt_tokens_total 7
vllm:prompt_tokens_cached_total 5
vllm:iteration_tokens_total_sum{engine="0"} 700.0
"""


def test_values_of_all_ranks_under_the_name_without_its_suffix() -> None:
    names = ("num_requests_running", "generation_tokens", "prompt_tokens", "iteration_tokens_total_sum", "absent")
    assert engine_samples(TEXT, names) == {
        "num_requests_running": [3.0, 1.0],
        "generation_tokens": [125.0],
        "prompt_tokens": [7.0],
        "iteration_tokens_total_sum": [700.0],
    }


def test_a_first_and_a_last_line_count_too() -> None:
    assert engine_samples("vllm:a 1\nvllm:b 2", ("a", "b")) == {"a": [1.0], "b": [2.0]}
    assert engine_samples("", ("a",)) == {}


def test_what_is_not_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="full"):
        engine_samples("vllm:a full", ("a",))
