"""Ways to share the context of rollouts among ranks: a ring, gathered latents, and losses of whole rollouts."""

import itertools
from collections import Counter

import pytest
import torch
from losses_lab import loss_config
from test_meshes import GRADIENT_TOLERANCE, MODELS, WEIGHT_TOLERANCE, train
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_testing import Rollouts, make_recipe, run_ranks, write_model_dir

from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.modeling.attention.balanced_chunks import head_tail
from hpcrl.modeling.attention.latent_gather import LatentGather
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.attention.ring import RingAttention
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import Qwen3Arch, load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.step.policy import TrainerPolicy

DENSE = Qwen3Arch(
    vocab_size=103,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=6,
    # heads that no two ranks could share
    num_key_value_heads=3,
    head_dim=8,
    intermediate_size=40,
    max_position_embeddings=128,
)
RANKS = 4
#: what is trained: model, degrees, scheme, loss
CASES = [
    ("qwen3", {"cp": 4}, "ring", "gspo"),
    ("qwen2", {"cp": 4}, "ring", "gspo"),
    ("llama", {"cp": 2}, "ring", "gspo"),
    ("qwen3_moe", {"cp": 2, "ep": 2}, "ring", "masked_ratio"),
    ("deepseek_v3", {"cp": 4, "ep": 2}, "ring", "masked_ratio"),
    ("deepseek_v3", {"cp": 4}, "gather", "gspo"),
    ("deepseek_v3", {"cp": 2, "ep": 2}, "gather", "masked_ratio"),
    ("deepseek_v3", {"cp": 2, "dp_replicate": 2}, "gather", "gspo"),
    ("glm_moe_dsa", {"cp": 4}, "ulysses", "gspo"),
]
#: starts of sequences, some shorter than there are chunks; query heads, key heads, key and value channels
STARTS = ((0, 50), (0, 3, 4, 29, 31, 90), (0, 16, 32))
SHAPES = ((6, 3, 8, 8), (4, 4, 12, 5))
#: heads, channels of a key that are not rotated and that are, channels of values and latents
LATENT_SHAPES = ((5, 6, 4, 7, 9), (4, 8, 2, 8, 6))
#: operators of a layer that gathers latents, forward and backward
GATHERED = {"hpcrl::all_gather": 1, "hpcrl::attend_latents": 1, "hpcrl::all_to_all": 1}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_chunks_have_every_token_once_and_equal_work(ranks):
    starts = (0, 1000, 1001, 1640, 9640)
    chunks = [head_tail(starts, rank, ranks) for rank in range(ranks)]
    assert sorted(token for part in chunks for token in part.tokens) == list(range(starts[-1]))
    # keys that a query sees, up to itself
    position = [token - start for start, end in itertools.pairwise(starts) for token in range(start, end)]
    work = [sum(position[token] + 1 for token in part.tokens) for part in chunks]
    assert max(work) < 1.01 * min(work)


def attention_of(run, own, inputs, sinks, weights):
    """Output, and gradients of inputs and sinks, of this rank's tokens."""
    leaves = [x[own].clone().requires_grad_() for x in inputs]
    sinks = sinks.clone().requires_grad_()
    out = run(0, *leaves, scale=0.3, sinks=sinks)
    return [out, *torch.autograd.grad(out, [*leaves, sinks], weights[own])]


def check_ring(cp):
    """On the ranks of ``cp``: as packed attention on one; and the same bits twice."""
    mesh = ParallelDims(world_size=RANKS, cp=cp)
    mesh.build_mesh("cpu")
    group = mesh.get_mesh("cp").get_group()
    for starts, (heads, key_heads, key_dim, value_dim) in itertools.product(STARTS, SHAPES):
        torch.manual_seed(0)
        sizes = ((heads, key_dim), (key_heads, key_dim), (key_heads, value_dim))
        inputs = [torch.randn(starts[-1], *size, dtype=torch.float64) for size in sizes]
        sinks, weights = torch.randn(heads).double(), torch.randn(starts[-1], heads, value_dim).double()
        cu_seqlens = torch.tensor(starts)
        ring = RingAttention(cu_seqlens, group)
        expected = attention_of(PackedAttention(cu_seqlens), slice(None), inputs, sinks, weights)
        found, again = (attention_of(ring, ring.own, inputs, sinks, weights) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        torch.distributed.all_reduce(found[4], group=group)
        for ours, theirs in zip(found[:4], expected, strict=False):
            torch.testing.assert_close(ours, theirs[ring.own], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[4], expected[4], rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="window"):
        RingAttention(torch.tensor([0, 8]), group)(0, *[torch.zeros(1, 1, 1)] * 3, window=4)


def latent_attention_of(run, own, inputs, weights):
    """Output, and gradients of queries, latents and the expanding matrix."""
    q, latents, expand = inputs
    leaves = [x.clone().requires_grad_() for x in (q[own], latents[own], expand)]
    out = run(*leaves)
    return [out, *torch.autograd.grad(out, leaves, weights[own])]


def expanded_attention(cu_seqlens, q, latents, expand):
    """As one rank computes it, with keys and values of all heads at once."""
    heads, latent_dim = q.shape[1], expand.shape[1]
    rotary = latents[:, None, latent_dim:].expand(-1, heads, -1)
    made = (latents[:, :latent_dim] @ expand.T).view(len(latents), heads, -1)
    unrotated = q.shape[2] - rotary.shape[2]
    k = torch.cat((made[..., :unrotated], rotary), dim=-1)
    return PackedAttention(cu_seqlens)(0, q, k, made[..., unrotated:], scale=0.3)


class Collectives(TorchDispatchMode):
    """Counts what ranks of a model exchange, and operators of ours, by their names."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(("c10d::", "hpcrl::")):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def check_gathered_latents(cp):
    """On the ranks of ``cp``: as one rank that expands all; the same bits twice; one collective each way."""
    mesh = ParallelDims(world_size=RANKS, cp=cp)
    mesh.build_mesh("cpu")
    group = mesh.get_mesh("cp").get_group()
    for starts, (heads, unrotated, rotary, value, latent) in itertools.product((*STARTS, (0, 5)), LATENT_SHAPES):
        torch.manual_seed(0)
        tokens = starts[-1]
        sizes = ((tokens, heads, unrotated + rotary), (tokens, latent + rotary), (heads * (unrotated + value), latent))
        inputs = [torch.randn(*size, dtype=torch.float64) for size in sizes]
        weights, cu_seqlens = torch.randn(tokens, heads, value).double(), torch.tensor(starts)
        gather = LatentGather(cu_seqlens, group)

        def run(*leaves, gather=gather):
            return gather.attend_latents(0, *leaves, scale=0.3)

        def plain(*leaves, cu_seqlens=cu_seqlens):
            return expanded_attention(cu_seqlens, *leaves)

        expected = latent_attention_of(plain, slice(None), inputs, weights)
        with Collectives() as collectives:
            found = latent_attention_of(run, gather.own, inputs, weights)
        assert collectives.seen == GATHERED
        again = latent_attention_of(run, gather.own, inputs, weights)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        torch.distributed.all_reduce(found[3], group=group)
        for ours, theirs in zip(found[:3], expected, strict=False):
            torch.testing.assert_close(ours, theirs[gather.own], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[3], expected[3], rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="latents"):
        LatentGather(torch.tensor([0, 8]), group)(3, *[torch.zeros(1, 1, 1)] * 3)


def exchanged(policy):
    """Operators of attention in a micro-batch's layer, forward and backward."""
    data, layers = policy.parallel.data, policy.model.arch.num_hidden_layers
    shard = Rollouts(1).shard(data.rank, data.size)
    with Collectives() as collectives:
        policy.forward_backward(shard)
    policy.optimizer.zero_grad()
    times = len(shard.micro_batches) * layers
    return {name: count / times for name, count in collectives.seen.items() if name.startswith("hpcrl::")}


def new_policy(model_dir, parallel, scheme, loss):
    recipe = make_recipe(model_dir, steps=9, parallelism={"cp_scheme": scheme})
    losses = loss_config(loss, clip_low=0.9, clip_high=4.0) if loss == "gspo" else loss_config(loss)
    recipe = recipe.model_copy(update={"algorithm": AlgorithmConfig(loss=losses)})
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def on_ranks(rank, models):
    results = []
    with distributed(timeout_s=60) as start:
        for cp in (2, RANKS):
            check_ring(cp)
            check_gathered_latents(cp)
        for family, degrees, scheme, loss in CASES:
            mesh = ParallelDims(world_size=RANKS, **degrees)
            mesh.build_mesh("cpu")
            policy = new_policy(models[family], Parallel(mesh, start.device), scheme, loss)
            if scheme == "gather" and "ep" not in degrees:
                # and the gradients of what was gathered, back to their ranks
                assert exchanged(policy) == GATHERED
            results.append(train(policy))
    return results


def test_every_way_trains_as_one_rank(tmp_path):
    archs = {name: MODELS[name] for name in ("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "qwen2", "llama")}
    archs["qwen3"] = DENSE
    models = {name: write_model_dir(tmp_path / name, arch) for name, arch in archs.items()}
    ranks = run_ranks(RANKS, on_ranks, models, timeout_s=240.0)
    with distributed(timeout_s=120) as parallel:
        wanted = {
            (family, loss): train(new_policy(models[family], parallel, "ulysses", loss)) for family, _, _, loss in CASES
        }
    for number, case in enumerate(CASES):
        for rank in ranks:
            assert_alike(rank[number], wanted[case[0], case[3]], case)


def assert_alike(found, wanted, case):
    """What `train` returns, beside the same of one rank."""
    losses, norms, gradients, weights = wanted
    assert min(norms) > 1e-2, case
    assert found[0] == pytest.approx(losses, rel=1e-4, abs=1e-6), case
    assert found[1] == pytest.approx(norms, rel=1e-4), case
    for name in gradients:
        ours, theirs = torch.tensor(found[2][name]), torch.tensor(gradients[name])
        torch.testing.assert_close(ours, theirs, **GRADIENT_TOLERANCE)
        ours, theirs = torch.tensor(found[3][name]), torch.tensor(weights[name])
        torch.testing.assert_close(ours, theirs, **WEIGHT_TOLERANCE)
