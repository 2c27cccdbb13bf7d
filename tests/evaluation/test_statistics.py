"""Estimates over prompts, against counting by brute force and against scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from hpcrl.evaluation.statistics import bootstrap_interval, estimate, pass_at_k, pass_ks
from hpcrl.evaluation.summary import SampleSummary, ScoredSample, summarise, summarise_by_environment


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_one_that_passes(samples: int) -> None:
    for passed in range(samples + 1):
        marks = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            choices = list(itertools.combinations(marks, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_of_many_samples_is_that_of_the_formula() -> None:
    for n, c, k in ((1000, 3, 100), (10_000, 1, 5_000), (200, 200, 1), (200, 0, 200)):
        assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), rel=1e-9, abs=1e-12)


def test_pass_at_k_has_no_bias() -> None:
    """Over many draws of n samples its mean is the probability that one of k passes."""
    generator, p, n, k = np.random.default_rng(7), 0.15, 10, 4
    found = np.mean([pass_at_k(n, int(c), k) for c in generator.binomial(n, p, 20_000)])
    assert found == pytest.approx(1 - (1 - p) ** k, abs=0.01)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@|passed"):
        pass_at_k(samples, passed, k)


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [pass_ks(n) for n in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


def test_the_interval_is_that_of_scipy() -> None:
    values = np.random.default_rng(3).beta(0.5, 0.7, 80)
    ours = bootstrap_interval(values.tolist(), seed=1, resamples=20_000)
    assert ours is not None
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=2).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.006)


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(11)
    covered = 0
    for trial in range(300):
        low, high = bootstrap_interval(generator.binomial(1, 0.4, 60).tolist(), seed=trial, resamples=500) or (1, 0)
        covered += low <= 0.4 <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_the_interval_is_equal_for_equal_seeds_and_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(50).tolist()
    whole = bootstrap_interval(values, seed=5)
    assert whole == bootstrap_interval(values, seed=5)
    assert whole != bootstrap_interval(values, seed=6)
    monkeypatch.setattr("hpcrl.evaluation.statistics._MAX_COUNTS", 700)
    assert bootstrap_interval(values, seed=5) == whole


def test_few_prompts_have_no_interval() -> None:
    assert bootstrap_interval([]) is None
    assert bootstrap_interval([0.5]) is None
    none, one = estimate([]), estimate([0.5])
    assert (none.value, none.low, none.prompts) == (None, None, 0)
    assert (one.value, one.low, one.prompts) == (0.5, None, 1)
    assert bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        bootstrap_interval([0.0, bad])
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([0.0, 1.0], level=1.0)


SAMPLES = [
    *(ScoredSample(environment="sums", prompt=0, reward=reward) for reward in (1.0, 0.0, 0.0, 1.0)),
    *(ScoredSample(environment="sums", prompt=1, reward=reward, truncated=True) for reward in (0.5, None, None, 0.0)),
    *(ScoredSample(environment="words", prompt=0, reward=reward) for reward in (1.0, 1.0, 2.0, 1.0)),
    *(ScoredSample(environment="words", prompt=1, reward=None) for _ in range(4)),
]


def found(failures: str) -> SampleSummary:
    return summarise(SAMPLES, k=4, pass_reward=1.0, failures=failures)  # type: ignore[arg-type]


def test_failed_samples_count_as_zero_or_not_at_all() -> None:
    zero, exclude = found("zero"), found("exclude")
    for each in (zero, exclude):
        assert (each.prompts, each.samples, each.failed, each.truncated, each.passed) == (4, 16, 6, 4, 6)
    assert zero.mean.value == pytest.approx((0.5 + 0.125 + 1.25 + 0.0) / 4)
    assert exclude.mean.value == pytest.approx((0.5 + 0.25 + 1.25) / 3)
    assert (zero.mean.prompts, exclude.mean.prompts) == (4, 3)


def test_pass_at_k_leaves_out_prompts_with_too_few_samples() -> None:
    zero, exclude = found("zero"), found("exclude")
    assert list(zero.pass_at) == [1, 2, 4]
    assert zero.pass_at[2].value == pytest.approx((pass_at_k(4, 2, 2) + 0 + 1 + 0) / 4)
    assert exclude.pass_at[2].value == pytest.approx((pass_at_k(4, 2, 2) + 0 + 1) / 3)
    # of the second prompt two samples are left
    assert (exclude.pass_at[4].prompts, exclude.pass_at[4].value) == (2, 1.0)
    assert (zero.pass_at[4].low or 0) < (zero.pass_at[4].value or 0) < (zero.pass_at[4].high or 0)


def test_environments_are_summarised_by_themselves() -> None:
    each = summarise_by_environment(SAMPLES, k=4, pass_reward=1.0, failures="zero")
    assert list(each) == ["sums", "words"]
    assert [one.prompts for one in each.values()] == [2, 2]
    assert each["words"].mean.value == pytest.approx(0.625)


def test_nothing_comes_to_nothing() -> None:
    empty = summarise([], k=2, pass_reward=1.0, failures="zero")
    assert (empty.prompts, empty.mean.value, empty.pass_at[2].prompts) == (0, None, 0)
