"""A batch that ranks of a context-parallel group share: what each of them trains."""

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_testing import Rollouts

from hpcrl.modeling.context import ReplayedExperts
from hpcrl.trainer.batch.tensors import TokenBatch


def cut(batch, rank, ranks, scheme="ulysses"):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        return batch.cut(dist.group.WORLD, scheme)
    finally:
        dist.destroy_process_group()


def batch_of(rollouts):
    """With a row of experts that tells the token, known for every third."""
    shard = Rollouts(3, count=rollouts).shard(micro_batches=1)
    micro_batch = shard.micro_batches[0]
    named = msgspec.structs.replace(micro_batch, rollouts=[(10 + i, 0) for i in range(rollouts)])
    # the first group is of no environment that the batch knows
    batch = TokenBatch.from_wire(named, environments={10 + i: i % 2 for i in range(1, rollouts)})
    assert batch.environments.tolist() == [-1 if i == 0 else i % 2 for i in batch.sequences.tolist()]
    tokens = torch.arange(len(batch.input_ids))
    rows = tokens.int()[:, None, None].expand(-1, 2, 2)
    return batch._replace(routes=ReplayedExperts(rows, tokens % 3 == 0, {0: 0, 1: 1}))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_trained_token_belongs_to_one_rank(ranks):
    batch = batch_of(5)
    total = len(batch.input_ids)
    parts = [cut(batch, rank, ranks) for rank in range(ranks)]
    tokens = torch.cat([part.input_ids for part in parts])
    wanting = -total % ranks
    assert torch.equal(tokens, torch.cat((batch.input_ids, batch.input_ids[:wanting])))
    assert {len(part.input_ids) for part in parts} == {len(tokens) // ranks}
    positions = torch.cat([part.attention.positions for part in parts])
    assert positions[:total].tolist() == batch.attention.positions.tolist()
    # what fills up is a sequence of its own
    assert positions[total:].tolist() == list(range(wanting))
    for name in (
        "targets",
        "engine_logprobs",
        "advantages",
        "versions",
        "context_versions",
        "sequences",
        "environments",
    ):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)), name
    offset = len(tokens) // ranks
    chosen = torch.cat([part.select + rank * offset for rank, part in enumerate(parts) if part.num_trained])
    assert torch.equal(chosen, batch.select)
    known = torch.cat([part.routes.known for part in parts])
    assert known.tolist() == [*batch.routes.known.tolist(), *[False] * wanting]
    assert torch.equal(torch.cat([part.routes.experts for part in parts])[:total], batch.routes.experts)


def test_a_batch_without_tokens_gives_each_rank_one():
    empty = TokenBatch.from_wire(Rollouts(3, count=0).shard(micro_batches=1).micro_batches[0])
    for rank in range(4):
        part = cut(empty, rank, 4)
        assert (len(part.input_ids), part.num_trained, part.select.tolist()) == (1, 0, [0])


def test_a_rank_without_trained_tokens_selects_one_all_the_same():
    shard = Rollouts(3, count=1).shard(micro_batches=1).micro_batches[0]
    shard.loss_mask[:-1] = 0
    batch = TokenBatch.from_wire(shard)
    parts = [cut(batch, rank, 2) for rank in range(2)]
    assert [part.num_trained for part in parts] == [0, 1]
    assert [len(part.select) for part in parts] == [1, 1]


@pytest.mark.parametrize("scheme", ["ring", "gather"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_balanced_chunks_have_every_trained_token_once(ranks, scheme):
    batch = batch_of(5)
    parts = [cut(batch, rank, ranks, scheme) for rank in range(ranks)]
    tokens = torch.cat([part.attention.own for part in parts])
    assert sorted(tokens.tolist()) == list(range(len(batch.input_ids)))
    for part in parts:
        assert torch.equal(part.input_ids, batch.input_ids[part.attention.own])
        assert torch.equal(part.attention.positions, batch.attention.positions[part.attention.own])
        assert torch.equal(part.routes.experts, batch.routes.experts[part.attention.own])
        # the token before each trained one
        before = part.attention.own[part.select[: part.num_trained]]
        assert torch.equal(batch.input_ids[before + 1], part.targets)
    for name in ("targets", "sequences"):
        found = sorted(torch.cat([getattr(part, name) for part in parts]).tolist())
        assert found == sorted(getattr(batch, name).tolist())


@pytest.mark.parametrize("scheme", ["ring", "gather"])
def test_no_rank_with_balanced_chunks_is_without_a_token(scheme):
    empty = TokenBatch.from_wire(Rollouts(3, count=0).shard(micro_batches=1).micro_batches[0])
    for rank in range(4):
        part = cut(empty, rank, 4, scheme)
        assert (len(part.input_ids) >= 2, part.num_trained, part.select.tolist()) == (True, 0, [0])
