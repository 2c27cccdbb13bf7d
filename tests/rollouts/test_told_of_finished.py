"""Who waits for a rollout to be durable is told when it is, however writer and event loop meet."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import patience

from hpcrl.dock.ledger.log import RolloutLog
from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.ledger import ledger as ledger_module
from hpcrl.rollouts.ledger.ledger import RolloutLedger

ROLLOUTS = 200
ONES = np.ones(4, np.int32)


class SlowMemory:
    """A warehouse that takes its time, and never lets anybody know."""

    full = False

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.kept = rng, 0

    def put(self, place: object, pieces: object) -> bool:
        time.sleep(self._rng.random() / 500)
        self.kept += 1
        return True

    def release(self, places: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(3))
async def test_no_rollout_waits_for_a_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_threads: None, seed: int
) -> None:
    """Delays before and after entries are durable; a lost word would be seen half a minute later, and not here."""
    monkeypatch.setattr(ledger_module, "_SAY_S", 3600.0)
    rng = random.Random(seed)
    write_lines = RolloutLog._write_lines

    def slowly(self: RolloutLog, fd: int, lines: bytes, offset: int) -> None:
        time.sleep(rng.random() / 500)
        write_lines(self, fd, lines, offset)
        time.sleep(rng.random() / 500)

    monkeypatch.setattr(RolloutLog, "_write_lines", slowly)
    memory: Any = SlowMemory(rng)
    ledger = RolloutLedger(tmp_path, attempt=1, restored=0, bound=1, limit_s=5.0, checkpoints=list, warehouse=memory)

    async def finish(number: int) -> None:
        for _ in range(number % 7):
            await asyncio.sleep(0)
        await asyncio.sleep(number % 5 / 1000)
        task: Any = SimpleNamespace(index=number, environment=SimpleNamespace(name="words"), prompt_index=0)
        rollout = Rollout(
            member=0,
            token_ids=ONES,
            sampled=ONES.astype(np.uint8),
            logprobs=ONES.astype(np.float32),
            versions=ONES,
            reward=1.0,
            parts={},
            seconds=1.0,
        )
        stored = await ledger.finished(task, rollout)
        ledger.kept(number)
        assert stored.place.bytes

    async with asyncio.timeout(20.0 * patience()):
        await asyncio.gather(*(finish(number) for number in range(ROLLOUTS)))
    await asyncio.to_thread(ledger.close)
    assert memory.kept == ROLLOUTS
