"""Held-out rollouts draw tokens as the recipe says for them, training rollouts as it says for those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import make_run, running
from stub_engine import EOS, StubEngine

TRAINING = {"temperature": 0.8, "stop": ["</a>"], "max_new_tokens": 24}


def how(request: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids")
    return {name: request["sampling_params"].get(name) for name in names}


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ({}, {"temperature": 0.0}),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.25, "stop": [], "stop_token_ids": [9]},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.25, "stop": None, "stop_token_ids": [EOS, 9]},
        ),
        ({"max_new_tokens": 12}, {"temperature": 0.0, "max_tokens": 12}),
    ],
)
async def test_each_kind_of_rollouts_has_its_own(tmp_path: Path, own: dict[str, Any], changes: dict[str, Any]) -> None:
    recipe = {"rollouts": {"sampling": TRAINING}, "evaluation": {"prompts": 4, "sampling": own}}
    stub = StubEngine()
    async with running(make_run(tmp_path, **recipe), stub) as loop:
        await loop.train(1, 1)
    trained = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 24, "stop": ["</a>"], "stop_token_ids": [EOS]}
    for request in stub.requests:
        held_out = request["session"].startswith("heldout")
        assert how(request) == {**trained, "temperature": 0.8, **(changes if held_out else {})}
    assert {request["session"].startswith("heldout") for request in stub.requests} == {True, False}
