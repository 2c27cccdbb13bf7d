"""Named dimensions of the trainer's ranks: which ranks are in which group."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.spec import spec_of
from hpcrl.models.arch import Qwen3Arch, Qwen3MoeArch


def groups(rank, world_size, **degrees):
    """Ranks of each group of ``rank`` among ``world_size``, without processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        dims = ParallelDims(world_size=world_size, **degrees)
        dims.build_mesh("cpu")
        found = {}
        for name in ("batch", "cp", "dp_replicate", "fsdp", "efsdp", "ep"):
            mesh = dims.get_optional_mesh(name)
            found[name] = None if mesh is None else dist.get_process_group_ranks(mesh.get_group())
        if dims.ep > 1:
            assert dims.sharding.mesh_dim_names == ("dp_replicate", "fsdp")
            assert dims.expert_sharding.mesh_dim_names == ("dp_replicate", "efsdp")
            found["copies"] = dims.expert_sharding.mesh.tolist()
        return dims, found
    finally:
        dist.destroy_process_group()


def test_one_dimension_is_the_world():
    dims, found = groups(2, 4)
    assert found.pop("batch") == found.pop("fsdp") == [0, 1, 2, 3]
    assert set(found.values()) == {None}
    assert (dims.dp_shard, dims.batch, dims.fsdp, dims.efsdp) == (4, 4, 4, 4)
    with pytest.raises(ValueError, match="no mesh has ep in ParallelDims"):
        dims.get_mesh("ep")


def test_every_dimension_at_once():
    """Sixteen ranks: 2 copies of a model whose shards lie on 8 ranks, 2 to a batch, 4 to a set of experts."""
    dims, found = groups(5, 16, dp_replicate=2, cp=2, ep=4)
    assert (dims.dp_shard, dims.batch, dims.fsdp, dims.efsdp) == (4, 8, 8, 2)
    assert found == {
        "batch": [1, 3, 5, 7, 9, 11, 13, 15],
        "cp": [4, 5],
        "dp_replicate": [5, 13],
        "fsdp": [0, 1, 2, 3, 4, 5, 6, 7],
        "efsdp": [1, 5],
        "ep": [4, 5, 6, 7],
        "copies": [[1, 5], [9, 13]],
    }


SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
EXPERTS = {"moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (Qwen3MoeArch(**SIZES, **EXPERTS), "4 experts cannot be distributed evenly over ep 3"),
        (Qwen3Arch(**SIZES, intermediate_size=8), "the model has no experts to be distributed over ep 3"),
    ],
)
def test_experts_that_cannot_be_dealt_out(arch, message):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        dims = ParallelDims(world_size=3, ep=3)
        dims.build_mesh("cpu")
        spec = spec_of(arch)
        with pytest.raises(ValueError, match=message):
            spec.parallelize(spec.build(arch), dims, dtype=torch.float32)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"cp": 3}, "dp_replicate 1 times cp 3 does not divide 8 ranks"),
        ({"dp_replicate": 4, "cp": 4}, "dp_replicate 4 times cp 4 does not divide 8 ranks"),
        ({"dp_replicate": 2, "ep": 8}, "ep 8 does not divide the 4 ranks that parameters are sharded over"),
        ({"ep": 0}, "ep is 0; the least is 1"),
    ],
)
def test_degrees_divide_the_ranks(degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims(world_size=8, **degrees)
