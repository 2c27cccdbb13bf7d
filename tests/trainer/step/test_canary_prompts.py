"""The prompt of canaries, and the log-probabilities that are compared, against a model that is asked by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from trainer_testing import VOCAB, tiny_arch, tiny_model

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.canary import CanaryMaker
from hpcrl.weights.format.canary import Canary


def recipe(max_model_len: int) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(max_model_len=max_model_len),
        trainer=SimpleNamespace(parallelism=SimpleNamespace(cp_scheme="ulysses")),
    )


def made(maker: CanaryMaker, model: nn.Module) -> Canary:
    return msgspec.json.decode(maker(model, 1), type=Canary)


def by_itself(model: Decoder, token_ids: list[int]) -> list[float]:
    """All logits of the prompt at once; the first token is predicted by nothing."""
    tokens = torch.tensor(token_ids)
    with torch.no_grad():
        logits = model(tokens, PackedAttention(torch.tensor([0, len(tokens)])).context())
    logprobs: list[float] = logits[:-1].log_softmax(1).gather(1, tokens[1:, None])[:, 0].tolist()
    return logprobs


@pytest.mark.parametrize(("max_model_len", "length"), [(2, 1), (10, 9), (64, 63), (65, 64), (66, 64), (1000, 64)])
def test_a_prompt_leaves_room_for_the_token_that_an_engine_samples(max_model_len: int, length: int) -> None:
    with distributed(timeout_s=60) as parallel:
        canary = made(CanaryMaker(recipe(max_model_len), tiny_arch(), parallel), tiny_model(tiny_arch()))
    assert (len(canary.token_ids), len(canary.plain), len(canary.adapted)) == (length, length - 1, length - 1)
    assert all(0 <= token < VOCAB for token in canary.token_ids)


def test_a_model_has_the_same_prompt_in_every_run() -> None:
    with distributed(timeout_s=60) as parallel:
        one, two = (CanaryMaker(recipe(64), tiny_arch(), parallel) for _ in range(2))
        model = tiny_model(tiny_arch())
        first = made(one, model)
        assert made(two, model) == first
        # versions of one run, too
        assert made(one, model) == first
    # random tokens: a prompt of one token, or of neighbours, would see little of a model
    assert len(set(first.token_ids)) > 30
    assert max(first.token_ids) > VOCAB // 2 > min(first.token_ids)


def test_log_probabilities_are_those_of_the_model_at_temperature_one() -> None:
    with distributed(timeout_s=60) as parallel:
        maker = CanaryMaker(recipe(40), tiny_arch(), parallel)
        before, after = tiny_model(tiny_arch()), tiny_model(tiny_arch(), seed=1)
        first, second = made(maker, before), made(maker, after)
    assert first.adapted == pytest.approx(by_itself(before, first.token_ids), abs=2e-5)
    assert first.plain == first.adapted
    assert second.adapted == pytest.approx(by_itself(after, first.token_ids), abs=2e-5)
    # what the start model says is asked once: adapters do not change it
    assert second.plain == first.plain
