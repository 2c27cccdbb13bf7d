"""What is said of an evaluation: a version that engines skipped, and held-out rollouts that failed."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.rollouts.engines.errors import EngineError
from hpcrl.rollouts.sampling.evaluation import Evaluator
from hpcrl.rollouts.sampling.held_out import told_failures
from hpcrl.rollouts.sampling.scheduler import _Running


def test_failures_are_counted_by_environment_and_cause() -> None:
    errors: list[tuple[str, Exception]] = [
        ("sums", EngineError("away")),
        ("words", EngineError("gone")),
        ("sums", OSError("torn")),
    ]
    told: Any = told_failures(errors)
    assert told["failed_by_env"] == {"sums": 2, "words": 1}
    assert sum(told["failed_by_cause"].values()) == 3
    assert told["failed_by_cause"]["engine"] == 2
    assert (told["first_failure"]["environment"], told["first_failure"]["what"]) == ("sums", "away")


@pytest.mark.parametrize(("due", "warned"), [(3, False), (2, True)])
async def test_a_version_that_engines_skipped_is_named(caplog: Any, due: int, warned: bool) -> None:
    evaluated: list[tuple[int, int]] = []

    async def evaluate(version: int, due: int) -> None:
        evaluated.append((version, due))

    evaluator: Any = SimpleNamespace(_one_at_a_time=asyncio.Lock(), _exact=set(), _evaluate=evaluate)
    with caplog.at_level(logging.WARNING):
        await Evaluator.evaluate(evaluator, 3, due=due, exactly=False)
    assert evaluated == [(3, due)]
    assert ("skipped version 2" in caplog.text) == warned


def test_a_group_is_as_old_as_its_oldest_first_token() -> None:
    version: Any = _Running.version.fget  # type: ignore[attr-defined]

    def group(asked: tuple[int | None, ...], finished: tuple[int | None, ...]) -> Any:
        first = [[SimpleNamespace(first_version=each) for each in versions] for versions in (asked, finished)]
        return SimpleNamespace(conversations=first[0], rollouts=first[1])

    assert version(group((None, 7), (5, 9))) == 5
    assert version(group((4, None), (5,))) == 4
    assert version(group((None,), ())) is None
