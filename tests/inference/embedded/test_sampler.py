"""Sampling: the right distribution, the right restrictions, noise that belongs to one sequence alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.sampler import SampledTokens, SamplingBatch, TokenSampler, rank_and_top

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


def test_draws_of_a_large_vocabulary_are_those_of_splitmix() -> None:
    """Rows are drawn a few at a time; each has the numbers of its own seed and position."""
    vocab, seeds, positions = 20_000, np.arange(7) * 5 + 3, np.arange(7) + 11
    golden = 0x9E3779B97F4A7C15

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))

    step = np.uint64(golden)
    keys = mix(mix(seeds.astype(np.uint64)) + positions.astype(np.uint64) * step)
    draws = mix(keys[:, None] ^ mix(np.arange(vocab, dtype=np.uint64) * step)) & np.uint64((1 << 53) - 1)
    settings = {"seed": seeds, "positions": positions, "top_k": vocab}
    result = TokenSampler(vocab, "raw_logprobs")(torch.zeros(7, vocab), batch(7, **settings))
    # among equal tokens the one with the shortest waiting time wins, which is -log(uniform)
    assert result.token_ids.tolist() == draws.argmax(-1).tolist()


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


def processed(logits: torch.Tensor, **changes: Any) -> np.ndarray:
    """Probabilities that tokens are sampled with, ``[VOCAB]``, of the first row."""
    result = sample(logits, "processed_logprobs", num_top=VOCAB, **changes)
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    found = np.zeros(VOCAB)
    found[result.top_ids[0]] = np.exp(result.top_logprobs[0].astype(np.float64))
    return found


def given(probabilities: list[float]) -> torch.Tensor:
    """Logits of one row in which the first tokens have these probabilities, and the others none."""
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, : len(probabilities)] = torch.tensor(probabilities).log()
    return row


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 1}, [1.0]),
        ({"top_k": 2}, [4 / 7, 3 / 7]),
        ({"top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
        # the smallest set that holds so much, the most likely one in any case
        ({"top_p": 1e-6}, [1.0]),
        ({"top_p": 0.39}, [1.0]),
        ({"top_p": 0.41}, [4 / 7, 3 / 7]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9]),
        # what is not below a share of the most likely one
        ({"min_p": 1.0}, [1.0]),
        ({"min_p": 0.74}, [4 / 7, 3 / 7]),
        ({"min_p": 0.76}, [1.0]),
        ({"min_p": 0.26}, [4 / 9, 3 / 9, 2 / 9]),
        ({"min_p": 0.24}, [0.4, 0.3, 0.2, 0.1]),
        # the nucleus is one of what top_k leaves
        ({"top_k": 2, "top_p": 0.56}, [1.0]),
        ({"top_k": 2, "top_p": 0.58}, [4 / 7, 3 / 7]),
        # restrictions are of the distribution at the temperature
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 0.5, "min_p": 0.5}, [16 / 25, 9 / 25]),
        ({"temperature": 0.5, "top_p": 0.52}, [1.0]),
    ],
)
def test_restrictions_keep_what_they_say(changes: dict[str, Any], kept: list[float]) -> None:
    found = processed(given([0.4, 0.3, 0.2, 0.1]), **changes)
    np.testing.assert_allclose(found[: len(kept)], kept, atol=1e-5)
    assert not found[len(kept) :].any()


def test_each_row_has_its_own_restrictions() -> None:
    logits = given([0.4, 0.3, 0.2, 0.1]).repeat(4, 1)
    result = sample(
        logits,
        "processed_logprobs",
        num_top=4,
        top_k=np.array([VOCAB, 1, VOCAB, VOCAB]),
        top_p=np.array([1.0, 1.0, 0.5, 1.0], np.float32),
        min_p=np.array([0.0, 0.0, 0.0, 0.6], np.float32),
    )
    assert result.top_logprobs is not None
    kept = np.isfinite(result.top_logprobs).sum(-1)
    assert kept.tolist() == [4, 1, 2, 2]


def test_greedy_rows_take_the_most_likely_token_whatever_their_neighbours_do() -> None:
    logits = logits_of(64)
    temperature = np.array([0.0, 1.7] * 32, np.float32)
    result = sample(logits, temperature=temperature, num_top=1)
    best = int(logits[0].argmax())
    assert set(result.token_ids[::2].tolist()) == {best}
    assert len(set(result.token_ids[1::2].tolist())) > 5
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs[::2], float(logits[0].log_softmax(-1)[best]), atol=1e-6)


def test_greedy_rows_alone_report_the_distribution_that_is_wanted() -> None:
    logits = given([0.4, 0.3, 0.2, 0.1])
    for mode in ("raw_logprobs", "processed_logprobs"):
        result = sample(logits, mode, temperature=0.0, suppressed=[(0, [0])])
        assert result.token_ids.tolist() == [1]
        assert result.logprobs is not None
        # the processed one has no suppressed tokens
        assert np.exp(result.logprobs[0]) == pytest.approx(0.3 if mode == "raw_logprobs" else 0.5, abs=1e-5)


def test_what_is_not_wanted_is_not_reported() -> None:
    silent = sample(logits_of(2), wants_logprobs=False)
    assert (silent.logprobs, silent.ranks, silent.top_ids, silent.top_logprobs) == (None, None, None, None)
    few = sample(logits_of(2))
    assert few.logprobs is not None
    assert few.ranks is not None
    assert (few.top_ids, few.top_logprobs) == (None, None)
    some = sample(logits_of(2), num_top=3)
    assert some.top_ids is not None
    assert some.top_ids.shape == (2, 3)
    assert (silent.token_ids == few.token_ids).all()


def test_suppressed_tokens_outside_of_the_vocabulary_are_passed_over() -> None:
    """The end of sequence of a model's config may be one."""
    logits = given([0.6, 0.4])
    assert sample(logits, temperature=0.0, suppressed=[(0, [VOCAB, -1, 0])]).token_ids.tolist() == [1]
    last = torch.zeros(1, VOCAB)
    last[0, VOCAB - 1] = 5.0
    assert sample(last, temperature=0.0, suppressed=[(0, [VOCAB - 1])]).token_ids.tolist() == [0]
    assert sample(last, temperature=0.0, suppressed=[(0, [-1])]).token_ids.tolist() == [VOCAB - 1]


def test_tokens_of_equal_rank_share_the_worse_one() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -2.0, -3.0]])
    found = [rank_and_top(logprobs, torch.tensor([token]), 0)[1].tolist() for token in range(4)]
    assert found == [[1], [3], [3], [4]]


def test_the_draws_are_those_of_the_published_generator() -> None:
    """SplitMix64 in Python's whole numbers: seeds, positions and tokens of runs that go on stay what they were."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(3))
    seeds, positions = np.arange(16) * 1_000_003 - 5, np.arange(16) * 17
    chosen = sample(logits, seed=seeds, positions=positions).token_ids
    for row in range(16):
        key = mix((mix(int(seeds[row]) & mask) + int(positions[row]) * golden) & mask)
        uniform = [
            ((mix(key ^ mix(token * golden & mask)) & ((1 << 53) - 1)) + 0.5) * 2.0**-53 for token in range(VOCAB)
        ]
        waits = [math.log(-math.log(u)) for u in uniform]
        scores = logits[row].log_softmax(-1).double().numpy() - np.array(waits)
        assert chosen[row] == scores.argmax()
