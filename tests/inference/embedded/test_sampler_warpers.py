"""What the embedded engine keeps of a distribution, against transformers' own logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.inference.embedded.engine.sampler import SampledTokens, SamplingBatch, TokenSampler

VOCAB = 500
#: temperature, top_k, top_p, min_p of one row each
ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.3, VOCAB, 1.0, 0.0),
    (1.0, 0, 0.95, 0.0),
    (0.6, 0, 0.5, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 0, 1.0, 0.5),
    (1.0, 0, 1.0, 1.0),
    (0.6, 20, 0.95, 0.0),
    (1.1, 50, 0.8, 0.01),
    (0.9, 3, 0.99, 0.2),
]


def expected(logits: torch.Tensor, row: tuple[float, int, float, float]) -> torch.Tensor:
    """Log-probabilities ``[VOCAB]`` by the warpers, in vLLM's order; minus infinity where a token is left out."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    temperature, top_k, top_p, min_p = row
    scores, none = logits[None], torch.zeros(1, 0, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(none, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(none, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(none, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(none, scores)
    return scores.log_softmax(-1)[0]


def draw(logits: torch.Tensor, rows: list[tuple[float, int, float, float]]) -> SampledTokens:
    """Sample one token a row, and report all log-probabilities of what it was sampled from."""
    columns = np.array(rows)
    batch = SamplingBatch(
        temperature=columns[:, 0].astype(np.float32),
        top_k=np.where(columns[:, 1] > 0, columns[:, 1], VOCAB).astype(np.int64),
        top_p=columns[:, 2].astype(np.float32),
        min_p=columns[:, 3].astype(np.float32),
        seed=np.arange(len(rows)),
        positions=np.zeros(len(rows), np.int64),
        suppressed=[],
        wants_logprobs=True,
        num_top=VOCAB,
    )
    return TokenSampler(VOCAB, "processed_logprobs")(logits.clone(), batch)


def spread(found: SampledTokens, row: int) -> torch.Tensor:
    """Log-probabilities ``[VOCAB]`` by token of one row."""
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    values = torch.full((VOCAB,), torch.nan)
    values[torch.from_numpy(found.top_ids[row])] = torch.from_numpy(found.top_logprobs[row])
    return values


@pytest.mark.parametrize("width", [0.3, 3.0, 12.0])
def test_each_row_keeps_what_the_warpers_keep(width: float) -> None:
    """All in one batch: what one row asks for is not applied to another."""
    pytest.importorskip("transformers")
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(3)) * width
    found = draw(logits, ROWS)
    for number, row in enumerate(ROWS):
        wanted, got = expected(logits[number], row), spread(found, number)
        assert (wanted.isinf() == got.isinf()).all(), row
        kept = ~wanted.isinf()
        assert torch.allclose(wanted[kept], got[kept], atol=1e-5), row
        assert kept[found.token_ids[number]]
        assert found.logprobs is not None
        assert found.logprobs[number] == got[found.token_ids[number]]


def test_the_number_that_is_reported_is_that_of_what_is_left() -> None:
    """Less than the whole distribution's by the mass that is kept: why such tokens are not trained on."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    cut, whole = draw(logits, [(0.8, 0, 0.7, 0.0)]), (logits[0] / 0.8).log_softmax(-1)
    kept = ~spread(cut, 0).isinf()
    mass = whole[kept].exp().sum()
    assert 0.7 <= float(mass) < 0.72
    assert cut.logprobs is not None
    token = int(cut.token_ids[0])
    assert float(cut.logprobs[0]) == pytest.approx(float(whole[token] - mass.log()), abs=1e-5)


def test_of_equal_tokens_at_the_bound_all_are_kept() -> None:
    """As in vLLM and transformers, where top-k compares logits with the least of the k."""
    pytest.importorskip("transformers")
    logits = torch.zeros(1, VOCAB)
    logits[0, 10:14] = 5.0
    row = (1.0, 2, 1.0, 0.0)
    got = spread(draw(logits, [row]), 0)
    assert (~got.isinf()).nonzero()[:, 0].tolist() == [10, 11, 12, 13]
    assert (expected(logits[0], row).isinf() == got.isinf()).all()
