"""What makes the host wait for the device during a micro-batch: nothing, but the sizes of expert parallelism.

A whole micro-batch, forward and backward, runs on ``meta``. That device has no numbers, so whoever asks for one fails:
`Tensor.item`, `Tensor.tolist`, a boolean mask as index, `torch.nonzero`, `torch.bincount`, `torch.unique`, a repetition
of unknown length. What it would take without complaint is counted: tensors that come from the host, and tensors of the
host as arguments. Collectives are those of torch's fake process group, which does nothing.

Allowed are

- one copy to the device, from pinned memory where there is an accelerator, that nobody waits for;
- with recurrent layers two more such copies: where convolutions and chunks begin, once for all layers;
- with ``ep`` one wait a sparse layer (`fetch_sizes`): an all-to-all with uneven parts wants their sizes on the host.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_meshes import ARCHS
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_testing import Rollouts, make_recipe

from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.dock.routes import RoutedExperts
from hpcrl.modeling.attention import latent_gather, sparse
from hpcrl.modeling.kernels import varlen
from hpcrl.modeling.layers import dispatch
from hpcrl.modeling.layers.dispatch import AllToAllDispatcher
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.parallel import collectives
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.recurrence import sequence_chunks, state_space
from hpcrl.modeling.spec import build_model
from hpcrl.trainer.memory.tools import apply_memory_tools
from hpcrl.trainer.parallel.mesh import Parallel
from hpcrl.trainer.step.freezing import freeze_parameters
from hpcrl.trainer.step.losses import make_loss
from hpcrl.trainer.step.nonfinite import GradientWatch
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.trainer.step.reference import ReferencePolicy

META = torch.device("meta")
RANKS = 2
MICRO_BATCHES = 2
# products of experts want rows of a multiple of 16 bytes
MODELS = {**ARCHS, "nemotron_h": replace(ARCHS["nemotron_h"], moe_latent_size=16)}
OPERATORS = (
    (sparse, "_choose"),
    (sparse, "_attend"),
    (collectives, "_all_to_all"),
    (collectives, "_all_gather"),
    (latent_gather, "_attend_latents"),
)


class Traffic(TorchDispatchMode):
    """Counts what goes from the host to the device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        # a tensor of the host with one number is handed over as that number
        host = any(tensor.device.type == "cpu" and tensor.dim() for tensor in given)
        if host and any(tensor.device == META for tensor in (*given, *made)):
            copied = func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking")
            self.seen["copy" if copied else str(func)] += 1
        return out

    def __enter__(self):
        self.stack = ExitStack()
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            self.stack.enter_context(mock.patch.object(owner, name, self._watched(owner, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.stack.close()
        return super().__exit__(*error)

    def _watched(self, owner, name):
        """These make a tensor of the device from numbers of the host, which a mode is not told of."""
        make = getattr(owner, name)

        def watching(*args, **kwargs):
            made = make(*args, **kwargs)
            self.seen.update([name] if made.device == META else [])
            return made

        return watching


def recipe_of(parallelism, memory, kind, kl):
    """With engines' experts taken in place of the routers'."""
    recipe = make_recipe("model", steps=9, parallelism=parallelism, memory=memory, router_replay=True)
    algorithm = AlgorithmConfig.model_validate({"loss": {"kind": kind}, "kl": kl})
    return recipe.model_copy(update={"algorithm": algorithm})


def policy_on_meta(arch, recipe, mesh):
    """As `TrainerPolicy` makes it, but not sharded: FSDP2 does not compute on ``meta``."""
    policy = TrainerPolicy.__new__(TrainerPolicy)
    policy.recipe, policy.arch, policy.parallel, policy.optimizer = recipe, arch, Parallel(mesh, META), None
    policy.model = build_model(arch, dtype=torch.bfloat16, device="meta")
    freeze_parameters(policy.model, recipe.trainer.freeze)
    policy._replay = recipe.trainer.router_replay
    policy._token_loss = make_loss(recipe.algorithm.loss)
    policy._watch = GradientWatch(policy.model)
    policy.reference = None
    if recipe.algorithm.kl is not None:
        policy.reference = ReferencePolicy.__new__(ReferencePolicy)
        # reading a copy is not what is watched
        vars(policy.reference).update(_recipe=recipe, _adapted=False, _model=policy.model, _every=None)
    for mlp in policy.model.modules():
        if isinstance(mlp, SparseMLP) and mesh.ep > 1:
            experts = mlp.gate.out_features
            for name, parameter in list(mlp.experts.named_parameters(recurse=False)):
                own = nn.Parameter(parameter.detach()[: experts // mesh.ep])
                mlp.experts.register_parameter(name, own)
            mlp.dispatcher = AllToAllDispatcher(experts, mesh.get_mesh("ep").get_group())
    apply_memory_tools(policy.model, recipe.trainer.memory, META, dtype=torch.bfloat16)
    return policy


def shard_of(policy):
    """Micro-batches of several rollouts, with routes of all layers."""
    shard = Rollouts(3, count=6).shard(micro_batches=MICRO_BATCHES)
    sparse = [mlp for mlp in policy.model.modules() if isinstance(mlp, SparseMLP)]
    shape = policy.arch.num_hidden_layers, sparse[0].gate.top_k

    def routed(micro_batch):
        tokens = len(micro_batch.token_ids)
        experts = np.broadcast_to(np.arange(shape[1], dtype=np.uint8), (tokens, *shape))
        routes = RoutedExperts.of(experts, np.ones(tokens, np.uint8))
        return msgspec.structs.replace(micro_batch, routed_experts=routes)

    return msgspec.structs.replace(shard, micro_batches=[routed(each) for each in shard.micro_batches]), len(sparse)


class Sizes:
    """Stands for `fetch_sizes`, which is allowed to wait; says numbers that add up."""

    def __init__(self):
        self.waits, self.agree = 0, AllToAllDispatcher._agree

    def patch(self):
        def agree(dispatcher, flat):
            self.rows = flat.numel()
            return self.agree(dispatcher, flat)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(dispatch, "fetch_sizes", self))
        stack.enter_context(mock.patch.object(AllToAllDispatcher, "_agree", agree))
        return stack

    def __call__(self, sizes):
        assert sizes.shape == (2, RANKS)
        self.waits += 1
        return [[self.rows // 2, self.rows - self.rows // 2]] * 2


def watch(family, parallelism, memory, kind, kl):
    """What a step does, a micro-batch: traffic from host to device, waits for sizes; and the sparse layers."""
    recipe = recipe_of(parallelism, memory, kind, kl)
    with ExitStack() as stack:
        dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=RANKS)
        stack.callback(dist.destroy_process_group)
        degrees = recipe.trainer.parallelism
        mesh = ParallelDims(world_size=RANKS, cp=degrees.cp, ep=degrees.ep)
        mesh.build_mesh("cpu")
        policy = policy_on_meta(MODELS[family], recipe, mesh)
        shard, layers = shard_of(policy)
        # operators of ours as what they are made of
        for owner, name in OPERATORS:
            stack.enter_context(mock.patch.object(owner, name, getattr(owner, name)._init_fn))
        state_space._inputs.cache_clear()
        sequence_chunks.sequence_chunks.cache_clear()
        sizes, traffic = Sizes(), Traffic()
        with sizes.patch(), traffic:
            policy.forward_backward(shard)
        assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    return {name: count / MICRO_BATCHES for name, count in traffic.seen.items()}, sizes.waits, layers


ULYSSES, RING, GATHER = ({"cp": 2, "cp_scheme": scheme} for scheme in ("ulysses", "ring", "gather"))
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}


@pytest.mark.parametrize(
    ("family", "parallelism", "memory"),
    [
        *[(family, {}, {}) for family in MODELS],
        *[("glm_moe_dsa", {}, memory) for memory in (FULL, SELECTIVE, {"lm_head_chunk_tokens": 4})],
        *[("qwen3_moe", parallelism, {}) for parallelism in (ULYSSES, RING, {"ep": 2})],
        *[("glm_moe_dsa", {"cp": 2, "ep": 2}, memory) for memory in ({}, FULL, SELECTIVE)],
        ("minimax_m2", RING | {"ep": 2}, FULL),
        *[("deepseek_v3", GATHER, memory) for memory in ({}, SELECTIVE)],
        ("deepseek_v3", GATHER | {"ep": 2}, FULL),
    ],
)
def test_the_host_waits_for_nothing_but_sizes_of_expert_parallelism(family, parallelism, memory):
    # the loss that has sums over rollouts
    expect_no_waits(family, parallelism, memory, "gspo")


@pytest.mark.parametrize("kind", ["masked_ratio", "icepop", "tis", "ppo_clip", "cispo"])
def test_the_host_waits_for_no_loss_in_pieces(kind):
    expect_no_waits("qwen3_moe", {}, {"lm_head_chunk_tokens": 4}, kind)


@pytest.mark.parametrize("estimator", ["weighted_k3", "k3"])
def test_the_host_does_not_wait_for_the_start_model(estimator):
    expect_no_waits("qwen3_moe", {}, {}, "gspo", {"coefficient": 0.1, "estimator": estimator})


def expect_no_waits(family, parallelism, memory, kind, kl=None):
    seen, waits, layers = watch(family, parallelism, memory, kind, kl)
    assert seen == {"copy": 1 if MODELS[family].state is None else 3}
    # recomputation does not ask again
    assert waits == (MICRO_BATCHES * layers if parallelism.get("ep") else 0)


def test_starts_of_sequences_go_to_the_device_once_for_all_layers():
    """What FlashAttention takes, which itself needs a GPU."""
    varlen._on_device.cache_clear()
    q = torch.empty(12, 4, 8, device=META)
    segments = varlen.Segments((0, 5, 12), (0, 5, 12), causal=True)
    with Traffic() as traffic:
        for _ in range(3):
            starts, _, longest, _ = varlen._starts(segments, q)
    assert (traffic.seen, starts.shape, longest) == ({"copy": 1}, (3,), 7)
    assert starts.dtype == torch.int32


@pytest.mark.parametrize(
    "wait",
    [
        lambda x, _: x.sum().item(),
        lambda x, _: x.tolist(),
        lambda x, _: bool(x.any()),
        lambda x, _: x[x > 0],
        lambda x, _: x.nonzero(),
        lambda x, _: torch.bincount(x, minlength=4),
        lambda x, _: torch.unique_consecutive(x),
        lambda x, _: torch.repeat_interleave(x, x),
        lambda x, _: x.cpu(),
        lambda x, host: x + host.to(META),
        lambda x, host: x[host],
        lambda x, host: torch.tensor([1, 2, 3], device=META),
    ],
)
def test_what_waits_is_found(wait):
    x, host = torch.zeros(3, dtype=torch.int64, device=META), torch.arange(3)
    with Traffic() as traffic:
        try:
            wait(x, host)
        except (NotImplementedError, RuntimeError):
            return
    assert traffic.seen.total()
    assert not traffic.seen["copy"]
