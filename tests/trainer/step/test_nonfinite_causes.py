"""What is said of a gradient that is not finite, by what was found: which cause, and which way out."""

from __future__ import annotations

import math

import pytest

from hpcrl.trainer.step.nonfinite import _ENGINE, _OWN_PASS, NonFiniteGradientError, _Found

ADVANTAGE = "group 1 member 2 (its advantage is not finite)"
ENGINE = f"group 1 member 3 ({_ENGINE} of 1 tokens is not finite)"
OWN = f"group 1 member 4 ({_OWN_PASS})"
#: parts of what is said
BACK, REWARDS, LOG, GREW, LOWER = (
    "resume from a checkpoint before",
    "check the rewards of these rollouts",
    "check the engine's log",
    "check grad_norm of earlier steps",
    "hint: a lower trainer.optimizer.learning_rate",
)
HINTS = {BACK, REWARDS, LOG, GREW, LOWER}


def error(*rollouts: str, weights: bool = False, saw_all: bool = True, tokens: int = 0) -> NonFiniteGradientError:
    found = _Found(["a.weight"], ["b.weight"] if weights else [], list(rollouts), saw_all, tokens)
    return NonFiniteGradientError(3, math.nan, found)


@pytest.mark.parametrize("saw_all", [True, False])
@pytest.mark.parametrize(
    ("rollouts", "hints"),
    [
        ((ADVANTAGE,), {REWARDS}),
        ((ENGINE,), {LOG}),
        ((ADVANTAGE, ENGINE), {REWARDS, LOG}),
        # the trainer's own pass is not mended by looking at inputs
        ((OWN,), {LOWER}),
        ((OWN, ADVANTAGE), {LOWER}),
        ((ENGINE, OWN), {LOWER}),
    ],
)
def test_the_way_out_is_that_of_the_rollouts(rollouts: tuple[str, ...], hints: set[str], saw_all: bool) -> None:
    words = str(error(*rollouts, saw_all=saw_all))
    assert {hint for hint in HINTS if hint in words} == hints
    assert all(rollout in words for rollout in rollouts)
    # weights that are lost stay lost, whatever the rollouts were
    lost = str(error(*rollouts, weights=True, saw_all=saw_all))
    assert {hint for hint in HINTS if hint in lost} == {BACK}


def test_without_a_rollout_it_matters_whether_all_were_seen() -> None:
    seen, unseen = str(error()), str(error(saw_all=False))
    assert {hint for hint in HINTS if hint in seen} == {LOWER}
    assert {hint for hint in HINTS if hint in unseen} == {GREW}
    assert "rollouts: none alone" in seen
    assert "rollouts: unknown" in unseen


@pytest.mark.parametrize(
    ("rollouts", "tokens", "began"),
    [
        ((), 0, "gradients: rewards and log-probabilities are finite"),
        ((OWN,), 0, "gradients: rewards and log-probabilities are finite"),
        ((OWN,), 7, "log-probabilities of 7 tokens in the trainer's own forward pass"),
        ((ENGINE, OWN), 7, "log-probabilities that the engine gave"),
        ((ADVANTAGE,), 0, "advantages, which are made of the environment's rewards"),
        (
            (ADVANTAGE,),
            7,
            "advantages, which are made of the environment's rewards; "
            "log-probabilities of 7 tokens in the trainer's own forward pass",
        ),
        (
            (ADVANTAGE, ENGINE),
            7,
            "advantages, which are made of the environment's rewards; log-probabilities that the engine gave",
        ),
    ],
)
def test_it_began_with_what_was_not_finite_first(rollouts: tuple[str, ...], tokens: int, began: str) -> None:
    assert f"    it began with: {began}\n" in str(error(*rollouts, tokens=tokens))


@pytest.mark.parametrize(("count", "more"), [(1, 0), (5, 0), (6, 1), (9, 4)])
def test_five_are_named_and_the_others_counted(count: int, more: int) -> None:
    found = _Found([f"layer.{i}" for i in range(count)], [], [], saw_all=True)
    line = next(each for each in str(NonFiniteGradientError(1, math.inf, found)).split("\n") if "layer.0" in each)
    assert line.count("layer.") == min(count, 5)
    assert (f"and {more} more" in line) == bool(more)
    assert ("more" in line) == bool(more)
