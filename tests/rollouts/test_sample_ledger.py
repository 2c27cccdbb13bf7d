"""The ledger of an evaluation: what an attempt has done, the next one finds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcrl.dock.ledger.entries import Kept, read_entries
from hpcrl.rollouts.core.records import Rollout, Turn
from hpcrl.rollouts.evaluating.ledger import SampleLedger
from hpcrl.rollouts.sampling.held_out import HeldOutRollout, HeldOutTask
from hpcrl.runs.rundir import RunDir

END = 9
TASKS = [
    HeldOutTask(SimpleNamespace(name=name), index, sample)  # type: ignore[arg-type]
    for name in ("a", "b")
    for index in range(2)
    for sample in range(2)
]


def result(sample: int, reward: float, *, cut: bool = False) -> HeldOutRollout:
    rollout = Rollout(
        member=sample,
        token_ids=np.asarray([1, 2, 3 if cut else END], np.int32),
        sampled=np.asarray([0, 1, 1], np.uint8),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        reward=reward,
        parts={},
        seconds=1.0,
        turns=[Turn(1, 2, 0.0, 0.1)],
    )
    return HeldOutRollout(rollout, cut)


def opened(path: Path, attempt: int) -> SampleLedger:
    return SampleLedger(path, TASKS, attempt=attempt, limit_s=5.0)


def found(ledger: SampleLedger) -> dict[int, tuple[float, bool]]:
    done: Any = ledger.done(TASKS, stop_token_ids=(END,))
    return {position: (each.rollout.reward, each.truncated) for position, each in done.items()}


async def test_the_next_attempt_finds_what_was_done(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = opened(run.rollouts_dir, 1)
    assert found(first) == {}
    await first.finished(TASKS[0], result(0, 1.0))
    await first.finished(TASKS[1], result(1, 0.25, cut=True))
    await first.finished(TASKS[6], result(0, 0.5))
    await first.finished(TASKS[7], RuntimeError("the environment raised"))
    await asyncio.to_thread(first.close)
    second = opened(run.rollouts_dir, 2)
    assert found(second) == {0: (1.0, False), 1: (0.25, True), 6: (0.5, False)}
    for position in (2, 3, 4, 5, 7):
        await second.finished(TASKS[position], result(TASKS[position].sample, 0.0))
    await asyncio.to_thread(second.close)
    third = opened(run.rollouts_dir, 3)
    assert sorted(found(third)) == list(range(8))
    third.close()
    entries = list(read_entries(run.rollouts_dir / "ledger"))
    assert sorted(entry.group for entry in entries if isinstance(entry, Kept)) == [0, 1, 2, 3]


async def test_a_sample_whose_columns_are_gone_is_made_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = opened(run.rollouts_dir, 1)
    await first.finished(TASKS[0], result(0, 1.0))
    await asyncio.to_thread(first.close)
    for path in (run.rollouts_dir / "payload").iterdir():
        path.unlink()
    second = opened(run.rollouts_dir, 2)
    assert found(second) == {}
    await second.finished(TASKS[0], result(0, 0.5))
    await asyncio.to_thread(second.close)
    third = opened(run.rollouts_dir, 3)
    assert found(third) == {0: (0.5, False)}
    third.close()


async def test_a_resumed_sample_is_cut_where_it_was(tmp_path: Path) -> None:
    """A stop of the recipe ends a reply with another token than the model's, and a full context begins no reply."""
    run = RunDir(tmp_path)
    first = opened(run.rollouts_dir, 1)
    await first.finished(TASKS[0], HeldOutRollout(result(0, 1.0, cut=True).rollout, truncated=False))
    await first.finished(TASKS[1], HeldOutRollout(result(1, 0.5).rollout, truncated=True))
    await asyncio.to_thread(first.close)
    second = opened(run.rollouts_dir, 2)
    assert found(second) == {0: (1.0, False), 1: (0.5, True)}
    second.close()


async def test_more_prompts_keep_the_samples_of_their_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = opened(run.rollouts_dir, 1)
    await first.finished(TASKS[4], result(0, 0.75))
    await asyncio.to_thread(first.close)
    more = [HeldOutTask(task.environment, index, task.sample) for task in (TASKS[0], TASKS[4]) for index in range(3)]
    second = SampleLedger(run.rollouts_dir, more, attempt=2, limit_s=5.0)
    done = second.done(more, stop_token_ids=(END,))
    assert [(more[position].environment.name, more[position].index) for position in done] == [("b", 0)]
    await second.finished(more[2], result(0, 0.25))
    await asyncio.to_thread(second.close)
    third = SampleLedger(run.rollouts_dir, more, attempt=3, limit_s=5.0)
    again = third.done(more, stop_token_ids=(END,))
    assert {position: each.rollout.reward for position, each in again.items()} == {2: 0.25, 3: 0.75}
    third.close()
