"""A step of small models of each family on a GPU in bfloat16, against the same on a processor in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from trainer_testing import gradient_distance

from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import TrainerParallelismConfig
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch
from hpcrl.modeling.blocks import local_part
from hpcrl.models.arch import ModelArch, arch_from_config
from hpcrl.trainer.parallel.mesh import Parallel, distributed, parallel_of
from hpcrl.trainer.step.policy import TrainerPolicy

#: sequences that are packed; the second has one token
LENGTHS = (70, 1, 33, 152)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}
LATENT: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    # all experts are chosen: rounding sends no token elsewhere
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**GROUPED, "intermediate_size": 192},
    "qwen3_moe": {**GROUPED, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 4},
    "deepseek_v3": LATENT,
    # every token sees fewer than are chosen
    "glm_moe_dsa": {**LATENT, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 256},
    "gpt_oss": {
        **GROUPED,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 48,
    },
    "minimax_m2": {
        **GROUPED,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "rotary_dim": 16,
        "qk_norm_type": "per_layer",
    },
}
#: of the norm of a gradient by that in float32, and of all gradients: small ones are sums that nearly cancel
TOLERANCE, OF_ALL = 0.05, 0.003
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


@pytest.fixture
def ranks() -> Iterator[Parallel]:
    with distributed(timeout_s=240) as parallel:
        yield parallel


def shard_of(arch: ModelArch, step: int = 1) -> BatchShard:
    tokens, starts = sum(LENGTHS), np.concatenate(([0], np.cumsum(LENGTHS)))
    draw = np.random.default_rng(step)
    mask = np.ones(tokens, np.uint8)
    mask[starts[:-1]] = 0
    micro = MicroBatch(
        token_ids=draw.integers(0, arch.vocab_size, tokens).astype(np.int32),
        cu_seqlens=starts.astype(np.int32),
        loss_mask=mask,
        logprobs=np.full(tokens, -np.log(arch.vocab_size), np.float32) * mask,
        versions=np.full(tokens, step - 1, np.int32),
        advantages=draw.normal(size=tokens).astype(np.float32) * mask,
    )
    stats = BatchStats.of_tokens(tokens, sampled=int(mask.sum()))
    return BatchShard(step=step, rank=0, world_size=1, micro_batches=[micro], stats=stats)


def policy_on(device: torch.device, arch: ModelArch, *settings: str) -> TrainerPolicy:
    """With random weights, the same on every device."""
    given = ("trainer.micro_batch_tokens=256", "trainer.ranks=1", *settings)
    recipe = load_recipe("quickstart", given).value
    policy = TrainerPolicy(recipe, arch, parallel_of(TrainerParallelismConfig(), device), model_dir=None)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            size, centre = local_part(parameter).shape, float(parameter.dim() == 1 and "bias" not in name)
            local_part(parameter).copy_(torch.randn(size, generator=draw) * 0.05 + centre)
        for buffer in policy.model.buffers():
            buffer.zero_()
    return policy


def gradients(policy: TrainerPolicy) -> dict[str, torch.Tensor]:
    return {
        name: local_part(parameter.grad).detach().float().cpu()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }


def check_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    of_all = sum(float(each.norm()) ** 2 for each in wanted.values()) ** 0.5
    wrong = {}
    for name, own in found.items():
        error, norm = float((own - wanted[name]).norm()), float(wanted[name].norm())
        if not error < TOLERANCE * norm + OF_ALL * of_all / len(found):
            wrong[name] = (error, norm)
    assert not wrong, (wrong, of_all)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [(), ("trainer.memory.lm_head_chunk_tokens=100",)], ids=["whole", "pieces"])
def test_every_gradient(device: torch.device, ranks: Parallel, family: str, settings: tuple[str, ...]) -> None:
    arch = arch_from_config({"model_type": family, **FAMILIES[family]})
    plain = policy_on(torch.device("cpu"), arch, "trainer.dtype=float32")
    policy = policy_on(device, arch, "trainer.dtype=bfloat16", *settings)
    ours, theirs = (each.forward_backward(shard_of(arch)).reduce(ranks.world) for each in (policy, plain))
    assert ours.loss == pytest.approx(theirs.loss, rel=0.02, abs=0.02)
    assert ours.entropy == pytest.approx(theirs.entropy, rel=0.02)
    check_gradients(gradients(policy), gradients(plain))


TOOLS = {
    "host": (
        "trainer.memory.activation_checkpointing=full",
        "trainer.memory.activation_offload=true",
        "trainer.memory.optimizer_offload=true",
        "trainer.memory.lm_head_chunk_tokens=100",
    ),
    "selective": ("trainer.memory.activation_checkpointing=selective",),
}


@pytest.mark.parametrize("tool", ["host", "selective"])
def test_tools_for_memory_change_no_step(device: torch.device, ranks: Parallel, tool: str) -> None:
    """Two optimizer steps with and without: inputs of layers and moments on the host, logits in pieces."""
    arch = arch_from_config({"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]})
    plain, policy = (policy_on(device, arch, "trainer.dtype=bfloat16", *more) for more in ((), TOOLS[tool]))
    before = {name: local_part(p).detach().clone() for name, p in plain.model.named_parameters()}
    for each in (plain, policy):
        for step in (1, 2):
            each.forward_backward(shard_of(arch, step))
            each.optimizer_step(step)
    moved = close = 0.0
    for (name, own), (_, other) in zip(policy.model.named_parameters(), plain.model.named_parameters(), strict=True):
        moved += float((local_part(other) - before[name]).detach().norm()) ** 2
        close += float((local_part(other) - local_part(own)).detach().norm()) ** 2
    assert moved > 0
    # AdamW's first steps have a sign for each number: of gradients that nearly are 0 it may be another
    assert close**0.5 < 0.1 * moved**0.5


def test_the_same_step_twice(device: torch.device, ranks: Parallel) -> None:
    """Bit for bit where the recipe asks for it."""
    arch = arch_from_config({"model_type": "glm_moe_dsa", **FAMILIES["glm_moe_dsa"]})
    found = []
    for _ in range(2):
        policy = policy_on(device, arch, "trainer.dtype=bfloat16", "trainer.memory.lm_head_chunk_tokens=100")
        policy.forward_backward(shard_of(arch))
        found.append(gradients(policy))
    for name, own in found[0].items():
        assert torch.equal(own, found[1][name]), name


def test_a_model_in_fp8(device: torch.device, ranks: Parallel) -> None:
    """Products in FP8 stay near those in bfloat16: a few parts in a hundred."""
    arch = arch_from_config({"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"], "head_dim": 128})
    backend = "torch" if device.type == "cuda" else "reference"
    made = ((), (f"trainer.precision.fp8.backend={backend}",))
    plain, policy = (policy_on(device, arch, "trainer.dtype=bfloat16", *more) for more in made)
    for each in (plain, policy):
        each.forward_backward(shard_of(arch))
    assert 0.0 < gradient_distance(gradients(policy), gradients(plain)) < 0.15
