"""Where the time of a step went, by a clock that tests turn, and what is written down of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.dock.wire import BatchStats
from hpcrl.trainer.step import phases, record
from hpcrl.trainer.step.metrics import TokenMetrics
from hpcrl.trainer.step.phases import PHASES, PhaseClock
from hpcrl.trainer.step.record import step_record


class Time:
    """In place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 2e9


class Told:
    """Stands in for a `ProgressReporter`."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, bool]] = []
        self.open = 0

    @contextmanager
    def phase(self, name: str, *, waits: bool) -> Iterator[None]:
        self.phases.append((name, waits))
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(phases, "time", clock)
    monkeypatch.setattr(record, "time", clock)
    return clock


def test_phases_and_the_rest_add_up_to_the_step(clock: Time) -> None:
    own = PhaseClock()
    for name, seconds in (("wait_batch", 3.0), ("optimizer", 5.0), ("wait_batch", 7.0), ("swap", 11.0)):
        with own.phase(name):
            clock.now += seconds
        clock.now += 0.5
    expected = {**dict.fromkeys(PHASES, 0.0), "wait_batch": 10.0, "optimizer": 5.0, "swap": 11.0, "other": 2.0}
    assert own.seconds() == expected
    clock.now += 1.0
    assert own.seconds()["other"] == 3.0


def test_without_phases_all_is_the_rest(clock: Time) -> None:
    own = PhaseClock()
    clock.now += 4.0
    assert own.seconds() == {**dict.fromkeys(PHASES, 0.0), "other": 4.0}


def test_the_rest_is_never_less_than_nothing(clock: Time) -> None:
    """Sums of seconds are rounded."""
    own = PhaseClock()
    with own.phase("publish"):
        clock.now += 1.0
    clock.now -= 0.25
    assert own.seconds()["other"] == 0.0


def test_a_phase_that_fails_counts(clock: Time) -> None:
    told: Any = Told()
    own = PhaseClock(told)

    def fails() -> None:
        clock.now += 2.0
        raise OSError("full")

    with pytest.raises(OSError, match="full"), own.phase("checkpoint"):
        fails()
    assert own.seconds()["checkpoint"] == 2.0
    assert told.open == 0


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (False, ["wait_batch", "forward_backward", "swap", "publish"]),
        (True, ["generate", "train (forward_backward)", "swap", "train (publish)"]),
    ],
)
def test_progress_shows_work_and_waits(clock: Time, turns: bool, words: list[str]) -> None:
    told: Any = Told()
    own = PhaseClock(told, turns=turns)
    for name in ("wait_batch", "forward_backward", "swap", "publish"):
        with own.phase(name):
            assert told.open == 1
    assert told.open == 0
    assert told.phases == list(zip(words, [True, False, False, False], strict=True))


# -- the record

STATS: Any = SimpleNamespace(
    **{name: f"the batch's {name}" for name in BatchStats.__struct_fields__}
    | {"total_tokens": 600, "total_sampled_tokens": 200}
)


def values_of(tokens: TokenMetrics) -> dict[str, Any]:
    return {name: value for name, value in asdict(tokens).items() if name != "tokens"}


@pytest.fixture
def tokens() -> TokenMetrics:
    """Each number another one."""
    fields = TokenMetrics.__dataclass_fields__
    return TokenMetrics(**{name: 100 + number for number, name in enumerate(fields)})


def test_a_record_has_what_the_batch_the_tokens_and_the_optimizer_say(clock: Time, tokens: TokenMetrics) -> None:
    spent = {"wait_batch": 1.0, "optimizer": 2.0, "other": 3.0}
    made = step_record(STATS, tokens, attempt=2, step=7, update=(0.5, 1e-3), phases_s=spent)
    assert (made.time_s, made.attempt, made.step, made.phases_s) == (2e9, 2, 7, spent)
    assert (made.grad_norm, made.learning_rate, made.skipped) == (0.5, 1e-3, False)
    # of the batch, not those that were trained on
    assert (made.tokens, made.sampled_tokens, made.tokens_per_s) == (600, 200, 100.0)
    for name in ("reward_mean", "reward_std", "reward_by_env", "reward_parts", "reward_count", "rollouts"):
        assert getattr(made, name) == f"the batch's {name}"
    for name in ("reward_count_by_env", "reward_count_by_part", "staleness_mean", "staleness_max"):
        assert getattr(made, name) == f"the batch's {name}"
    for name in ("staleness_histogram", "teacher_kl", "branches_mean", "branches_max", "prefix_repeated_tokens"):
        assert getattr(made, name) == f"the batch's {name}"
    for name in ("model_flops", "wait_for_policy_s"):
        assert getattr(made, name) == f"the batch's {name}"
    assert made.held_out_loss is None
    for name, value in values_of(tokens).items():
        assert getattr(made, name) == value


def test_a_step_that_was_skipped_moved_nothing(clock: Time, tokens: TokenMetrics) -> None:
    made = step_record(STATS, tokens, attempt=1, step=1, update=None, phases_s={"other": 2.0})
    assert (made.grad_norm, made.learning_rate, made.skipped) == (0.0, 0.0, True)
    assert made.tokens_per_s == 300.0


def test_a_record_has_the_loss_of_held_out_conversations(clock: Time, tokens: TokenMetrics) -> None:
    made = step_record(STATS, tokens, attempt=1, step=1, update=None, phases_s={}, held_out_loss=1.25)
    assert made.held_out_loss == 1.25


def test_a_step_that_took_no_time_has_a_rate(clock: Time, tokens: TokenMetrics) -> None:
    made = step_record(STATS, tokens, attempt=1, step=1, update=None, phases_s={})
    assert made.tokens_per_s > 1e9


def test_a_record_has_the_peak_of_the_memory_of_a_gpu(
    clock: Time, tokens: TokenMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> int:
        pytest.fail("a process on the CPU must not begin CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", asked)
    assert step_record(STATS, tokens, attempt=1, step=1, update=None, phases_s={}).peak_memory_gib is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    assert step_record(STATS, tokens, attempt=1, step=1, update=None, phases_s={}).peak_memory_gib == 1.5
