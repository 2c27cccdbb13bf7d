"""What strangers cause to be logged is bounded, and nothing is dropped without a count."""

from __future__ import annotations

import logging

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from hpcrl.reporting.log_limits import LogBudget, LogBudgetFilter, limit_logger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_and_then_one_message_an_interval() -> None:
    clock = Clock()
    budget = LogBudget(burst=5, every_s=10.0, clock=clock)
    assert [budget.take() for _ in range(8)] == [True] * 5 + [False] * 3
    assert budget.wait_s() == pytest.approx(10.0)
    clock.now += 10.0
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now += 1e6
    assert sum(budget.take() for _ in range(100)) == 5


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> logging.Logger:
    return logging.getLogger(f"test.{request.node.name}")


def test_dropped_messages_are_counted(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    logger.addFilter(LogBudgetFilter(LogBudget(burst=2, every_s=10.0, clock=clock)))
    for number in range(50):
        logger.error("message %d", number)
    clock.now += 10.0
    logger.error("the last one, %s", "after a while")
    assert [record.getMessage() for record in caplog.records] == [
        "message 0",
        "message 1",
        "the last one, after a while (48 more messages of this logger were dropped)",
    ]


def test_an_error_of_the_peer_has_one_line_and_no_traceback(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    limit_logger(logger.name)
    limit_logger(logger.name)
    assert len(logger.filters) == 1
    try:
        raise BadHttpMessage("what\n\x1b[2Ja stranger " + "sent" * 1000)
    except BadHttpMessage as error:
        logger.exception("Error handling request from %s", "10.0.0.9", exc_info=error)
    try:
        raise KeyError("a defect of ours")
    except KeyError as error:
        logger.exception("Error handling request", exc_info=error)
    theirs, ours = caplog.records
    assert theirs.exc_info is None
    assert theirs.getMessage().startswith("Error handling request from 10.0.0.9: BadHttpMessage: ")
    assert theirs.getMessage().isprintable()
    assert len(theirs.getMessage()) < 300
    assert ours.exc_info is not None
