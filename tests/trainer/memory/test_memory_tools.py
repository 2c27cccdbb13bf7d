"""Memory tools of the trainer: the same losses, gradients and weights as without, on one rank and on two."""

from dataclasses import replace

import pytest
import torch
from test_checkpoint import state_of
from test_context_parallel import DENSE
from test_meshes import ARCHS, MODELS, save
from trainer_testing import Rollouts, make_recipe, run_ranks, tiny_model, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.layers.moe import SoftmaxRouter
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.memory.optimizer import HostAdamW
from hpcrl.trainer.memory.recompute import Recomputation
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.step import head
from hpcrl.trainer.step.policy import TrainerPolicy

STEPS = 2
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
#: each of these computes the very same numbers
TOOLS = {
    "full": FULL,
    "selective": SELECTIVE,
    "every second layer": {**SELECTIVE, "checkpoint_every_layers": 2},
    # 2 KiB: less than the input of a layer
    "inputs on the host": {**FULL, "activation_offload": True, "offload_in_flight_gib": 2**-19},
    "optimizer on the host": {"optimizer_offload": True},
    "parameters on the host": {"parameter_offload": True},
    "all but parameters": {**SELECTIVE, "activation_offload": True, "optimizer_offload": True},
}
#: and these the same but for the order of sums
REORDERING = {
    "head in pieces": {"lm_head_chunk_tokens": 3},
    "all": {
        "lm_head_chunk_tokens": "auto",
        **FULL,
        "activation_offload": True,
        "optimizer_offload": True,
    },
    "all with parameters on the host": {
        "lm_head_chunk_tokens": 3,
        **SELECTIVE,
        "activation_offload": True,
        "parameter_offload": True,
    },
}
#: so that a vocabulary of 103 is cut, too
PIECE_BYTES = 4 * 3 * 40
FAMILIES = {
    # head and embeddings are one parameter
    "qwen3_moe": replace(ARCHS["qwen3_moe"], tie_word_embeddings=True),
    "deepseek_v3": ARCHS["deepseek_v3"],
    "glm_moe_dsa": ARCHS["glm_moe_dsa"],
    "gpt_oss": ARCHS["gpt_oss"],
    "nemotron_h": ARCHS["nemotron_h"],
    "glm4_moe": ARCHS["glm4_moe"],
    "minimax_m2": ARCHS["minimax_m2"],
    "qwen3": DENSE,
    "llama": MODELS["llama"],
    "mistral": MODELS["mistral"],
    "qwen2": MODELS["qwen2"],
    "qwen3_next": ARCHS["qwen3_next"],
    "qwen3_5_moe_text": ARCHS["qwen3_5_moe_text"],
    "qwen3_5_text": MODELS["qwen3_5_text"],
}
#: what these have, others have too
ALIKE = {"glm4_moe", "llama", "minimax_m2", "mistral", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"}
#: of two ranks: tokens travel to experts, sequences are cut, both at once, only parameters are sharded
DEGREES = ({"ep": 2}, {"cp": 2}, {"cp": 2, "ep": 2}, {})
#: sinks and windows with both; states, which are not cut among ranks, with experts that are
MESHES = [(family, degrees) for family in ("qwen3_moe", "glm_moe_dsa") for degrees in DEGREES] + [
    ("gpt_oss", {"cp": 2, "ep": 2}),
    ("nemotron_h", {"ep": 2}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_model_dir(root / family, arch) for family, arch in FAMILIES.items()}


def train(model_dir, parallel, memory):
    """Losses and norms of two steps, the first gradients, and the weights after all."""
    recipe = make_recipe(model_dir, steps=9, memory=memory)
    policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
    data, found = parallel.data, {}
    for step in range(1, STEPS + 1):
        shard = Rollouts(step).shard(data.rank, data.size)
        found[f"loss {step}"] = torch.tensor(policy.forward_backward(shard).reduce(parallel.world).loss)
        if step == 1:
            trained = [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]
            found |= {f"gradient of {n}": p.grad.to_local().clone() for n, p in trained}
        found[f"norm {step}"] = torch.tensor(policy.optimizer_step(step)[0])
    return found | {f"weight {n}": p.detach().to_local().clone() for n, p in policy.model.named_parameters()}


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def far(found, wanted):
    """As `differing`, within what another order of sums makes of float32.

    Weights are left out: of a gradient of the order of its rounding Adam makes a whole step in either direction.
    """
    assert found.keys() == wanted.keys()
    compared = [name for name in wanted if not name.startswith("weight")]
    return [n for n in compared if not torch.allclose(found[n], wanted[n], rtol=1e-4, atol=1e-6)]


def wrong(model_dir, parallel):
    """What a tool computes otherwise than training without, by tool."""
    head.PIECE_BYTES, before = PIECE_BYTES, head.PIECE_BYTES
    # a bucket has a part of a parameter, or several
    HostAdamW.__init__.__kwdefaults__["bucket_bytes"] = 8 * 700
    try:
        wanted = train(model_dir, parallel, {})
        exact = {name: differing(train(model_dir, parallel, memory), wanted) for name, memory in TOOLS.items()}
        near = {name: far(train(model_dir, parallel, memory), wanted) for name, memory in REORDERING.items()}
    finally:
        head.PIECE_BYTES = before
    return {name: found for name, found in (exact | near).items() if found}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.campaign] if each in ALIKE else []) for each in FAMILIES]
)
def test_one_rank_computes_the_same(models, family):
    with distributed(timeout_s=120) as parallel:
        assert wrong(models[family], parallel) == {}


def on_meshes(rank, models):
    """What differs, by family, mesh and tool."""
    found = {}
    with distributed(timeout_s=60) as start:
        for family, degrees in MESHES:
            mesh = ParallelDims(world_size=start.world.size, **degrees)
            mesh.build_mesh("cpu")
            if differences := wrong(models[family], Parallel(mesh, start.device)):
                found[family, str(degrees)] = differences
    return found


@pytest.mark.campaign
def test_every_mesh_computes_the_same(models):
    assert run_ranks(2, on_meshes, models, timeout_s=240.0) == [{}, {}]


@pytest.mark.parametrize("before", [{}, {"optimizer_offload": True}, {"parameter_offload": True}], ids=str)
def test_a_checkpoint_continues_wherever_the_optimizer_is(tmp_path, models, before):
    def policy_with(memory, parallel, model_dir):
        recipe = make_recipe(models["qwen3_moe"], steps=9, memory=memory)
        return TrainerPolicy(recipe, load_arch(models["qwen3_moe"]), parallel, model_dir=model_dir)

    def step(policy, number):
        policy.forward_backward(Rollouts(number).shard())
        policy.optimizer_step(number)
        return state_of(policy)

    with distributed(timeout_s=120) as parallel:
        policy = policy_with(before, parallel, models["qwen3_moe"])
        for number in range(1, STEPS + 1):
            step(policy, number)
        save(policy, tmp_path)
        wanted = step(policy, STEPS + 1)
        entry = CheckpointLedger(tmp_path).newest_verified().entry
        for after in ({}, {"optimizer_offload": True}, {"parameter_offload": True}):
            restored = policy_with(after, parallel, None)
            load_checkpoint(entry, restored.model, restored.optimizer, parallel)
            found = step(restored, STEPS + 1)
            assert [name for name in wanted if found[name] != wanted[name]] == [], after


def one_pass(run, record=None):
    arch = ARCHS["qwen3_moe"]
    model = tiny_model(arch)
    for block in model.layers:
        block.run = run
    attention = PackedAttention(torch.tensor([0, 7, 12]))
    model(torch.arange(12), attention.context(record=record)).logsumexp(-1).sum().backward()
    return model


def test_routed_experts_are_reported_and_chosen_once(monkeypatch):
    """A layer that is computed again takes the experts of the first time, whatever its router would say now."""
    told, preferred, weighed = [], [], []
    prefer, weigh = SoftmaxRouter.prefer, SoftmaxRouter.weigh

    def preferring(self, scores):
        preferred.append(prefer(self, scores))
        return preferred[-1]

    def weighing(self, scores, taken):
        weighed.append(taken)
        return weigh(self, scores, taken)

    monkeypatch.setattr(SoftmaxRouter, "prefer", preferring)
    monkeypatch.setattr(SoftmaxRouter, "weigh", weighing)
    one_pass(Recomputation(selective=False), record=lambda layer, experts: told.append(layer))
    assert told == [0, 1]
    # in the backward pass layers come in reverse, and no router is asked
    assert [id(taken) for taken in weighed] == [id(preferred[layer]) for layer in (0, 1, 1, 0)]


def test_selective_checkpointing_recomputes_no_expensive_operation(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    counts = {}
    for name, run in (
        ("none", None),
        ("selective", Recomputation(selective=True)),
        ("full", Recomputation(selective=False)),
    ):
        with Count() as mode:
            one_pass(run)
        forward = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_grouped_mm", "aten::mm")
        counts[name] = [mode.names.count(operator) for operator in forward]
    attention, experts, other = zip(counts["none"], counts["selective"], counts["full"], strict=True)
    assert attention[0] == attention[1] > 0
    assert attention[2] == 2 * attention[0]
    assert experts[0] == experts[1]
    assert experts[2] > experts[0]
    assert other[0] < other[1] == other[2]
