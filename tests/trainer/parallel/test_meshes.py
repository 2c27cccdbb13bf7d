"""Expert and context parallelism: losses, gradients, weights and versions as of one rank, on every mesh."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_checkpoint import state_of, whole
from test_publish import make_publisher
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_arch, write_model_dir

from hpcrl.checkpoints import CheckpointLedger, CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.modeling.blocks import local_block
from hpcrl.modeling.layers.dispatch import AllToAllDispatcher, LocalDispatcher
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.parallel.collectives import gather_rows
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import (
    DeepseekV3Arch,
    Glm4MoeArch,
    GlmMoeDsaArch,
    GptOssArch,
    LlamaArch,
    MinimaxM2Arch,
    MistralArch,
    NemotronHArch,
    Qwen2Arch,
    Qwen3Arch,
    Qwen3NextArch,
    Qwen35Arch,
    Qwen35MoeArch,
    load_arch,
)
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.saver import CheckpointSaver
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.store import HandoffStore

STEPS = 2
#: float32 sums in another order; gradients are of the order 1, weights move by 1e-3 a step, and Adam makes steps of
#: that size from gradients of the order of their rounding too
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
SIZES = {
    "vocab_size": 103,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
INDEXER = {"index_n_heads": 16, "index_head_dim": 10, "index_topk": 4, "indexer_types": ("full", "shared")}
SHAPE_OF_DELTA = {name: size for name, size in SIZES.items() if not name.startswith(("moe", "first"))} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
SHARED = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
#: eight experts lie whole on four ranks; of six, of which two ranks get three, and of two each is cut by rows
ARCHS = {
    "qwen3_moe": tiny_arch(num_experts=8, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Arch(
        **{**SIZES, **LATENT, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        routed_scaling_factor=1.0,
    ),
    "glm4_moe": Glm4MoeArch(
        **SIZES,
        n_routed_experts=2,
        num_experts_per_tok=1,
        # else the one weight is 1, and the router's gradient nothing but rounding
        norm_topk_prob=False,
        num_key_value_heads=2,
        head_dim=8,
        use_qk_norm=True,
    ),
    "glm_moe_dsa": GlmMoeDsaArch(**SIZES, **LATENT, **INDEXER, n_routed_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssArch(
        **{name: size for name, size in SIZES.items() if name in {f.name for f in fields(GptOssArch)}},
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
    ),
    "minimax_m2": MinimaxM2Arch(
        **{name: size for name, size in SIZES.items() if name in {f.name for f in fields(MinimaxM2Arch)}},
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=8,
        partial_rotary_factor=0.5,
    ),
    "nemotron_h": NemotronHArch(
        **{**SIZES, "num_hidden_layers": 4},
        layers_block_type=("mamba", "attention", "mamba", "moe"),
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_latent_size=12,
        moe_shared_expert_intermediate_size=16,
        mamba_num_heads=6,
        mamba_head_dim=4,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=4,
    ),
    "qwen3_next": Qwen3NextArch(**SHAPE_OF_DELTA, **SHARED, mlp_only_layers=(1,)),
    "qwen3_5_moe_text": Qwen35MoeArch(
        **{name: size for name, size in SHAPE_OF_DELTA.items() if name != "intermediate_size"}, **SHARED
    ),
}
DENSE = {name: SIZES[name] for name in (f.name for f in fields(Qwen2Arch)) if name in SIZES}
DENSE |= {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    **ARCHS,
    "llama": LlamaArch(**DENSE, attention_bias=True, tie_word_embeddings=True),
    "mistral": MistralArch(**DENSE, sliding_window=5),
    "qwen2": Qwen2Arch(**DENSE),
    "qwen3": Qwen3Arch(
        **{name: size for name, size in SIZES.items() if name in {f.name for f in fields(Qwen3Arch)}},
        num_key_value_heads=2,
        head_dim=8,
    ),
}
MODELS["qwen3_5_text"] = Qwen35Arch(**SHAPE_OF_DELTA, tie_word_embeddings=True)
"""The models without experts, too."""
ODD = {"nemotron_h of nine": replace(ARCHS["nemotron_h"], n_routed_experts=6, moe_latent_size=9)}
"""Two ranks divide neither three experts nor nine rows: a matrix is cut by columns. Products of groups in bfloat16 take
no rows of nine."""
MESHES = {
    2: [
        ("qwen3_moe", {"ep": 2}),
        ("deepseek_v3", {"ep": 2}),
        ("glm4_moe", {"ep": 2}),
        ("glm_moe_dsa", {"ep": 2}),
        ("qwen3_moe", {"cp": 2}),
        ("glm_moe_dsa", {"cp": 2}),
        ("minimax_m2", {"ep": 2}),
        ("minimax_m2", {"cp": 2}),
        ("gpt_oss", {"ep": 2}),
        ("gpt_oss", {"cp": 2}),
        ("nemotron_h", {"ep": 2}),
        ("nemotron_h", {"dp_replicate": 2}),
        ("qwen3_next", {"ep": 2}),
        ("qwen3_next", {"dp_replicate": 2}),
        ("qwen3_5_moe_text", {"ep": 2}),
        ("qwen3_5_moe_text", {}),
        ("qwen3_5_text", {"dp_replicate": 2}),
        ("qwen3_5_text", {}),
        ("qwen3", {"cp": 2}),
        ("qwen3", {"dp_replicate": 2}),
        ("qwen2", {"cp": 2}),
        ("qwen2", {}),
        ("llama", {"cp": 2}),
        ("llama", {"dp_replicate": 2}),
        ("mistral", {"cp": 2}),
        ("mistral", {"dp_replicate": 2}),
        # what the first mesh of a family saved is read on its others
        ("deepseek_v3", {"cp": 2}),
        ("glm4_moe", {"dp_replicate": 2}),
    ],
    4: [
        ("qwen3_moe", {"ep": 2}),
        ("qwen3_moe", {"ep": 4}),
        ("qwen3_moe", {"ep": 2, "dp_replicate": 2}),
        ("deepseek_v3", {"ep": 2}),
        ("glm4_moe", {"ep": 2}),
        ("qwen3_moe", {"cp": 4, "ep": 4}),
        ("deepseek_v3", {"cp": 2, "ep": 2}),
        ("glm4_moe", {"cp": 2}),
        ("glm_moe_dsa", {"cp": 4, "ep": 2}),
        ("minimax_m2", {"cp": 2, "ep": 4}),
        ("gpt_oss", {"cp": 2, "ep": 4}),
        ("nemotron_h", {"ep": 4}),
        ("nemotron_h", {"ep": 2, "dp_replicate": 2}),
        ("nemotron_h of nine", {"ep": 2}),
        ("qwen3_next", {"ep": 4}),
        ("qwen3_next", {"ep": 2, "dp_replicate": 2}),
        ("qwen3_5_moe_text", {"ep": 2}),
        ("qwen3_5_text", {}),
        ("qwen3", {"cp": 2}),
        ("qwen3", {"cp": 2, "dp_replicate": 2}),
        ("qwen3", {}),
        ("qwen2", {"cp": 2, "dp_replicate": 2}),
        ("llama", {}),
        ("mistral", {"cp": 2}),
        ("glm_moe_dsa", {"ep": 4}),
        ("minimax_m2", {"cp": 2}),
        ("gpt_oss", {"ep": 4}),
    ],
}


def starve(model):
    """Let no token choose an expert of the second half: with expert parallelism a rank gets no row at all."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[len(buffer) // 2 :] = -5.0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    return {
        name: write_model_dir(root / name, arch, change=starve if name == "deepseek_v3" else lambda model: None)
        for name, arch in {**MODELS, **ODD}.items()
    }


def train(policy):
    """Losses, norms, first gradient and last weights."""
    data, world = policy.parallel.data, policy.parallel.world
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        losses.append(policy.forward_backward(Rollouts(step).shard(data.rank, data.size)).reduce(world).loss)
        if step == 1:
            gradients = {n: whole(p.grad).tolist() for n, p in policy.model.named_parameters() if p.requires_grad}
        norms.append(policy.optimizer_step(step)[0])
    return losses, norms, gradients, {n: whole(p).tolist() for n, p in policy.model.named_parameters()}


@contextmanager
def counted_reads():
    """Bytes that are read of safetensors, by name of the tensor."""
    found, read = Counter(), ModelFiles.read

    def counting(self, name, low, high):
        data = read(self, name, low, high)
        found[name] += len(data)
        return data

    ModelFiles.read = counting
    try:
        yield found
    finally:
        ModelFiles.read = read


def new_policy(model_dir, parallel, *, load=True):
    recipe = make_recipe(model_dir, steps=9)
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir if load else None)


def publish(policy, model_dir, directory):
    publisher = make_publisher(HandoffStore(directory), policy.parallel, model_dir)
    publisher.publish(policy.model, 0)
    publisher.wait()


def held_numbers(policy):
    """What of the last layer's experts, or of its dense part, this rank holds, and how many of their numbers."""
    sparse = [module.experts for module in policy.model.modules() if isinstance(module, SparseMLP)]
    part = sparse[-1] if sparse else policy.model.layers[-1].mlp
    blocks = [local_block(parameter) for parameter in part.parameters()]
    return blocks, sum(parameter.to_local().numel() for parameter in part.parameters())


def on_meshes(rank, models, root):
    """Everything of this file that needs ranks, in one set of processes; results of each mesh."""
    results, saved = [], {}
    with distributed(timeout_s=60) as start:
        size = start.world.size
        check_dispatch(rank, size)
        check_gather(start.world.group)
        for number, (family, degrees) in enumerate(MESHES[size]):
            mesh = ParallelDims(world_size=size, **degrees)
            mesh.build_mesh("cpu")
            parallel = Parallel(mesh, start.device)
            with counted_reads() as read:
                policy = new_policy(models[family], parallel)
            publish(policy, models[family], root / f"weights-{size}-{number}")
            results.append((held_numbers(policy), train(policy), dict(read)))
            checkpoints = root / f"checkpoints-{size}-{family}"
            if family not in saved:
                save(policy, checkpoints)
                saved[family] = state_of(policy)
            else:
                other = new_policy(models[family], parallel, load=False)
                entry = CheckpointLedger(checkpoints).newest_verified().entry
                load_checkpoint(entry, other.model, other.optimizer, parallel)
                assert_same(state_of(other), saved[family], (family, degrees))
    return results


def assert_same(restored, saved, what):
    """Parameters, correction biases, moments, steps of the optimizer and random numbers, to the last bit."""
    assert restored.keys() == saved.keys(), what
    assert restored == saved, (what, [name for name in saved if restored[name] != saved[name]])


def save(policy, directory):
    world = policy.parallel.world
    writer = world.on_leader(lambda: CheckpointWriter.claim(directory, 1), "claiming")
    saver = CheckpointSaver(writer, world, CheckpointConfig(mode="sync"), lambda kind, **data: None)
    saver.start(policy, STEPS, orchestrator_state=lambda: b"orchestrator")
    if (error := saver.wait(30.0)) is not None:
        raise error


def check_dispatch(rank, size):
    """Every kind of choice: outputs and gradients as with all experts here."""
    experts, k, width = 2 * size, 2, 5
    mesh = ParallelDims(world_size=size, ep=size)
    mesh.build_mesh("cpu")
    over_ranks, here = AllToAllDispatcher(experts, mesh.get_mesh("ep").get_group()), LocalDispatcher(experts)
    generator = torch.Generator().manual_seed(rank)
    scale = torch.arange(1.0, experts + 1)
    cases = ((7, (0, 1)), (1 if rank else 9, range(experts)), (0 if rank else 4, (experts - 1, 2)))
    for dtype, (tokens, choices) in product((torch.float32, torch.bfloat16), cases):
        x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
        weights = torch.rand(tokens, k, generator=generator, requires_grad=True)
        allowed = torch.tensor(list(choices))
        picked = torch.rand(tokens, len(allowed), generator=generator).argsort(1)[:, :k]
        chosen, found = allowed[picked], []
        for dispatcher, own in ((over_ranks, scale.view(size, -1)[rank]), (here, scale)):
            rows, counts, combine = dispatcher.dispatch(x, weights, chosen)
            assert len(rows) == int(counts.sum())
            y = combine(rows * own.to(dtype).repeat_interleave(counts)[:, None])
            found.append((y, *torch.autograd.grad(y.square().sum(), (x, weights))))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}))


def check_gather(group):
    """Each rank's gradient of a gathered row counts, on the rank that the row is from."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = torch.full((2, 3), float(rank), requires_grad=True)
    everywhere, others = gather_rows(rows, group, beside=torch.full((2, 1), 10.0 + rank, requires_grad=True))
    assert others.tolist() == [[10.0 + i] for i in range(size) for _ in range(2)]
    assert not others.requires_grad
    assert everywhere[:, 0].tolist() == [float(i) for i in range(size) for _ in range(2)]
    (everywhere * (rank + 1)).sum().backward()
    assert torch.equal(rows.grad, torch.full((2, 3), size * (size + 1) / 2))


@pytest.fixture(scope="module")
def references(models):
    with distributed(timeout_s=120) as parallel:
        return {family: train(new_policy(model_dir, parallel)) for family, model_dir in models.items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_every_mesh_trains_publishes_and_restores_as_one_rank(tmp_path, models, references, size):
    ranks = run_ranks(size, on_meshes, models, tmp_path, timeout_s=240.0)
    for number, (family, degrees) in enumerate(MESHES[size]):
        start = load_file(models[family] / "model.safetensors")
        (file,) = (tmp_path / f"weights-{size}-{number}" / "v000000").glob("*.safetensors")
        published = load_file(file)
        assert published.keys() == start.keys()
        assert all(torch.equal(published[name], start[name]) for name in start), (family, degrees)
        # each rank reads its own shards alone; buffers are whole on all
        copies = degrees.get("dp_replicate", 1)
        read = sum((Counter(rank[number][2]) for rank in ranks), Counter())
        whole_on = {name: size if name.endswith("_correction_bias") else copies for name in start}
        assert read == {name: whole_on[name] * tensor.nbytes for name, tensor in start.items()}, (family, degrees)
        check_shards([rank[number][0] for rank in ranks], family, degrees)
        losses, norms, gradients, weights = references[family]
        for rank in ranks:
            found = rank[number][1]
            assert found[0] == pytest.approx(losses, rel=1e-4, abs=1e-6), (family, degrees)
            assert found[1] == pytest.approx(norms, rel=1e-4), (family, degrees)
            for name in gradients:
                ours, theirs = torch.tensor(found[2][name]), torch.tensor(gradients[name])
                torch.testing.assert_close(ours, theirs, **GRADIENT_TOLERANCE)
                ours, theirs = torch.tensor(found[3][name]), torch.tensor(weights[name])
                torch.testing.assert_close(ours, theirs, **WEIGHT_TOLERANCE)


def check_shards(held, family, degrees):
    """Every number of the experts, or of the dense part, lies on as many ranks as there are copies; parts are equal."""
    arch, copies = {**MODELS, **ODD}[family], degrees.get("dp_replicate", 1)
    moe = [layer for _, layer in arch.facts.moe_layers]
    whole_layer = (
        moe[0].num_experts * moe[0].expert_parameters if moe else 3 * arch.hidden_size * arch.intermediate_size
    )
    assert sum(numbers for _, numbers in held) == copies * whole_layer
    if "ep" in degrees:
        assert len({str(blocks) for blocks, _ in held}) == len(held) // copies


def test_norm_exceeds_the_limit(references):
    """Or nothing above would show that gradients of two meshes are clipped by one norm."""
    assert all(norm > 1.0 for _, norms, *_ in references.values() for norm in norms)
