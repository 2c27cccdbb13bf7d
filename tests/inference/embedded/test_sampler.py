"""Sampling: the right distribution, the right restrictions, noise that belongs to one sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.sampler import SampledTokens, SamplingBatch, TokenSampler

VOCAB = 40


def batch(n: int, **changes: Any) -> SamplingBatch:
    values: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_k": np.full(n, VOCAB),
        "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32),
        "seed": np.arange(n),
        "positions": np.zeros(n, np.int64),
        "suppressed": [],
        "wants_logprobs": True,
        "num_top": 0,
    }
    for name, value in changes.items():
        values[name] = np.full(n, value, values[name].dtype) if np.isscalar(value) and np.ndim(values[name]) else value
    return SamplingBatch(**values)


def logits_of(n: int, seed: int = 0) -> torch.Tensor:
    one = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return one.repeat(n, 1)


def sample(logits: torch.Tensor, mode: str = "raw_logprobs", **changes: Any) -> SampledTokens:
    return TokenSampler(VOCAB, mode)(logits.clone(), batch(len(logits), **changes))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), [
    (1.0, VOCAB, 1.0, 0.0), (0.7, VOCAB, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, VOCAB, 0.6, 0.0), (1.3, VOCAB, 1.0, 0.1),
    (0.9, 8, 0.7, 0.02),
])  # fmt: skip
def test_frequencies_are_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    n = 40_000
    logits = logits_of(n)
    p = (logits[0].double() / temperature).softmax(-1).numpy()
    order = np.argsort(-p)
    allowed = p >= min_p * p.max()
    allowed[order[top_k:]] = False
    kept = np.where(allowed, p, 0) / p[allowed].sum()
    # nucleus: the smallest set of most likely tokens that holds top_p
    before = np.cumsum(kept[order]) - kept[order]
    allowed[order[before >= top_p]] = False
    expected = np.where(allowed, p, 0) / p[allowed].sum()
    result = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = np.bincount(result.token_ids, minlength=VOCAB)
    assert not counts[~allowed].any()
    error = np.abs(counts / n - expected)
    assert (error < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_seed_and_position_decide() -> None:
    logits = logits_of(64)
    first = sample(logits, seed=np.arange(64)).token_ids
    assert (sample(logits, seed=np.arange(64)).token_ids == first).all()
    assert (sample(logits, seed=np.arange(64) + 64).token_ids != first).any()
    assert (sample(logits, seed=np.arange(64), positions=1).token_ids != first).any()


def test_rows_do_not_see_each_other() -> None:
    """A row's token stays when the rows around it change, move or go away."""
    logits = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(5))
    seeds, positions = np.arange(32) * 7, np.arange(32) * 3
    whole = sample(logits, seed=seeds, positions=positions)
    order = np.random.default_rng(0).permutation(32)[:11]
    part = sample(logits[torch.from_numpy(order)], seed=seeds[order], positions=positions[order])
    assert (part.token_ids == whole.token_ids[order]).all()
    mixed = np.ones(32, np.float32)
    mixed[::2] = 0.0
    both = sample(logits, seed=seeds, positions=positions, temperature=mixed)
    assert (both.token_ids[1::2] == whole.token_ids[1::2]).all()
    assert (both.token_ids[::2] == logits.argmax(-1).numpy()[::2]).all()


def test_nearby_seeds_and_positions_are_independent() -> None:
    """Neighbouring counters must not give related draws."""
    logits = torch.zeros(4096, 2)
    sampler = TokenSampler(2, "raw_logprobs")

    def bits(seed: Any, positions: Any) -> np.ndarray:
        changes = {"seed": seed, "positions": positions, "top_k": np.full(4096, 2)}
        return np.asarray(sampler(logits.clone(), batch(4096, **changes)).token_ids)

    counter, zero = np.arange(4096), np.zeros(4096, np.int64)
    for one, other in (
        (bits(counter, zero), bits(counter, zero + 1)),
        (bits(zero, counter), bits(zero, counter + 1)),
        (bits(counter, counter), bits(counter + 1, counter)),
    ):
        assert abs(one.mean() - 0.5) < 0.04
        assert abs((one == other).mean() - 0.5) < 0.04


def test_raw_and_processed_logprobs() -> None:
    logits = logits_of(4)
    settings: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "num_top": 3}
    raw = sample(logits, **settings)
    processed = sample(logits, "processed_logprobs", **settings)
    plain = logits[0].log_softmax(-1)
    restricted = (logits[0] * 2).topk(3)
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    assert processed.top_ids is not None
    assert processed.top_logprobs is not None
    np.testing.assert_allclose(raw.logprobs, plain[raw.token_ids].numpy(), atol=1e-6)
    assert processed.top_ids[0].tolist() == restricted.indices.tolist()
    np.testing.assert_allclose(processed.top_logprobs[0], restricted.values.log_softmax(-1).numpy(), atol=1e-6)


def test_rank_counts_from_one() -> None:
    logits = logits_of(1)
    result = sample(logits, temperature=0.0)
    assert result.ranks is not None
    assert result.ranks.tolist() == [1]
    many = sample(logits_of(200))
    assert many.ranks is not None
    better = (logits > logits[0, torch.from_numpy(many.token_ids)][:, None]).sum(-1)
    assert (many.ranks == better.numpy() + 1).all()


def test_suppressed_tokens_do_not_come() -> None:
    logits = logits_of(500)
    best = int(logits[0].argmax())
    tokens = sample(logits, suppressed=[(i, [best]) for i in range(250)]).token_ids
    assert best not in tokens[:250]
    assert best in tokens[250:]


@pytest.mark.parametrize("changes", [
    {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
    {"top_k": -2}, {"min_p": 1.5}, {"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 9}, {"logprobs": -2},
    {"logprobs": VOCAB + 1}, {"stop_token_ids": frozenset({VOCAB})}, {"seed": 2**63},
    {"routed_experts_prompt_start": 6}, {"routed_experts_prompt_start": -1},
])  # fmt: skip
def test_bad_parameters_are_named(changes: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 8, **changes})
    with pytest.raises(ValueError, match=next(iter(changes))):
        params.check(vocab_size=VOCAB, prompt_length=5)
