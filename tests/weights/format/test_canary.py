"""What log-probabilities of a prompt say of an engine: with the adapter, without it, with another one, or nothing."""

import math
import random

import pytest

from hpcrl.weights.format.canary import Canary, judge_canary

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
    assert judge_canary(CANARY, after, before if asked_before else None).outcome == outcome


def test_something_else_than_the_adapter_is_seen_where_the_engine_was_asked_before():
    """As with factors of another layout: the model changes, in directions of its own."""
    other = plus(PLAIN, spread(0.05))
    assert judge_canary(CANARY, other, PLAIN).outcome == "ignored"
    assert judge_canary(CANARY, other).outcome == "unclear"


def test_an_adapter_that_changes_nothing_says_nothing():
    still = Canary(CANARY.token_ids, PLAIN, PLAIN)
    assert judge_canary(still, PLAIN, PLAIN).outcome == "unclear"
    with pytest.raises(ValueError, match="62 log-probabilities of a prompt of 64 tokens"):
        judge_canary(CANARY, PLAIN[1:])


def test_how_much_is_found_and_what_is_left_are_those_of_the_difference():
    """By hand: the trainer's difference is 4 along the first token; the engine's 3 along it and 1 across."""
    canary = Canary([0, 1, 2], [-1.0, -2.0], [3.0, -2.0])
    assert judge_canary(canary, [2.0, -1.0]) == ("applied", 0.75, 0.25)
    assert judge_canary(canary, [2.0, -1.0], [-1.0, -2.0]) == ("applied", 0.75, 0.25)
    # of the engine's own difference, not of that to the trainer
    assert judge_canary(canary, [3.0, 0.0], [0.0, -1.0]) == ("applied", 0.75, 0.25)
    assert judge_canary(canary, [-4.0, -2.0]) == ("ignored", -0.75, 0.0)


@pytest.mark.parametrize("asked_before", [True, False])
def test_half_of_the_adapter_is_not_the_adapter(asked_before):
    canary = Canary([0, 1, 2], [0.0, 0.0], [4.0, 0.0])
    before = [0.0, 0.0] if asked_before else None
    assert judge_canary(canary, [2.0, 0.0], before).outcome == "ignored"
    assert judge_canary(canary, [2.25, 0.0], before).outcome == "applied"


def test_a_deviation_of_half_of_the_change_counts_and_more_does_not():
    canary = Canary([0, 1, 2], [0.0, 0.0], [4.0, 0.0])
    # before the adapter, with it the same
    assert judge_canary(canary, [4.0, 2.0], [0.0, 2.0]).outcome == "applied"
    assert judge_canary(canary, [4.0, 2.25], [0.0, 2.25]).outcome == "unclear"
    # with it, where nobody asked before
    assert judge_canary(canary, [4.0, 2.0]).outcome == "applied"
    assert judge_canary(canary, [4.0, 2.25]).outcome == "unclear"


def test_a_new_deviation_may_be_as_large_as_the_one_before_and_a_half():
    canary = Canary([0, 1, 2], [0.0, 0.0], [4.0, 0.0])
    assert (
        judge_canary(canary, [4.0, 2.0], [0.0, -1.0]).outcome == "applied"
    )  # 0.75 of the change, with a noise of 0.25
    assert judge_canary(canary, [4.0, 2.25], [0.0, -1.0]).outcome == "ignored"


def test_each_of_three_lists_is_as_long_as_the_prompt():
    canary = Canary([0, 1, 2], [0.0, 0.0], [4.0, 0.0])
    for adapted, plain in (([4.0], None), ([4.0, 0.0], [0.0]), ([4.0, 0.0, 0.0], [0.0, 0.0])):
        with pytest.raises(ValueError, match=f"{len(adapted)} log-probabilities of a prompt of 3 tokens"):
            judge_canary(canary, adapted, plain)
    with pytest.raises(ValueError, match="2 log-probabilities of a prompt of 3 tokens"):
        judge_canary(Canary([0, 1, 2], [0.0, 0.0], [4.0]), [4.0, 0.0])


def test_an_adapter_that_changes_nothing_has_no_share():
    still = Canary([0, 1, 2], [1.0, 2.0], [1.0, 2.0])
    assert judge_canary(still, [5.0, 2.0]) == ("unclear", 0.0, math.inf)
