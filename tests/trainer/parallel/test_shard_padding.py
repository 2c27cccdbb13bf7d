"""Padding of shards, against what FSDP2 allocates: ranks of a fake process group, one at a time."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_meshes import ARCHS
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.parallelize import parallelize_decoder
from hpcrl.modeling.spec import build_model
from hpcrl.models import load_facts
from hpcrl.models.expert_shards import sharded_dimension
from hpcrl.planning.memory.padding import layer_padding, model_padding, rounded_gradients
from hpcrl.planning.memory.sharded import ShardedParameters


@contextmanager
def rank_of(ranks, *, rank=0, **degrees):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = ParallelDims(world_size=ranks, **degrees)
        mesh.build_mesh("cpu")
        yield mesh
    finally:
        dist.destroy_process_group()


def groups(model):
    """Groups of FSDP2 with a module of each: last norm and head are one group."""
    states = {m._get_fsdp_state(): m for m in model.modules() if isinstance(m, FSDPModule)}
    return [(m, state._fsdp_param_group) for state, m in states.items() if state._fsdp_param_group is not None]


def held(model):
    """Numbers of parameters that this rank has memory for."""
    return sum(p._sharded_param_data.numel() for _, group in groups(model) for p in group.fsdp_params)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "glm_moe_dsa", "qwen3_next"])
@pytest.mark.parametrize(("ranks", "ep"), [(3, 1), (6, 2), (10, 2), (7, 1), (8, 2), (4, 1), (2, 2), (16, 2)])
def test_every_rank_allocates_what_the_planner_counts(family, ranks, ep):
    arch = ARCHS[family]
    facts = arch.facts
    parameters = sum(p.numel() for p in build_model(arch).parameters())
    padding = model_padding(facts, shards=ranks, ep=ep)
    for rank in (0, ranks - 1):
        with rank_of(ranks, rank=rank, ep=ep) as mesh:
            model = build_model(arch).to_empty(device="cpu")
            parallelize_decoder(model, mesh, dtype=torch.float32)
            assert held(model) * ranks == parameters + padding
    # buffers are among the facts' parameters, and whole on every rank
    buffers = facts.num_parameters() - parameters
    assert 0 <= buffers < 0.01 * parameters


@pytest.mark.parametrize(
    ("experts", "width", "ranks", "local"),
    [
        # eight experts over four ranks
        (16, 16, 8, (2, 32, 32)),
        # six experts over four ranks, which divide the rows of gate and up together
        (12, 16, 8, (6, 8, 32)),
        # four experts over eight ranks
        (8, 20, 16, (4, 5, 32)),
        # eight ranks divide the columns alone
        (8, 17, 16, (4, 34, 4)),
        # three ranks divide nothing
        (8, 17, 6, (2, 34, 32)),
    ],
)
def test_experts_are_cut_whole_or_along_what_divides(experts, width, ranks, local):
    arch = replace(ARCHS["qwen3_moe"], num_experts=experts, moe_intermediate_size=width, hidden_size=32)
    parameters = sum(p.numel() for p in build_model(arch).parameters())
    with rank_of(ranks, ep=2) as mesh:
        model = build_model(arch).to_empty(device="cpu")
        parallelize_decoder(model, mesh, dtype=torch.float32)
        assert held(model) * ranks == parameters + model_padding(arch.facts, shards=ranks, ep=2)
        shapes = {p.to_local().shape for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")}
    assert shapes == {local}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "glm_moe_dsa", "qwen3_next"])
@pytest.mark.parametrize(("ranks", "ep"), [(4, 1), (6, 2), (10, 2)])
def test_pinned_gradients_have_the_sizes_of_the_allocator(family, ranks, ep):
    """The next power of two of what FSDP2 allocates of each tensor, which rank 0 has most of."""
    arch = ARCHS[family]
    with rank_of(ranks, ep=ep) as mesh:
        model = build_model(arch).to_empty(device="cpu")
        parallelize_decoder(model, mesh, dtype=torch.float32)
        sizes = [4 * p.sharded_param.to_local().numel() for _, group in groups(model) for p in group.fsdp_params]
    assert rounded_gradients(arch.facts, shards=ranks, ep=ep) == sum(1 << (size - 1).bit_length() for size in sizes)


def test_parts_of_experts_are_whole_blocks_of_fp8_where_they_can_be():
    # GLM-5's gate and up over two and over twelve nodes: rows first, then columns
    assert sharded_dimension((31, 4096, 6144), 2) == 1
    assert sharded_dimension((32, 4096, 6144), 12) == 2
    # of 1,536 rows sixteen ranks have 96 each, of 6,144 columns 384
    assert sharded_dimension((8, 1536, 6144), 16) == 2
    assert sharded_dimension((8, 1536, 100), 16) == 1


@pytest.mark.parametrize(("ranks", "ep"), [(6, 2), (10, 2), (5, 1)])
def test_layers_are_gathered_with_their_padding(ranks, ep):
    arch = ARCHS["qwen3_moe"]
    with rank_of(ranks, ep=ep) as mesh:
        model = build_model(arch).to_empty(device="cpu")
        parallelize_decoder(model, mesh, dtype=torch.float32)
        layers = list(model.get_submodule("layers").children())
        found = []
        for layer in layers:
            own = list(groups(layer))
            for module, _ in own:
                module.unshard()
            found.append(sum(out.numel() for _, g in own for p in g.fsdp_params for out in p.all_gather_outputs))
    sizes = ShardedParameters(arch.facts, shards=ranks, ep=ep)
    assert found == sizes.wide
    assert sizes.wide > sizes.gathered


class Experts(nn.Module):
    """Some experts of a layer, each used by a token of its own."""

    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, 5, 3))

    def forward(self, x):
        return torch.bmm(self.weight, x).sum()


@pytest.mark.parametrize(("experts", "ranks", "each"), [(32, 12, 3), (32, 10, 4), (32, 14, 3), (32, 8, 4), (5, 4, 2)])
def test_gradients_lie_in_memory_of_the_padded_size(experts, ranks, each):
    """Rank 0 holds the most, the last rank the least; both allocate ``each`` experts for weights and for gradients."""
    rows = []
    for rank in (0, ranks - 1):
        with rank_of(ranks, rank=rank) as mesh:
            model = Experts(experts)
            fully_shard(model, mesh=mesh.sharding)
            model(torch.ones(experts, 3, 1)).backward()
            assert held(model) == each * 15
            rows.append(model.weight.to_local().shape[0])
            gradient = model.weight.grad.to_local()
            assert gradient.untyped_storage().nbytes() == 4 * each * 15
    assert rows == [each, max(0, experts - each * (ranks - 1))]


@pytest.mark.parametrize(("nodes", "share"), [(12, 1.0), (10, 40 / 32), (14, 42 / 32), (8, 1.0), (16, 1.0)], ids=str)
def test_the_reference_model_on_other_numbers_of_nodes(nodes, share):
    """Thirty-two experts of each of eight expert-parallel ranks, over as many ranks as there are nodes.

    Twelve divide the 6,144 numbers of the hidden dimension; ten and fourteen divide no dimension.
    """
    facts = load_facts("GLM-5")
    last = len(facts.layers) - 1
    with_experts = layer_padding(facts, last, shards=8 * nodes, ep=8)
    experts = facts.layers[last].mlp.num_experts * facts.layers[last].mlp.expert_parameters
    dense = with_experts.gathered - (share - 1) * experts / 8
    # a matrix is short of less than a row a rank; all others are small
    assert 0 <= dense < 0.05 * sum(facts.layer_parameters(last).values()) / 8
    assert with_experts.held == pytest.approx((share - 1) * experts + dense)
