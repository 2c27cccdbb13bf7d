"""Numbers of environments are looked at where they come in."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hostile_environment import BAD_OUTCOMES, BAD_PARTS, BAD_REWARDS, GOOD_REWARDS, OddParts

from hpcrl.rollouts.environments import Outcome
from hpcrl.rollouts.environments.outcomes import MAX_PARTS, OutcomeError, checked_outcome


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_reward_that_is_not_a_finite_number_drops_the_rollout(name: str) -> None:
    with pytest.raises(OutcomeError, match=r"^its reward is .{1,200}$"):
        checked_outcome(Outcome(reward=BAD_REWARDS[name]))


@pytest.mark.parametrize("name", GOOD_REWARDS)
def test_numbers_of_other_libraries_count(name: str) -> None:
    given, wanted = GOOD_REWARDS[name]
    found = checked_outcome(Outcome(reward=given, parts={"same": given}))
    assert (found.reward, dict(found.parts), dict(found.refused)) == (wanted, {"same": wanted}, {})
    assert type(found.reward) is float


@pytest.mark.parametrize("name", BAD_PARTS)
def test_a_part_that_is_not_a_finite_number_is_left_out(name: str) -> None:
    found = checked_outcome(Outcome(reward=0.5, parts={"good": 1.0, "bad": BAD_PARTS[name]}))
    assert (found.reward, dict(found.parts)) == (0.5, {"good": 1.0})
    assert list(found.refused) == ["bad"]
    # the same again says the same
    assert checked_outcome(found) == found


@pytest.mark.parametrize("parts", [OddParts(), [1], 7, "text"])
def test_parts_that_are_no_mapping_are_left_out(parts: Any) -> None:
    found = checked_outcome(Outcome(reward=0.5, parts=parts))
    assert (found.reward, dict(found.parts), list(found.refused)) == (0.5, {}, ["parts"])


def test_names_and_numbers_of_parts_are_bounded() -> None:
    many = {f"part {i}": float(i) for i in range(10_000)} | {"\ud800" * 5000: 1.0}
    found = checked_outcome(Outcome(reward=0.5, parts=many))
    assert list(found.parts) == list(many)[:MAX_PARTS]
    named = checked_outcome(Outcome(reward=0.5, parts={"\ud800" * 5000: 1.0, 7: 2.0}))  # type: ignore[dict-item]
    text = json.dumps({"parts": dict(named.parts)}, ensure_ascii=False).encode()
    assert len(text) < 2000
    assert list(named.parts.values()) == [1.0, 2.0]
    assert dict(checked_outcome(Outcome(reward=0.5, parts=None)).parts) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD_OUTCOMES)
def test_what_is_not_an_outcome_is_named(name: str) -> None:
    with pytest.raises(OutcomeError, match="which is not an Outcome"):
        checked_outcome(BAD_OUTCOMES[name])


def test_a_sum_over_a_batch_of_the_largest_is_finite() -> None:
    largest = checked_outcome(Outcome(reward=1e9, parts={"p": 1e100}))
    assert math.isfinite(sum([largest.parts["p"]] * 1_000_000))
