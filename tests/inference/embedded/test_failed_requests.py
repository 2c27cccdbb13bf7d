"""What goes wrong with one request, and what becomes of the others in the same engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_client import Client
from engine_helpers import (
    logprob_error,
    random_model,
    tiny_arch,
    tiny_glm_arch,
    tiny_gpt_oss_arch,
    tiny_nemotron_arch,
    tiny_qwen3_next_arch,
)

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.request import Output
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder

POISON = 77
PROMPTS = [[5 + i, 6, 7 + i, 8] * (3 + i) for i in range(6)]
SIZES = {"max_num_seqs": 16, "max_model_len": 256, "max_num_batched_tokens": 24, "block_size": 4, "num_blocks": 256}


@pytest.fixture
def client(tiny: tuple[Path, Decoder]) -> Iterator[Client]:
    client = client_of(tiny[1])
    yield client
    client.engine.stop()


def client_of(model: Decoder) -> Client:
    engine = Engine(model, EngineSettings(**SIZES, return_routed_experts=True), EngineMetrics(Registry({})))
    client = Client(engine)
    engine.start(client.deliver)
    return client


def poison_steps(client: Client, monkeypatch: pytest.MonkeyPatch, *, together: bool = False) -> None:
    """Steps that compute the token `POISON` raise; ``together``: those of several sequences, with any tokens."""
    run, rows = client.engine._runner.run, client.engine._rows

    def fails(step: Any) -> Any:
        held = [rows.tokens[row, : rows.num_tokens[row]] for row in step.rows]
        if len(held) > 1 if together else any(POISON in tokens for tokens in held):
            raise MemoryError("a numerical library is out of memory")
        return run(step)

    monkeypatch.setattr(client.engine._runner, "run", fails)


def check_well(model: Decoder, prompts: list[list[int]], outputs: list[Output]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (output.error, output.finish_reason, len(output.token_ids)) == (None, "length", 8)
        assert logprob_error(model, prompt, output.token_ids, output.logprobs) < 1e-4


def check_left_nothing(client: Client) -> None:
    engine = client.engine
    assert engine.failure is None
    assert engine.call(
        lambda: (engine._pool.usage, engine._rows.num_free, list(engine._scheduler.requests()))
    ).result() == (
        0.0,
        16,
        [],
    )


@pytest.mark.parametrize("where", [0, 3, 5])
def test_a_step_that_fails_costs_the_request_it_fails_for(
    tiny: tuple[Path, Decoder], client: Client, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    poison_steps(client, monkeypatch)
    prompts = [*PROMPTS[:where], [POISON, 5, 6], *PROMPTS[where:]]
    requests = [client.submit(prompt, temperature=0.0, stream=i % 2 == 0) for i, prompt in enumerate(prompts)]
    outputs = [client.result(request) for request in requests]
    failed = outputs.pop(where)
    assert failed.finish_reason == "error"
    assert "MemoryError: a numerical library" in str(failed.error)
    check_well(tiny[1], PROMPTS, outputs)
    check_left_nothing(client)


@pytest.mark.parametrize(
    "numbers", [{"top_k": 2**70}, {"logprobs": 2**70}, {"seed": 2**63}, {"seed": -(2**70)}, {"max_tokens": -(2**70)}]
)
def test_numbers_that_no_array_holds_cost_their_request_alone(
    tiny: tuple[Path, Decoder], client: Client, numbers: dict[str, int]
) -> None:
    """They are refused where they come in; this is what the scheduler does with those of a gap there."""
    first = [client.submit(prompt, temperature=0.0) for prompt in PROMPTS[:3]]
    wrong = client.submit([1, 2, 3, 4, 5, 6], temperature=1.0, **numbers)
    rest = [client.submit(prompt, temperature=0.0) for prompt in PROMPTS[3:]]
    assert client.result(wrong).finish_reason == "error"
    assert "OverflowError" in str(client.result(wrong).error)
    check_well(tiny[1], PROMPTS, [client.result(request) for request in first + rest])
    check_left_nothing(client)


def test_an_engine_in_which_everything_fails_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_steps(client, monkeypatch)
    requests = [client.submit([POISON, i]) for i in range(20)]
    client.engine._thread.join(20.0)
    assert isinstance(client.engine.failure, MemoryError)
    assert any(client.outputs.get(request) for request in requests)


def test_an_engine_in_which_nothing_runs_together_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_steps(client, monkeypatch, together=True)
    for prompt in PROMPTS:
        client.submit(prompt, max_tokens=100)
    client.engine._thread.join(20.0)
    assert isinstance(client.engine.failure, MemoryError)


ARCHS = {
    "qwen": tiny_arch,
    "glm": tiny_glm_arch,
    "gpt-oss": tiny_gpt_oss_arch,
    "nemotron": tiny_nemotron_arch,
    "qwen3-next": tiny_qwen3_next_arch,
}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("family", "value", "prompt_logprobs"),
    [
        ("qwen", NAN, None),
        ("qwen", INF, 0),
        ("glm", NAN, 0),
        ("gpt-oss", NAN, None),
        ("nemotron", INF, None),
        ("qwen3-next", NAN, 0),
    ],
)
def test_logits_that_are_no_numbers_are_an_error_of_their_request(
    family: str, value: float, prompt_logprobs: int | None
) -> None:
    model = random_model(ARCHS[family](), 1)
    whole = client_of(model)
    known = {token for output in whole.run(PROMPTS, temperature=0.0) for token in output.token_ids}
    whole.engine.stop()
    poison = max(set(range(103)) - known)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.embed_tokens.weight[poison, 3] = value
    client = client_of(broken)
    try:
        good = [client.submit(prompt, temperature=0.0) for prompt in PROMPTS]
        bad = [
            client.submit([poison, *prompt], prompt_logprobs=prompt_logprobs, stream=i == 0)
            for i, prompt in enumerate(PROMPTS[:3])
        ]
        for request in bad:
            output = client.result(request)
            assert output.finish_reason == "error"
            assert "logits of its model are not finite" in str(output.error)
            assert output.token_ids == output.logprobs == []
        check_well(model, PROMPTS, [client.result(request) for request in good])
        # nor is their KV there for others
        engine = client.engine
        cached = engine.call(
            lambda: [engine.cached.count(request.hashes) for request in bad if request.hashes]
        ).result()
        assert cached == [0, 0, 0]
        check_left_nothing(client)
    finally:
        client.engine.stop()


def test_an_engine_whose_weights_are_broken_ends(tiny: tuple[Path, Decoder]) -> None:
    broken = copy.deepcopy(tiny[1])
    with torch.no_grad():
        broken.lm_head.weight[7, 3] = float("nan")
    client = client_of(broken)
    for i in range(12):
        client.result(client.submit([5, i]))
        if client.engine.failure is not None:
            break
    client.engine._thread.join(20.0)
    assert isinstance(client.engine.failure, ArithmeticError)
    assert np.all([output.error for outputs in client.outputs.values() for output in outputs])
    assert not any(output.token_ids for outputs in client.outputs.values() for output in outputs)
