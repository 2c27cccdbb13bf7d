"""Rollouts that fail: counted by environment and cause, and when they are too many."""

from __future__ import annotations

import random

import pytest

from hpcrl.config.rollouts import RolloutFailuresConfig
from hpcrl.errors import EnvironmentFailedError, RolloutsFailedError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.sampling.failures import FailureCount, NoRoomError
from hpcrl.runs.cause import CauseKind, from_record
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rollout_failures import EnvironmentFailures


def raised() -> EnvironmentRaisedError:
    what = "NameError: name 'ITEMZ' is not defined"
    place = "/home/me/shop.py:31 in tool: return ITEMZ[name]"
    return EnvironmentRaisedError(f"environment 'shop' raised {what}\n  {place}", what=what, where=place)


def play(count: FailureCount, share: float, rollouts: int, *, in_flight: int = 16, environment: str = "shop") -> int:
    """Rollouts of which a share fails at once and the others take long; how many had begun when the run ended."""
    rng, running, credit = random.Random(7), [], 0.0
    for begun in range(1, rollouts + 1):
        counted = count.begin(environment)
        credit += share
        if credit >= 1.0:
            credit -= 1.0
            if count.failed(raised(), counted) is not None:
                return begun
        else:
            running.append(counted)
            if len(running) > in_flight:
                count.finished(running.pop(rng.randrange(len(running))), {})
    return 0


def test_counts_are_by_environment_and_cause_with_the_first_of_each() -> None:
    told: list[EnvironmentFailures] = []
    count = FailureCount(on_failing=told.append)
    assert not play(count, 0.25, 400)
    assert not play(count, 0.0, 100, environment="other")
    for error in (
        NoRoomError(),
        EngineError("no engine"),
        EnvironmentRaisedError("slow", cause="timeout", what="slow"),
    ):
        count.failed(error, count.begin("other"))
    shop, other = count.report()
    assert (shop.environment, shop.started, shop.failed) == ("shop", 400, {"raised": 100})
    assert shop.share == 0.25
    assert shop.first["raised"].what == "NameError: name 'ITEMZ' is not defined"
    assert shop.first["raised"].where.startswith("/home/me/shop.py:31 in tool")
    assert other.failed == {"no_room": 1, "engine": 1, "timeout": 1}
    # each environment warns once, and at the beginning most of those that have ended have failed
    assert [each.environment for each in told] == ["shop", "other"]
    assert other.share == 3 / 103


def test_parts_that_are_left_out_are_counted_by_name() -> None:
    count = FailureCount()
    for _ in range(3):
        count.finished(count.begin("a"), {"coverage": "nan, which is not finite"})
    (found,) = count.report()
    assert (found.finished, found.refused_parts) == (3, {"coverage": 3})
    assert found.first_refused == {"coverage": "nan, which is not finite"}


@pytest.mark.parametrize(
    ("share", "end_share", "ends"),
    [
        (0.26, 0.5, False),
        (0.45, 0.5, False),
        (0.6, 0.5, True),
        (0.26, 0.2, True),
        (0.01, 0.0, True),
        (0.75, None, False),
    ],
)
def test_a_share_of_the_newest_rollouts_ends_the_run(share: float, end_share: float | None, ends: bool) -> None:
    count = FailureCount(RolloutFailuresConfig(end_share=end_share, min_rollouts=128), max_in_flight=16)
    begun = play(count, share, 2000)
    assert bool(begun) is ends
    if ends:
        assert begun >= 128


def test_an_environment_that_breaks_late_ends_the_run_soon() -> None:
    count = FailureCount(RolloutFailuresConfig(), max_in_flight=16)
    assert not play(count, 0.0, 20_000)
    assert 0 < play(count, 0.7, 1000) <= 200
    assert count.report()[0].share < 0.01


def test_a_death_counts_once_and_engines_do_not() -> None:
    count = FailureCount(RolloutFailuresConfig(end_share=0.1), max_in_flight=16)
    rollouts = [count.begin("a") for _ in range(200)]
    for rollout in rollouts[:150]:
        assert count.failed(EnvironmentLostError("gone", ("a", 1)), rollout) is None
    for rollout in rollouts[150:190]:
        assert count.failed(EngineError("no engine"), rollout) is None
    assert count.report()[0].failed == {"lost": 150, "engine": 40}


def test_many_one_after_the_other_end_the_run_as_before() -> None:
    count, error = FailureCount(), None
    for number in range(1, 65):
        error = count.failed(raised(), count.begin("shop"))
        assert (error is None) == (number < 64)
    assert isinstance(error, EnvironmentFailedError)


def test_the_end_has_a_cause_of_its_own_that_names_the_first_and_the_setting() -> None:
    count = FailureCount(RolloutFailuresConfig(end_share=0.25), max_in_flight=16)
    error = None
    for number in range(200):
        counted = count.begin("shop")
        if number % 2:
            error = error or count.failed(raised(), counted)
        else:
            count.finished(counted, {})
    assert isinstance(error, RolloutsFailedError)
    record = FailureRecord(
        time_s=1.0,
        role="orchestrator",
        replica=0,
        rank=0,
        error="RolloutsFailedError",
        message=str(error),
        traceback="",
        secondary=False,
    )
    cause = from_record(record)
    assert cause.kind is CauseKind.ROLLOUTS_FAILED
    assert cause.message == (
        "environment 'shop': 64 of the newest 128 rollouts failed (50%; rollouts.failures.end_share is 0.25)"
    )
    assert "64 raised an exception; the first: NameError: name 'ITEMZ' is not defined" in cause.details[0]
    assert cause.details[1].strip().startswith("/home/me/shop.py:31 in tool")
    assert "rollouts.failures.end_share" in cause.details[2]
