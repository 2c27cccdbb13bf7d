"""What log-probabilities of a prompt say of an engine: with the adapter, without it, with another one, or nothing."""

import math
import random

import pytest

from hpcrl.weights.format.canary import Canary, judge

RNG = random.Random(1)
TOKENS = 64


def spread(size):
    return [RNG.gauss(0, size) for _ in range(TOKENS - 1)]


def plus(*parts):
    return [math.fsum(own) for own in zip(*parts, strict=True)]


PLAIN = spread(3.0)
CHANGE = spread(0.05)
CANARY = Canary(list(range(TOKENS)), PLAIN, plus(PLAIN, CHANGE))


@pytest.mark.parametrize("asked_before", [True, False])
@pytest.mark.parametrize(
    ("noise", "change", "outcome"),
    [
        (0.0, CHANGE, "applied"),
        (0.01, CHANGE, "applied"),
        (0.0, [0.0] * (TOKENS - 1), "ignored"),
        (0.01, [0.0] * (TOKENS - 1), "ignored"),
        # half of the tensors, say: most of the change is missing
        (0.0, [0.3 * of for of in CHANGE], "ignored"),
        # the engine rounds by more than the adapter changes
        (0.2, CHANGE, "unclear"),
        (0.2, [0.0] * (TOKENS - 1), "unclear"),
    ],
)
def test_what_an_engine_says(asked_before, noise, change, outcome):
    before = plus(PLAIN, spread(noise))
    after = plus(PLAIN, spread(noise), change)
    assert judge(CANARY, after, before if asked_before else None).outcome == outcome


def test_something_else_than_the_adapter_is_seen_where_the_engine_was_asked_before():
    """As with factors of another layout: the model changes, in directions of its own."""
    other = plus(PLAIN, spread(0.05))
    assert judge(CANARY, other, PLAIN).outcome == "ignored"
    assert judge(CANARY, other).outcome == "unclear"


def test_an_adapter_that_changes_nothing_says_nothing():
    still = Canary(CANARY.token_ids, PLAIN, PLAIN)
    assert judge(still, PLAIN, PLAIN).outcome == "unclear"
    with pytest.raises(ValueError, match="62 log-probabilities of a prompt of 64 tokens"):
        judge(CANARY, PLAIN[1:])
