"""Stages of a layer's backward pass: by hand at the sizes of GLM-5, and beside what a GPU took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from hpcrl.config.load import load_recipe
from hpcrl.models import load_facts
from hpcrl.models.arch import arch_from_config
from hpcrl.models.known import find_config
from hpcrl.models.layers import DenseMlp, Layer
from hpcrl.planning.ledger import GIB, Ledger
from hpcrl.planning.memory.activations import saved_bytes
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.layer_backward import BackwardStage, backward_stages
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments

GLM5 = load_facts("GLM-5")
SPARSE = GLM5.layers[-1]
T, D, F, ROWS = 32768, 6144, 2048, 32768 * 8
MEMORY = TrainerMemory(ranks=1, micro_batch_tokens=T, activation_checkpointing="full", lm_head_chunk_tokens=4096)
RESULTS = Path(__file__).parents[3] / "bench/results/gpu-nvidia-h200.json"


def stages(layer: Layer = SPARSE, *, memory: TrainerMemory = MEMORY, **how: Any) -> dict[str, BackwardStage]:
    # 32 experts, as a rank of the reference run has
    found = backward_stages(layer, memory.activations, 1_000_000, **{"ep": 8, "context": T, **how})
    return {stage.name: stage for stage in found}


def test_what_experts_kept_is_free_behind_them() -> None:
    """In the order of autograd; gradients of the matrices of shared experts, then of the last, then of the first."""
    found, whole = stages(), saved_bytes(SPARSE, MEMORY.activations)
    shared, last, first = 3 * D * F, 32 * D * F, 32 * 2 * D * F
    outputs, product = 2 * ROWS * D, 2 * ROWS * F
    # gate, up and product of shared experts, and the block's input in bfloat16: the router has it in float32
    begun = whole - 2 * T * (3 * F + D)
    routed = list(found.values())[1:5]
    saved = [stage.saved for stage in routed]
    assert saved[:3] == [begun, begun - outputs, begun - outputs - product]
    assert saved[3] == begun - outputs - 3 * product
    residual = 2 * 2 * T * D
    assert [stage.gradients for stage in routed] == [
        residual + outputs,
        residual + outputs + product,
        residual + 2 * product,
        residual + 2 * product + outputs,
    ]
    made = [(stage.ready, stage.made) for stage in routed]
    assert made == [(shared, 0), (shared, last), (shared + last, 0), (shared + last, first)]
    # what attention kept, with the norm before it, and gradients of all matrices
    attention = found["attention"]
    assert attention.saved == saved_bytes(replace(SPARSE, mlp=None), MEMORY.activations)
    assert attention.ready == 1_000_000
    assert attention.attention is not None


def test_shared_experts_come_first_while_all_of_routed_ones_is_kept() -> None:
    """Llama 4 has one expert a token, and of its shared one as much."""
    layer, hidden, width = load_facts("Llama-4-Scout-17B-16E-Instruct").layers[-1], 5120, 8192
    found = stages(layer, ep=16)
    name, shared = next(iter(found.items()))
    assert (name, shared.ready) == ("gate of shared experts", hidden * width)
    assert shared.saved == saved_bytes(layer, MEMORY.activations) - 2 * T * width
    assert shared.gradients == 2 * T * (hidden + 2 * width)
    assert max(found.values(), key=lambda stage: stage.total(2)) is shared


def test_an_indexer_chooses_before_experts_are_computed() -> None:
    found = stages()
    queries, keys = 2 * T * 32 * 128, 2 * T * 128
    assert found["indexer"].indexer == queries + keys + GIB
    assert found["indexer"].saved == found["attention"].saved
    assert {name for name, stage in found.items() if stage.indexer} == {"indexer"}
    # with little of an MLP it has the most
    assert isinstance(GLM5.layers[0].mlp, DenseMlp)
    narrow = stages(replace(GLM5.layers[0], mlp=replace(GLM5.layers[0].mlp, intermediate_size=1)))
    assert narrow["indexer"].total(0) > max(narrow["last matrix"].total(0), narrow["gate"].total(0))
    # on processors the plain kernel scores a few MiB at a time
    assert "indexer" not in stages(memory=replace(MEMORY, device="cpu"))


def test_gradients_of_sparse_attention_are_in_latents() -> None:
    attention = stages()["attention"].attention
    heads, latent, rope = 64, 512, 64
    # of outputs and queries in bfloat16; of keys in float32 and rounded; and a piece of queries, at most 1 GiB
    gradients = T * (2 * heads * (latent + latent + rope) + (4 + 2) * (latent + rope))
    assert attention == ("attention", gradients + GIB)


def test_a_product_of_experts_in_fp8_by_hand() -> None:
    """A byte and a 32nd a number; rows of an expert begin at multiples of 128."""
    found = stages(fp8=True)
    rows, matrix, each = ROWS + 127 * 32, 32 * D * 2 * F, 1 + 4 / 128
    # the gradient of the output in its places, the product before it is put back, the input by columns, and the matrix
    before = 2 * rows * 2 * F + 2 * rows * D + each * rows * D + matrix
    # then a sum in float32, from which the gradient comes in bfloat16
    assert found["first matrices of experts"].copies == before + 4 * matrix
    assert found["sum over experts"].copies == 0
    assert stages()["first matrices of experts"].copies == 0
    dense = stages(GLM5.layers[0], fp8=True)["last matrix"]
    matrix, narrow = D * 12288, each * T * (D + 12288)
    assert dense.copies == matrix + narrow + 2 * matrix


def ledgers(model: str, changes: dict[str, Any], *settings: str) -> Iterator[Ledger]:
    config = json.loads(find_config(model).read_text()) | changes
    arch = arch_from_config({key: value for key, value in config.items() if not key.startswith("_")})
    tokens = f"trainer.micro_batch_tokens={T}"
    head = "trainer.memory.lm_head_chunk_tokens=auto"
    recipe = load_recipe("quickstart", ["trainer.dtype=bfloat16", "trainer.ranks=1", tokens, head, *settings]).value
    memory = replace(trainer_memory(recipe, device="cuda"), accumulates=False, expert_imbalance=1.0, handoff_dtype=None)
    yield from trainer_moments(arch.facts, memory)


FULL = "trainer.memory.activation_checkpointing=full"
FP8 = "trainer.precision.fp8.backend=torch"
HOST = ("trainer.memory.optimizer_offload=true", "trainer.memory.activation_offload=true")
#: as bench/gpu_checks/stack.py cuts them
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"num_hidden_layers": 3},
    "GLM-5": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "vocab_size": 16_384,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize(
    ("check", "settings"),
    [
        ("qwen3", (FULL,)),
        ("qwen3, FP8", (FULL, FP8)),
        ("qwen3, kept", ()),
        ("qwen3, on the host", (FULL, *HOST)),
        ("glm5", (FULL,)),
        ("glm5, FP8", (FULL, FP8)),
    ],
)
def test_a_plan_is_within_five_percent_above_what_a_gpu_took(check: str, settings: tuple[str, ...]) -> None:
    """Tensors by the allocator's count, and all that the card had given away; nothing in the plan was fitted to it."""
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["check"] == f"whole.{check}"]
    (model,) = {row["model"] for row in rows if "model" in row}
    measured = [row for row in rows if "taken_gib" in row][-1]
    peak = max(ledgers(model, MODELS[model], *settings), key=lambda ledger: ledger.total)
    assumed = {"CUDA and NCCL", "fragmentation"}
    tensors = sum(term.value for term in peak.terms if term.name not in assumed)
    assert tensors / GIB == pytest.approx(measured["tensors_gib"], rel=0.005)
    assert 1.0 <= peak.total / GIB / measured["taken_gib"] < 1.05


def test_nothing_is_gathered_ahead_by_a_single_rank() -> None:
    """FSDP2 copies what one rank has when its layer begins; of several ranks the head's backward pass gathers one."""
    facts = load_facts("Qwen3-8B")

    def names(ranks: int, moment: str) -> set[str]:
        memory = replace(MEMORY, ranks=ranks, lm_head_chunk_tokens=None)
        return {t.name for m in trainer_moments(facts, memory) if m.name.startswith(moment) for t in m.terms}

    for moment in ("logits", "backward"):
        assert "prefetched layer" not in names(1, moment)
        assert "prefetched layer" in names(2, moment)
    # a loss in pieces has its gradient with the forward pass
    pieces = replace(MEMORY, ranks=2)
    (logits,) = [m for m in trainer_moments(facts, pieces) if m.name == "logits"]
    assert "prefetched layer" not in {term.name for term in logits.terms}
    whole = replace(pieces, loss_of_rollouts=True)
    (logits,) = [m for m in trainer_moments(facts, whole) if m.name == "logits"]
    assert "prefetched layer" in {term.name for term in logits.terms}


def test_what_selective_checkpointing_keeps_is_not_made_again() -> None:
    facts = load_facts("Qwen3-8B")

    def backward(how: Literal["full", "selective"]) -> Ledger:
        memory = replace(MEMORY, activation_checkpointing=how)
        return next(m for m in trainer_moments(facts, memory) if m.name.startswith("backward"))

    full, selective = backward("full"), backward("selective")
    kept = T * (32 * 128 * 2 + 4 * 32)
    assert full["recomputed layer"].value - selective["recomputed layer"].value == kept
