"""Rollouts that fail: counted by environment and cause, and when they are too many."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.rollouts import RolloutFailuresConfig
from hpcrl.errors import EnvironmentFailedError, HpcrlError, PeerLostError, RolloutsFailedError
from hpcrl.reporting.reports import ReportedFile
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.outcomes import OutcomeError
from hpcrl.rollouts.environments.rewards.processes import CheckerError
from hpcrl.rollouts.sampling.failures import FailureCount, FailureReport, NoRoomError, describe_failure
from hpcrl.runs.cause import CauseKind, from_record
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rollout_failures import EnvironmentFailures, FailureCause, RolloutFailures
from hpcrl.sandboxes import SandboxEvictedError


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


@pytest.mark.parametrize(
    "error",
    [
        SandboxEvictedError("sandbox s-1 was ended"),
        EnvironmentRaisedError("environment 'swe' raised ...", what="SandboxEvictedError: sandbox s-1 was ended"),
        CheckerError("part 'code' of the reward: SandboxEvictedError: sandbox s-1 was ended"),
    ],
    ids=["here", "process of an environment", "process of checkers"],
)
def test_an_evicted_sandbox_is_a_cause_of_its_own(error: Exception) -> None:
    """Wherever it was raised; it is told once for each environment, without a share."""
    told: list[tuple[str, str]] = []
    count = FailureCount(on_evicted=lambda environment, first: told.append((environment, first.what)))
    for environment in ("a", "a", "b"):
        count.failed(error, count.begin(environment))
    assert [(each.environment, each.failed) for each in count.report()] == [
        ("a", {"evicted": 2}),
        ("b", {"evicted": 1}),
    ]
    assert [environment for environment, _ in told] == ["a", "b"]
    assert all("sandbox s-1 was ended" in what for _, what in told)


def test_parts_that_are_left_out_are_counted_by_name() -> None:
    count = FailureCount()
    for _ in range(3):
        count.finished(count.begin("a"), {"coverage": "nan, which is not finite"})
    (found,) = count.report()
    assert (found.finished, found.refused_parts) == (3, {"coverage": 3})
    assert found.first_refused == {"coverage": "nan, which is not finite"}
    assert found.tampered == 0
    count.finished(count.begin("a"), {}, tampered=True)
    (found,) = count.report()
    assert (found.finished, found.tampered, found.plus(found).tampered) == (4, 1, 2)


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


def test_two_deaths_at_once_count_as_two_failures() -> None:
    """Rollouts of two processes that are lost together end in any order."""
    count = FailureCount()
    for i in range(400):
        assert count.failed(EnvironmentLostError("gone", ("env", i % 2)), count.begin("a")) is None
    # what is told of a death later is not another one
    count.finished(count.begin("a"), {})
    for _ in range(63):
        assert count.failed(ValueError("no"), count.begin("a")) is None
        assert count.failed(EnvironmentLostError("gone", ("env", 0)), count.begin("a")) is None
    assert count.failed(ValueError("no"), count.begin("a")) is not None


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


def test_the_report_is_written_where_something_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[bytes] = []
    monkeypatch.setattr(ReportedFile, "put", lambda self, data: put.append(data))
    count = FailureCount()
    report = FailureReport(tmp_path / "failures.json", count)
    for _ in range(2):
        report.write()
        assert len(put) == 1  # that there is nothing is said once
    rollout = count.begin("shop")
    for _ in range(2):
        report.write()
        assert len(put) == 2
    count.failed(NoRoomError(), rollout)
    report.write()
    said = [msgspec.json.decode(data, type=RolloutFailures).environments for data in put]
    assert said == [[], [EnvironmentFailures(environment="shop", started=1)], count.report()]


def fail(error: Exception) -> Exception:
    """The same with the place where it was raised."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    ("error", "cause", "what", "placed"),
    [
        (raised(), FailureCause.RAISED, "NameError: name 'ITEMZ' is not defined", False),
        (EnvironmentRaisedError("late", cause="timeout", what="no answer"), FailureCause.TIMEOUT, "no answer", False),
        (EnvironmentLostError("it was killed", ("a", 1)), FailureCause.LOST, "it was killed", False),
        (EngineError("no engine"), FailureCause.ENGINE, "no engine", False),
        (OutcomeError("reward is nan"), FailureCause.UNUSABLE, "reward is nan", False),
        (NoRoomError(), FailureCause.NO_ROOM, "the prompt leaves no room for an answer (engine.max_model_len)", False),
        (TimeoutError("slow"), FailureCause.TIMEOUT, "TimeoutError: slow", True),
        (ValueError("  odd \n more lines"), FailureCause.RAISED, "ValueError: odd", True),
        (KeyError("x" * 1000), FailureCause.RAISED, f"KeyError: '{'x' * 1000}'", True),
    ],
)
def test_each_failure_has_a_cause_and_one_line(error: Exception, cause: FailureCause, what: str, placed: bool) -> None:
    before_s = time.time()
    found, first = describe_failure(fail(error))
    assert (found, first.what) == (cause, what if len(what) <= 500 else f"{what[:500]}…")
    assert before_s <= first.time_s <= time.time()
    if isinstance(error, EnvironmentRaisedError):
        assert first.where == error.where
    else:
        assert (f"{__file__}:" in first.where and first.where.endswith(" in fail")) is placed
        assert bool(first.where) is placed


def test_one_that_was_never_raised_has_no_place() -> None:
    assert describe_failure(ValueError("odd"))[1].where == ""


def test_people_are_warned_of_an_environment_once() -> None:
    told: list[EnvironmentFailures] = []
    count = FailureCount(on_failing=told.append)
    for _ in range(30):
        count.failed(raised(), count.begin("shop"))
        count.finished(count.begin("other"), {})
    assert [each.environment for each in told] == ["shop"]


def test_a_rollout_that_ends_well_ends_a_row_of_failures() -> None:
    count = FailureCount()
    for _ in range(3):
        for _ in range(63):
            assert count.failed(raised(), count.begin("shop")) is None
        count.finished(count.begin("shop"), {})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (EngineError("away", unreachable=True), PeerLostError, "EngineError: away"),
        (EngineError("odd"), HpcrlError, "EngineError: odd"),
        (ValueError("odd"), HpcrlError, "ValueError: odd"),
    ],
)
def test_many_failures_in_a_row_end_the_run_by_the_last(error: Exception, kind: type[HpcrlError], words: str) -> None:
    count = FailureCount()
    found = [count.failed(error, count.begin("shop")) for _ in range(64)]
    assert found[:-1] == [None] * 63
    assert type(found[-1]) is kind
    assert str(found[-1]) == f"64 rollouts failed one after the other; the last: {words}"


def test_deaths_in_a_row_are_counted_each_once() -> None:
    count = FailureCount()
    for death in range(64):
        for number in range(3):
            error = count.failed(EnvironmentLostError("gone\n  why", ("a", death)), count.begin("a"))
            assert (error is None) is (death < 63 or number > 0)
            if error is not None:
                assert isinstance(error, EnvironmentFailedError)
                assert str(error) == "gone (64 rollouts failed one after the other)\n  why"


@pytest.mark.parametrize(("newest", "ends"), [(8, False), (9, True)])
def test_the_share_is_that_of_as_many_as_the_recipe_wants_to_see(newest: int, ends: bool) -> None:
    """And of the newest four waves of what may be in flight, where that is more; a half is not above a half."""
    count = FailureCount(RolloutFailuresConfig(end_share=0.5, min_rollouts=8), max_in_flight=3)
    rollouts = [count.begin("a") for _ in range(newest)]
    errors = [count.failed(raised(), rollout) for rollout in rollouts[: newest // 2 + newest % 2]]
    assert [error is not None for error in errors] == [False] * (len(errors) - 1) + [ends]


def test_a_failure_of_long_ago_does_not_count_in_the_share_of_the_newest() -> None:
    count = FailureCount(RolloutFailuresConfig(end_share=0.0, min_rollouts=4), max_in_flight=2)
    old = [count.begin("a") for _ in range(3)]
    assert count.failed(raised(), old[0]) is None  # there are too few to say
    for _ in range(8):
        count.finished(count.begin("a"), {})
    # eight are the newest now: all three have gone, and what the first took with it
    assert count.failed(raised(), old[1]) is None
    error = count.failed(raised(), count.begin("a"))
    assert isinstance(error, RolloutsFailedError)
    assert str(error).startswith("environment 'a': 1 of the newest 8 rollouts failed (12%; ")


def test_causes_are_reported_by_frequency() -> None:
    count = FailureCount(RolloutFailuresConfig(end_share=0.9, min_rollouts=8), max_in_flight=1)
    rollouts = [count.begin("a") for _ in range(8)]
    causes = [NoRoomError(), *(raised() for _ in range(4)), NoRoomError(), raised(), TimeoutError("slow")]
    errors = [count.failed(error, rollout) for error, rollout in zip(causes, rollouts, strict=True)]
    assert errors[:-1] == [None] * 7
    lines = str(errors[-1]).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ") and "; the first: " in line] == ["5", "2", "1"]
