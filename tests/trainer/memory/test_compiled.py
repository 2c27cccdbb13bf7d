"""Compiled layers: the same losses and gradients, few graphs, and what they need is looked for."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_memory_tools import FAMILIES, far
from test_memory_tools import train as train_with
from trainer_testing import run_ranks, tiny_arch, tiny_model, write_model_dir

from hpcrl.errors import UsageError
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.context import ReplayedExperts
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import Qwen3Arch
from hpcrl.trainer.memory import compiled
from hpcrl.trainer.parallel.mesh import Parallel, distributed

COMPILED = {"compile": True}
#: activations wait in host memory, and layers are computed again from there
SAVING = {"activation_checkpointing": "full", "activation_offload": True, "lm_head_chunk_tokens": 3}


@contextmanager
def backend(name):
    """Graphs as they are, without kernels: these take most of the time."""
    before, compiled.BACKEND = compiled.BACKEND, name
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield torch._dynamo.utils.counters["stats"]
    finally:
        compiled.BACKEND = before
        torch._dynamo.reset()


def test_other_lengths_and_more_layers_take_no_other_graphs():
    # more layers than torch compiles of one function before it gives up
    arch = tiny_arch(num_hidden_layers=10)
    model, plain, found = tiny_model(arch), tiny_model(arch), []
    with backend("eager") as counted:
        compiled.compile_layers(model, torch.float32)
        for starts in ((0, 7, 12), (0, 5, 9, 20), (0, 31)):
            for each in (model, plain):
                context = PackedAttention(torch.tensor(starts)).context()
                each(torch.arange(starts[-1]), context).logsumexp(-1).sum().backward()
            found.append(counted["unique_graphs"])
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert 0 < found[0] < len(model.layers)
    assert found[0] == found[1] == found[2]


@pytest.fixture
def spaces():
    """Whether torch is at a place at which its compiler cannot be used."""
    return " " in torch.__file__


def test_a_path_with_spaces_is_named_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/opt/my tools/torch/__init__.py")
    wanted = "(?s)torch is in /opt/my tools/torch, a path with spaces.*hint: set trainer.memory.compile: false"
    with pytest.raises(UsageError, match=wanted):
        compiled.find_compiler(torch.device("cpu"))
    with backend("eager"):
        compiled.find_compiler(torch.device("cpu"))


def test_a_missing_compiler_is_named_with_a_way_out(monkeypatch, spaces):
    if not spaces:
        compiled.find_compiler(torch.device("cpu"))
    monkeypatch.setenv("PATH", "/nowhere")
    wanted = r"(?s)a C\+\+ compiler, and there is none.*hint: set trainer.memory.compile: false"
    with pytest.raises(UsageError, match=wanted):
        compiled.find_compiler(torch.device("cpu"))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_parameters_on_the_host_go_with_compiled_layers(tmp_path):
    model_dir = write_model_dir(tmp_path / "model", FAMILIES["qwen3_moe"])
    with distributed(timeout_s=120) as parallel:
        wanted = train_with(model_dir, parallel, {})
        with backend("eager") as counted:
            found = train_with(model_dir, parallel, {"parameter_offload": True, **COMPILED})
            assert counted["unique_graphs"]
    assert far(found, wanted) == []


def test_replayed_experts_go_with_compiled_layers():
    """Routers take what the batch says, which no graph has a part of."""
    arch, starts = FAMILIES["qwen3_moe"], (0, 7, 12)
    model, plain, columns = tiny_model(arch), tiny_model(arch), {layer: layer for layer in range(2)}
    own = torch.stack([torch.randperm(8)[:2] for _ in range(24)]).view(12, 2, 2).to(torch.uint8)
    replay = ReplayedExperts(own, torch.arange(12) < 10, columns)
    with backend("eager") as counted:
        compiled.compile_layers(model, torch.float32)
        for each in (model, plain):
            context = replace(PackedAttention(torch.tensor(starts)).context(), replay=replay)
            each(torch.arange(12), context).logsumexp(-1).sum().backward()
        assert counted["unique_graphs"]
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_experts_in_bfloat16_are_compiled_too():
    """Within what rounding makes of sums in another order: gradients are as near to those in float32 as without."""
    arch = replace(tiny_arch(num_experts=8, num_experts_per_tok=2), moe_intermediate_size=32)
    models = [tiny_model(arch) for _ in range(3)]
    exact, plain, own = models[0], models[1].bfloat16(), models[2].bfloat16()
    with backend("aot_eager") as counted:
        compiled.compile_layers(own, torch.bfloat16)
        for model in models:
            model(torch.arange(12), PackedAttention(torch.tensor((0, 7, 12))).context()).logsumexp(-1).sum().backward()
        assert counted["unique_graphs"]
    for (name, parameter), *others in zip(exact.named_parameters(), plain.parameters(), own.parameters(), strict=True):
        without, compiled_ = ((other.grad.float() - parameter.grad).norm() for other in others)
        assert compiled_ <= 1.5 * without + 1e-3 * parameter.grad.norm(), name


def wrong(model_dir, parallel):
    """What compiled layers compute otherwise than those that are not, by tools beside."""
    found = {}
    # with what separates a pass into a forward and a backward graph; most graphs of the first are those of the second,
    # and making them is all that takes time
    with backend("aot_eager") as counted:
        for memory in ({}, SAVING):
            before = counted["calls_captured"]
            wanted = train_with(model_dir, parallel, memory)
            found[str(memory)] = far(train_with(model_dir, parallel, {**memory, **COMPILED}), wanted)
            assert counted["calls_captured"] > before
    return {memory: names for memory, names in found.items() if names}


def on_meshes(rank, model_dir):
    with distributed(timeout_s=120) as start:
        mesh = ParallelDims(world_size=start.world.size, ep=2, cp=2)
        mesh.build_mesh("cpu")
        return wrong(model_dir, Parallel(mesh, start.device))


@pytest.mark.campaign
@pytest.mark.timeout(900)  # 90 s of a processor; four times that were seen beside engines that start
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_graphs_compute_the_same(tmp_path, family):
    with distributed(timeout_s=120) as parallel:
        assert wrong(write_model_dir(tmp_path / "model", FAMILIES[family]), parallel) == {}


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_graphs_compute_the_same_where_tokens_travel(tmp_path):
    model_dir = write_model_dir(tmp_path / "model", FAMILIES["qwen3_moe"])
    assert run_ranks(2, on_meshes, model_dir, timeout_s=600.0) == [{}, {}]


@pytest.mark.slow
@pytest.mark.campaign
# a C++ compiler, many times: on a slow or busy machine it takes minutes
@pytest.mark.timeout(1200)
def test_kernels_compute_the_same(tmp_path, spaces):
    """With torch's compiler and the machine's."""
    arch = Qwen3Arch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    model_dir = write_model_dir(tmp_path / "model", arch)
    with distributed(timeout_s=120) as parallel:
        wanted = train_with(model_dir, parallel, SAVING)
        if spaces:
            with pytest.raises(UsageError, match="a path with spaces"):
                train_with(model_dir, parallel, {**SAVING, **COMPILED})
            return
        with backend("inductor") as counted:
            assert far(train_with(model_dir, parallel, {**SAVING, **COMPILED}), wanted) == []
            assert counted["unique_graphs"]
