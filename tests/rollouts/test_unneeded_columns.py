"""Columns that nobody needs are removed beside the work: a filesystem that refuses or hangs there stops nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import patience

from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.rollouts.core.records import Group, Rollout
from hpcrl.rollouts.ledger.ledger import RolloutLedger

ONES = np.ones(5, np.int32)


@pytest.fixture(autouse=True)
def one_rollout_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PayloadWriter.__init__, "__kwdefaults__", {"file_bytes": 1})


def ledger_of(path: Path, checkpoints: Callable[[], Sequence[int]]) -> RolloutLedger:
    return RolloutLedger(path, attempt=1, restored=0, bound=1, limit_s=5.0, checkpoints=checkpoints)


async def train(ledger: RolloutLedger, step: int) -> None:
    """A step of one rollout, which is taken and trained."""
    task: Any = SimpleNamespace(index=step, environment=SimpleNamespace(name="words"), prompt_index=0)
    rollout = Rollout(
        member=0,
        token_ids=ONES,
        sampled=ONES.astype(np.uint8),
        logprobs=ONES.astype(np.float32),
        versions=ONES * step,
        reward=1.0,
        parts={},
        seconds=1.0,
    )
    stored = await ledger.finished(task, rollout)
    ledger.kept(step)
    async with asyncio.timeout(20.0 * patience()):
        await ledger.taken(step, [Group(index=step, environment="words", prompt_index=0, rollouts=[stored])])
    ledger.trained(step)


def there(ledger: RolloutLedger) -> set[str]:
    return {path.name for path in ledger.payload_dir.iterdir()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0 * patience()):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_list_of_checkpoints_that_is_stale_for_a_while_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = True

    def checkpoints() -> list[int]:
        if stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return [100]

    ledger = ledger_of(tmp_path, checkpoints)
    for step in range(1, 5):
        await train(ledger, step)
        await until(lambda step=step: ledger.not_removed == step)  # type: ignore[misc]
    assert len(there(ledger)) == 4
    assert caplog.text.count("unneeded columns are not removed now") == 1
    stale = False
    await train(ledger, 5)
    await until(lambda: len(there(ledger)) == 1)
    ledger.close()


async def test_a_file_that_cannot_be_removed_stays_alone_and_is_tried_again(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, lambda: [100])
    # a directory is what unlink refuses for everybody
    kept = ledger.payload_dir / "000000-000001.columns"
    kept.mkdir()
    for step in (1, 2):
        await train(ledger, step)
        await until(lambda step=step: ledger.not_removed == step)  # type: ignore[misc]
    await train(ledger, 3)
    await until(lambda: len(there(ledger)) == 2)
    kept.rmdir()
    kept.touch()
    await train(ledger, 4)
    await until(lambda: not kept.exists())
    ledger.close()


async def test_a_restore_begins_where_such_a_file_is_left(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, list)
    (ledger.payload_dir / "000000-000001.columns").mkdir()
    assert ledger.find(1).next_index == 0
    assert ledger.not_removed == 1
    ledger.close()


async def test_a_filesystem_that_hangs_there_holds_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hpcrl.rollouts.ledger.payload_gc._SLOW_S", 0.0)
    answers, asked = threading.Event(), 0

    def checkpoints() -> list[int]:
        nonlocal asked
        asked += 1
        answers.wait()
        return [100]

    ledger = ledger_of(tmp_path, checkpoints)
    for step in range(1, 4):
        await train(ledger, step)
    assert asked == 1
    assert caplog.text.count("unneeded columns could not be removed") == 1
    assert {thread.daemon for thread in threading.enumerate() if thread.name == "unneeded-columns"} == {True}
    answers.set()
    await until(lambda: bool(ledger._garbage._look and ledger._garbage._look.done()))
    await train(ledger, 4)
    await until(lambda: len(there(ledger)) == 1)
    ledger.close()
