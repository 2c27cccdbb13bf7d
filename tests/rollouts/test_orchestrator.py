"""The orchestrator over real HTTP, against stub engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from harness import CALCULATOR, WORDS, make_run, running
from stub_engine import StubEngine

from hpcrl.dock.wire import BatchShard

SYNC = {"max_off_policy_steps": 0}


def rollouts_of(shard: BatchShard) -> list[tuple[int, ...]]:
    found = []
    for micro in shard.micro_batches:
        for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
            found.append(tuple(micro.token_ids[start:end].tolist()))
    return found


def same(a: BatchShard, b: BatchShard) -> bool:
    def arrays(shard: BatchShard) -> list[bytes]:
        return [
            array.tobytes()
            for m in shard.micro_batches
            for array in (m.token_ids, m.cu_seqlens, m.loss_mask, m.logprobs, m.versions, m.advantages)
        ]

    return arrays(a) == arrays(b)


async def test_steps_in_order_with_bounded_staleness(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments=[WORDS, CALCULATOR])
    async with running(run, StubEngine(), StubEngine()) as loop:
        for shard in await loop.train(1, 6):
            assert len(rollouts_of(shard)) == 16
            assert 0 <= shard.stats.staleness_max <= 2
            for micro in shard.micro_batches:
                sampled = micro.loss_mask.astype(bool)
                assert not sampled[micro.cu_seqlens[:-1]].any()
                assert (micro.versions[sampled] >= 0).all()
                assert (micro.versions[~sampled] == -1).all()
                assert (micro.logprobs[~sampled] == 0).all()
                assert (micro.logprobs[sampled] == (-0.25 - micro.token_ids[sampled] / 1024).astype(np.float32)).all()
        assert {"words", "calculator"} <= set(shard.stats.reward_by_env)
        assert (run.rollouts_dir / "step-000006.jsonl").read_bytes().count(b"\n") == 16
        assert await asyncio.to_thread(lambda: loop.client._request("GET", "/metrics")[1])
