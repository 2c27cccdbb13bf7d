"""Batches as tests compare them."""

from __future__ import annotations

from hpcrl.dock.wire import BatchShard, BatchStats


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


def make_shard(step: int) -> BatchShard:
    """The only shard of ``step``, with nothing in it."""
    return BatchShard(step=step, rank=0, world_size=1, micro_batches=[], stats=BatchStats.of_tokens())
