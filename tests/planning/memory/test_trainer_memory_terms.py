"""Terms of a trainer's memory, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcrl.config.lora import LoraConfig
from hpcrl.models import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.activations import (
    ActivationShape,
    attention_output_bytes,
    saved_bytes,
)
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments, trainer_peak

GLM5 = load_facts("GLM-5")


def test_layer_gather_of_the_announcement() -> None:
    """(800B x 4) / 78 is about 40 GB: the largest layer in float32 without expert parallelism, here exactly."""
    layers = [sum(GLM5.layer_parameters(index).values()) for index in range(len(GLM5.layers))]
    assert max(layers) * 4 / 1e9 == pytest.approx(39.5, abs=0.5)


def _trainer(**changes: Any) -> TrainerMemory:
    settings: dict[str, Any] = {"ranks": 96, "micro_batch_tokens": 131072, "cp": 4, "ep": 8}
    return TrainerMemory(**{**settings, **changes})


def _peak(**changes: Any) -> int:
    return trainer_peak(GLM5, _trainer(**changes)).total


def test_each_memory_saver_saves() -> None:
    none = _peak()
    selective = _peak(activation_checkpointing="selective")
    full = _peak(activation_checkpointing="full")
    offloaded = _peak(activation_checkpointing="full", activation_offload=True)
    assert none > selective > full > offloaded
    assert _peak(optimizer_offload=True) < none
    assert _peak(cp=8) < none
    small_head = {"activation_checkpointing": "full", "lm_head_chunk_tokens": 1024}
    # a layer binds in both, not the logits, which are compared below
    assert _peak(ep=16, **small_head) < _peak(**small_head) <= full
    assert _peak(ranks=192) < none
    assert _peak(fp8=True, **small_head) > _peak(**small_head)
    adapters = {"lora": LoraConfig(rank=16)}
    assert _peak(**adapters, **small_head) < _peak(**small_head)
    shared = {"lora": LoraConfig(rank=16, experts="shared_outer")}
    attention = {"lora": LoraConfig(rank=16, targets=["attention"])}
    assert _peak(**attention, **small_head) < _peak(**shared, **small_head) < _peak(**adapters, **small_head)
    head = {m.name: m for m in trainer_moments(GLM5, _trainer(lm_head_chunk_tokens=1024))}["logits"]
    # the gradient of the head in float32, and rounded
    assert 6 * 154_880 * 6144 < head["logits"].value < 6 * GIB
    twice = {m.name: m for m in trainer_moments(GLM5, _trainer(lm_head_chunk_tokens=1024, loss_of_rollouts=True))}
    assert 2 * 154_880 * 6144 < twice["logits"]["logits"].value < 4 * GIB
    whole = {m.name: m for m in trainer_moments(GLM5, _trainer())}["logits"]
    # in bfloat16, with the gradients of head and hidden states
    assert whole["logits"].value == 2 * (32768 * 154_880 + (154_880 + 32768) * 6144)


def test_router_replay_payload_of_a_sample() -> None:
    """131,072 tokens x 75 layers x 8 experts in a byte each: 79 MB."""
    ledger = trainer_peak(GLM5, _trainer(cp=1, router_replay=True))
    assert ledger["router replay"].value == 78_643_200


def test_buffer_of_deepep_by_hand() -> None:
    """A token of GLM-5 is 12,288 bytes of bfloat16, and 100 of experts, weights and source in 128."""
    memory = _trainer(ep=8, deepep_tokens=65_544)
    wanted = 8 * 65_544 * (12_288 + 128)
    # parameters that wait on the host do not change it
    for settings in (memory, replace(memory, parameter_offload=True)):
        moments = {ledger.name: ledger for ledger in trainer_moments(GLM5, settings)}
        # it is made in the first exchange, after the weights have come
        assert "DeepEP buffer" not in {term.name for term in moments.pop("loading").terms}
        assert len(moments) > 2
        for ledger in moments.values():
            assert wanted <= ledger["DeepEP buffer"].value < wanted + (2 << 20)
            assert ledger["DeepEP buffer"].value % (2 << 20) == 0


def test_linear_attention_keeps_its_activations() -> None:
    """By hand, in bfloat16: the convolution, numbers of heads, the rule, states of chunks, and the gated norm."""
    linear = load_facts("Qwen3-Next-80B-A3B-Instruct").layers[0]
    shape = ActivationShape(tokens=64, element_bytes=2)
    a_token = (
        4 * 2 * 8192 + (3 * 4 + 4 + 2) * 32 + 4 * 32 * (2 * 128 + 2 * 128) + (3 * 4 + 3 * 2) * 4096 + 4 * 32 + 4 * 8
    )
    state = 2 * 4 * 32 * (128 * 128 + 1)
    mixer = saved_bytes(replace(linear, mlp=None), shape) - 64 * 2048 * 4
    assert mixer == 64 * a_token + state
    assert attention_output_bytes(linear, shape) == 64 * 4096 * 2
