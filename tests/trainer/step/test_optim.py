"""Schedules, AdamW and clipping against formulas; what decays, of all families."""

import math
import re

import pytest
import torch
from test_families import FAMILIES
from torch import nn

from hpcrl.config.recipe import OptimizerConfig
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import arch_from_config
from hpcrl.trainer.step.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate


def rates(total, **settings):
    config = OptimizerConfig(learning_rate=2.0, **settings)
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_schedules():
    assert rates(4) == [2.0] * 4
    assert rates(4, warmup_steps=2) == [1.0, 2.0, 2.0, 2.0]
    assert rates(4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([1.0, 2.0, 1.6, 1.2, 0.8, 0.4])
    assert rates(3, schedule="cosine") == pytest.approx([1 + math.cos(math.pi * i / 3) for i in range(3)])
    assert rates(2, warmup_steps=5) == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_step_learns(schedule):
    for warmup in (0, 1, 9, 10, 30):
        assert all(0 < rate <= 2.0 for rate in rates(10, schedule=schedule, warmup_steps=warmup))


@pytest.mark.parametrize("step", [0, 5])
def test_steps_outside_are_refused(step):
    with pytest.raises(ValueError, match="between 1 and 4"):
        learning_rate(OptimizerConfig(), step, 4)


def test_adamw_by_hand():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95)
    matrix, vector = nn.Parameter(torch.tensor([[2.0]])), nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer([("matrix", matrix), ("vector", vector)], config)
    expected = {"matrix": 2.0, "vector": 2.0}
    m = v = 0.0
    for step, (gradient, rate) in enumerate([(0.5, 0.1), (-2.0, 0.05), (0.1, 0.2)], 1):
        for parameter in (matrix, vector):
            parameter.grad = torch.full_like(parameter, gradient)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        update = m / (1 - 0.8**step) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
        # norm weights are not decayed
        expected["matrix"] -= rate * (0.3 * expected["matrix"] + update)
        expected["vector"] -= rate * update
        assert matrix.item() == pytest.approx(expected["matrix"], rel=1e-5)
        assert vector.item() == pytest.approx(expected["vector"], rel=1e-5)


@pytest.mark.parametrize("on_host", [False, True])
def test_the_learning_rate_of_the_recipe_is_the_default(on_host):
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95)
    parameters = [("matrix", nn.Parameter(torch.ones(2, 2))), ("bias", nn.Parameter(torch.ones(2)))]
    optimizer = make_optimizer(parameters, config, on_host=on_host)
    groups = optimizer.param_groups
    # of one kernel call a group, where the moments are on the device
    assert on_host or optimizer.defaults["fused"] is True
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in groups] == [
        (0.1, (0.8, 0.95), 0.3),
        (0.1, (0.8, 0.95), 0.0),
    ]


def weights(module, *names):
    return {f"{module}.{name}.weight" for name in names}


ATTENTION = weights("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
LATENT = weights("self_attn", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DENSE = weights("mlp", "gate_proj", "up_proj", "down_proj")
SPARSE = {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
SHARED = weights("mlp.shared_experts", "gate_proj", "up_proj", "down_proj")
ENDS = {"embed_tokens.weight", "lm_head.weight"}
MIXERS = {
    *weights("mixer", "in_proj", "conv1d", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    *weights("mixer", "gate", "fc1_latent_proj", "fc2_latent_proj", "shared_experts.up_proj"),
    *{"mixer.shared_experts.down_proj.weight", "mixer.experts.up_proj", "mixer.experts.down_proj"},
}
DELTA = weights("linear_attn", "conv1d", "out_proj")
GROUPED = DELTA | weights("linear_attn", "in_proj_qkvz", "in_proj_ba")
APART = DELTA | weights("linear_attn", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
#: of each family, of any layer: all that decays
DECAYED = {
    "qwen2": ENDS | ATTENTION | DENSE,
    "llama": {"embed_tokens.weight"} | ATTENTION | DENSE,
    "mistral": ENDS | ATTENTION | DENSE,
    "qwen3": {"embed_tokens.weight"} | ATTENTION | DENSE,
    "qwen3_moe": ENDS | ATTENTION | DENSE | SPARSE,
    "deepseek_v3": ENDS | LATENT | DENSE | SPARSE | SHARED,
    "glm_moe_dsa": ENDS | LATENT | DENSE | SPARSE | SHARED | weights("self_attn.indexer", "wq_b", "wk", "weights_proj"),
    "minimax_m2": ENDS | ATTENTION | SPARSE,
    "glm4_moe": ENDS | ATTENTION | DENSE | SPARSE | SHARED,
    "gpt_oss": ENDS | ATTENTION | SPARSE,
    "nemotron_h": ENDS | MIXERS,
    "qwen3_next": ENDS | ATTENTION | GROUPED | DENSE | SPARSE | SHARED | {"mlp.shared_expert_gate.weight"},
    "qwen3_5_text": {"embed_tokens.weight"} | ATTENTION | APART | DENSE,
    "qwen3_5_moe_text": ENDS | ATTENTION | APART | SPARSE | SHARED | {"mlp.shared_expert_gate.weight"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_no_bias_norm_sink_or_constant(family):
    config = {"model_type": family, "vocab_size": 8, **FAMILIES[family], "pad_token_id": None}
    model = build_model(arch_from_config(config), device="meta")
    groups = make_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1)).param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    found = {0.1: set(), 0.0: set()}
    for name, parameter in model.named_parameters():
        found[decay[parameter]].add(re.sub(r"^layers\.\d+\.", "", name))
    assert found[0.1] == DECAYED[family]
    assert not found[0.0] & found[0.1]
    exempt = r"(norm\.weight|bias|sinks|A_log|\bD)$"
    assert all(re.search(exempt, name) for name in found[0.0]), found[0.0]


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_clipping():
    parameters = parameters_with([3.0, 0.0], [4.0])
    assert clip_gradients(parameters, 10.0, None) == 5.0
    assert parameters[0].grad.tolist() == [3.0, 0.0]
    assert clip_gradients(parameters, 0.5, None) == 5.0
    assert torch.cat([p.grad for p in parameters]).tolist() == pytest.approx([0.3, 0.0, 0.4])


def test_large_gradients_do_not_overflow():
    assert clip_gradients(parameters_with([3e30, 4e30]), 1.0, None) == pytest.approx(5e30)


def test_small_gradients_are_not_lost():
    assert clip_gradients(parameters_with([3e-30, 4e-30]), 1.0, None) == pytest.approx(5e-30)


def test_the_norm_does_not_depend_on_how_gradients_are_cut():
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum().sqrt().item()
    for sizes in ([300_001], [1, 300_000], [1000, 1023, 1024, 1025, 295_929]):
        parts = [part.tolist() for part in values.split(sizes)]
        assert clip_gradients(parameters_with(*parts), 1e9, None) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradients_are_reported_and_left(bad):
    parameters = parameters_with([1.0, bad])
    assert not math.isfinite(clip_gradients(parameters, 1.0, None))
    assert parameters[0].grad[0].item() == 1.0


def test_the_norm_of_gradients_of_several_dtypes_is_exact() -> None:
    """A norm that is summed in bfloat16 would have three digits."""
    draw = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(4096, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.randn(4096, generator=draw).to(parameter.dtype)
    exact = math.sqrt(sum(float(each.grad.double().square().sum()) for each in parameters if each.grad is not None))
    assert clip_gradients(parameters, 1e9, None) == pytest.approx(exact, rel=1e-6)
