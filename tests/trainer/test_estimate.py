"""The planner's formulas of activations and the real model under fake tensors agree, for each family of the trainer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.recipe import TrainerMemoryConfig
from hpcrl.modeling.spec import SPECS
from hpcrl.models.arch import GatedDeltaArch, GlmMoeDsaArch, MinimaxM2Arch, ModelArch, Qwen3Arch
from hpcrl.models.known import find_config
from hpcrl.planning.memory.activations import saved_bytes
from hpcrl.planning.memory.layer_backward import backward_stages
from hpcrl.planning.memory.real_model import measure_pass
from hpcrl.planning.memory.settings import RealPass, TrainerMemory
from hpcrl.planning.memory.trainer import _Trainer, trainer_moments, trainer_peak
from hpcrl.trainer import estimate
from hpcrl.trainer.estimate import estimate_model, estimate_pass

#: by the names of all families; each takes those that it has
SIZES: dict[str, Any] = {
    "vocab_size": 2560,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 640,
    "moe_intermediate_size": 288,
    "num_experts": 8,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    # narrower than the keys, as in published models
    "v_head_dim": 32,
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    # beyond all lengths below: masks of windows stay for the next pass, and would be counted in the first alone
    "sliding_window": 4096,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 320,
    "shared_expert_intermediate_size": 320,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    # the planner counts tables of whole heads
    "partial_rotary_factor": 1.0,
    "layer_types": ("linear_attention", "full_attention"),
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 16,
    # lengths below are multiples of it: what is cut into chunks has no padding
    "chunk_size": 20,
}
#: of a hybrid, from its first layer on
BLOCKS = ("mamba", "moe", "attention", "mlp", "mamba")
EXPERTS = {"num_experts": 16, "n_routed_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4}
CHANGES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "as it is": ({}, (240,) * 4),
    "one long sequence": ({}, (1040,)),
    "uneven sequences": ({}, (700, 100, 60, 100)),
    # with more logits: of four experts a token a layer of gpt-oss, on its way forward, takes more than the small head
    "top 4 of 16": ({**EXPERTS, "vocab_size": 4096}, (240,) * 4),
    "norms of heads, no shared experts": ({"use_qk_norm": True, "n_shared_experts": 0}, (480,) * 2),
    "plain queries, biases": ({"q_lora_rank": None, "attention_bias": True}, (480,) * 2),
}
KEPT = ("activations", "final norm and selection", "logits", "rotary tables")
FAMILIES = pytest.mark.parametrize("family", [spec.arch for spec in SPECS], ids=lambda arch: arch.MODEL_TYPES[0])


def sizes_of(family: type[ModelArch], **changed: Any) -> ModelArch:
    known = {field.name for field in fields(family)}
    if "index_topk" in known and "q_lora_rank" in changed:
        # an indexer reads compressed queries
        del changed["q_lora_rank"]
    if "layers_block_type" in known:
        changed["num_hidden_layers"] = max(changed.get("num_hidden_layers", 0), 4)
        changed["layers_block_type"] = BLOCKS[: changed["num_hidden_layers"]]
    if not issubclass(family, GatedDeltaArch):
        # layers of other kinds
        known.discard("layer_types")
    else:
        layers = changed.get("num_hidden_layers", SIZES["num_hidden_layers"])
        changed["layer_types"] = (SIZES["layer_types"] * layers)[:layers]
    return family(**{name: value for name, value in {**SIZES, **changed}.items() if name in known})


def settings(lengths: tuple[int, ...], dtype: str) -> TrainerMemory:
    return TrainerMemory(
        ranks=1,
        dtype=dtype,
        micro_batch_tokens=sum(lengths),
        trained_tokens=sum(lengths) - len(lengths),
        accumulates=False,
        device="cpu",
    )


def by_formulas(arch: ModelArch, lengths: tuple[int, ...], dtype: str, **tools: Any) -> tuple[int, int]:
    """Until the head is done, and in the backward pass of the layer with the most of what is compared here."""
    memory = replace(settings(lengths, dtype), **tools)
    (head,) = (ledger for ledger in trainer_moments(arch.facts, memory) if ledger.name == "logits")
    planner = _Trainer(arch.facts, memory)
    kept, working = planner.activations
    backward = 0
    for number, layer in enumerate(planner.layers):
        whole = sum(kept[: number + 1]) + working[number]
        for stage in backward_stages(layer, planner.shape, planner.sizes.gathered[number]):
            # here gradients of matrices are free as soon as they are made
            alone = replace(stage, ready=0.0).total(memory.element_bytes)
            backward = max(backward, round(whole - saved_bytes(layer, planner.shape) + alone))
    tables = [term.value for term in head.terms if term.name == "rotary tables"]
    return sum(term.value for term in head.terms if term.name in KEPT), backward + sum(tables)


@FAMILIES
@pytest.mark.parametrize("change", CHANGES)
def test_formulas_and_the_real_model_agree(family: type[ModelArch], change: str) -> None:
    changed, lengths = CHANGES[change]
    arch = sizes_of(family, **changed)
    delta = "linear_attention" in getattr(arch, "layer_types", ())
    if delta:
        # multiples of its chunks
        lengths = tuple(64 * -(-length // 64) for length in lengths)
    # the dtype matters to what is copied; one of them for each change
    dtype = "float32" if change == "as it is" else "bfloat16"
    real = estimate_pass(arch, lengths, dtype=getattr(torch, dtype))
    head, backward = by_formulas(arch, lengths, dtype)
    # sparse attention works in pieces of 64 MiB, larger than these models: a quarter of one may be missing
    piece = 16 << 20 if "index_topk" in {field.name for field in fields(family)} else 0
    # the last state of each sequence goes nowhere, and what the delta rule made it of is not kept
    assert head == pytest.approx(real.head, rel=0.01 if delta else 0.005, abs=piece)
    assert max(head, backward) == pytest.approx(real.whole, rel=0.01, abs=piece)
    assert real.parameters == pytest.approx(getattr(torch, dtype).itemsize * arch.num_parameters(), rel=0.001)


@pytest.mark.parametrize("of_rollouts", [False, True], ids=["of tokens", "of rollouts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_in_pieces_takes_what_its_formula_says(dtype: str, of_rollouts: bool) -> None:
    """Logits of some tokens, and the gradient of the head, which is added up in float32; or the pieces of `gspo`."""
    # many columns in a piece of 32 MiB are not all
    rows, lengths = (3000, (1000,) * 4) if of_rollouts else (75, (250,) * 4)
    arch = sizes_of(Qwen3Arch, vocab_size=16384)
    memory = TrainerMemoryConfig(lm_head_chunk_tokens=rows)
    real = estimate_pass(arch, lengths, dtype=getattr(torch, dtype), memory=memory, loss_of_rollouts=of_rollouts)
    head = by_formulas(arch, lengths, dtype, lm_head_chunk_tokens=rows, loss_of_rollouts=of_rollouts)[0]
    assert head == pytest.approx(real.head, rel=0.04 if of_rollouts else 0.005)
    assert head < 0.9 * by_formulas(arch, lengths, dtype)[0]


@FAMILIES
def test_where_logits_are_small_a_layer_binds(family: type[ModelArch]) -> None:
    """The gradients of the widest layer beside what is kept."""
    wide = {"intermediate_size": 4096, "first_k_dense_replace": 2, "mlp_only_layers": (0, 1)}
    if "intermediate_size" not in {field.name for field in fields(family)}:
        # it has no dense layers
        wide = {"moe_intermediate_size": 4096}
    arch = sizes_of(family, vocab_size=64, **wide)
    real = estimate_pass(arch, (240,) * 4, dtype=torch.float32)
    # the gradient of the last matrix of squares is freed later than that of others; sparse attention works in pieces
    rough = 0.04 if arch.facts.layers[-1].mlp is None or "index_topk" in {f.name for f in fields(family)} else 0.005
    head, backward = by_formulas(arch, (240,) * 4, "float32")
    assert backward == pytest.approx(real.whole, rel=rough)
    assert backward > head
    assert real.whole > real.head


@pytest.mark.campaign
@pytest.mark.parametrize("family", [GlmMoeDsaArch, MinimaxM2Arch, Qwen3Arch], ids=lambda arch: arch.MODEL_TYPES[0])
@pytest.mark.parametrize(
    "tools",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "checkpoint_every_layers": 2},
    ],
    ids=lambda tools: " ".join(map(str, tools.values())),
)
def test_formulas_of_checkpointing_and_the_real_model_agree(family: type[ModelArch], tools: dict[str, Any]) -> None:
    """What is kept to 0.5 %, and the layer that is computed again, of which one is held at a time, to 1 %.

    Sparse attention works in pieces of 64 MiB, larger than this model, of which a quarter may be missing.
    """
    lengths, memory = (240,) * 4, TrainerMemoryConfig(**tools)
    piece = 16 << 20 if family is GlmMoeDsaArch else 0
    arch = sizes_of(family, num_hidden_layers=4, vocab_size=8192)
    real = estimate_pass(arch, lengths, dtype=torch.float32, memory=memory)
    assert by_formulas(arch, lengths, "float32", **tools)[0] == pytest.approx(real.head, rel=0.005)
    arch = replace(arch, vocab_size=64)
    real = estimate_pass(arch, lengths, dtype=torch.float32, memory=memory)
    assert by_formulas(arch, lengths, "float32", **tools)[1] == pytest.approx(real.whole, rel=0.01, abs=piece)


@pytest.mark.campaign
@FAMILIES
def test_many_layers_are_a_few_continued(family: type[ModelArch]) -> None:
    arch = sizes_of(family, num_hidden_layers=5)
    lengths = (300, 200)
    whole = estimate_pass(arch, lengths, dtype=torch.float32)
    assert estimate_model(arch, lengths, dtype=torch.float32) == whole


@pytest.mark.campaign
@FAMILIES
def test_fake_tensors_take_what_real_ones_do(family: type[ModelArch], monkeypatch: pytest.MonkeyPatch) -> None:
    class Real:
        """In place of the mode: tensors are what they are."""

        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    arch, lengths = sizes_of(family), (240, 100)
    fake = estimate_pass(arch, lengths, dtype=torch.float32)
    monkeypatch.setattr(estimate, "FakeTensorMode", Real)
    monkeypatch.setattr(estimate, "_known_without_numbers", lambda piece_bytes, opaque: nullcontext())
    real = estimate_pass(arch, lengths, dtype=torch.float32)
    assert fake.parameters == real.parameters
    assert fake.head == pytest.approx(real.head, rel=0.005)
    assert fake.whole == pytest.approx(real.whole, rel=0.005)


def test_what_the_real_model_takes_stands_in_the_ledger() -> None:
    arch = sizes_of(SPECS[-1].arch)
    own = settings((240,), "float32")
    before = trainer_peak(arch.facts, own)
    head = trainer_peak(arch.facts, replace(own, real=RealPass(head=1 << 40, whole=1 << 40)))
    assert head.name == "logits"
    assert head.total > 1 << 40 > before.total
    backward = trainer_peak(arch.facts, replace(own, real=RealPass(head=1 << 40, whole=1 << 41)))
    assert backward.name.startswith("backward")
    assert backward.total > 1 << 41


@pytest.mark.campaign
def test_a_plan_asks_a_process_with_torch() -> None:
    recipe, site = load_recipe("quickstart", ["model.path=Qwen3-8B", "trainer.dtype=bfloat16"]), load_cluster("local")
    real = measure_pass(recipe.value, site.value)
    tokens = recipe.value.trainer.micro_batch_tokens
    head, _ = by_formulas(
        Qwen3Arch.from_hf_config(json.loads(find_config("Qwen3-8B").read_text())), (tokens,), "bfloat16"
    )
    assert real.head == pytest.approx(head, rel=0.005)
