"""Terms of an engine's memory and its KV capacity, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.config.load import load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.engine import EngineMemory, engine_ledger, kv_bytes_of_rank, kv_capacity
from hpcrl.planning.memory.fit import engine_memory

GLM5 = load_facts("GLM-5")


def test_tensor_parallelism_cuts_heads_but_not_latents() -> None:
    qwen = load_facts("Qwen3-235B-A22B")
    one, eight = (EngineMemory(ranks=8, tp=tp) for tp in (1, 8))
    assert kv_bytes_of_rank(qwen, one) == qwen.kv_bytes_per_token()
    # 4 heads over 8 ranks: one each, every head twice
    assert kv_bytes_of_rank(qwen, eight) == qwen.kv_bytes_per_token() // 4
    assert kv_bytes_of_rank(GLM5, eight) == GLM5.kv_bytes_per_token()
    assert engine_ledger(qwen, eight)["other weights"].value < engine_ledger(qwen, one)["other weights"].value
    assert engine_ledger(qwen, eight)["expert weights"] == engine_ledger(qwen, one)["expert weights"]


def test_kv_capacity_by_hand() -> None:
    memory = EngineMemory(ranks=1, max_model_len=1000, gpu_memory_utilization=0.5)
    qwen = load_facts("Qwen3-8B")
    held = engine_ledger(qwen, memory).total
    kv = kv_capacity(qwen, memory, 2 * (held + 147_456 * 5000))
    assert kv.tokens == 5000
    assert kv.sequences == 5.0
    assert kv_capacity(qwen, memory, held).tokens == 0


def test_kv_capacity_with_windows_by_hand() -> None:
    memory = EngineMemory(ranks=1, tp=1, max_model_len=100_000, gpu_memory_utilization=0.5)
    oss, token = load_facts("gpt-oss-20b"), 2 * 8 * 64 * 2
    sequence = 12 * (100_000 + 128) * token
    assert kv_bytes_of_rank(oss, memory, 100_000) == sequence
    kv = kv_capacity(oss, memory, 2 * (engine_ledger(oss, memory).total + 7 * sequence))
    assert kv.sequences == 7.0
    assert kv.tokens == 700_000
    # a state a sequence beside twelve layers of attention
    qwen = load_facts("Qwen3-Next-80B-A3B-Instruct")
    sequence = 100_000 * qwen.kv_bytes_per_token() + qwen.state_bytes_per_sequence()
    kv = kv_capacity(qwen, memory, 2 * (engine_ledger(qwen, memory).total + 3 * sequence))
    assert kv.sequences == 3.0


def test_engines_that_do_both_dispatch_as_they_are_started() -> None:
    """`hpcrl.jobplan.commands.vllm` gives the low-latency kernels to engines that only decode."""
    engine = load_recipe("qwen3_30b_a3b").value.engine
    one = engine_memory(engine, ranks=8, nodes=1, role=Role.ENGINE)
    assert engine_ledger(load_facts("Qwen3-30B-A3B"), one)["expert dispatch"].value == GIB


def test_latent_attention_is_copied_with_fp8_weights() -> None:
    """vLLM's bfloat16 halves of kv_b_proj: 2.3 GB a GPU at GLM-5."""
    memory = EngineMemory(ranks=64, nodes=8, fp8_weights=True, kv_dtype="fp8", max_model_len=131072)
    one = engine_ledger(GLM5, memory)["absorbed projections"].value
    assert one == 78 * 64 * 512 * (192 + 256) * 2
    assert one / 1e9 == pytest.approx(2.3, abs=0.02)
    assert engine_ledger(GLM5, replace(memory, tp=8))["absorbed projections"].value == one // 8
    # in bfloat16 they are views; attention over heads has no such thing
    for facts, other in ((GLM5, replace(memory, fp8_weights=False)), (load_facts("Qwen3-235B-A22B"), memory)):
        with pytest.raises(KeyError):
            engine_ledger(facts, other)["absorbed projections"]


def test_workspaces_of_sparse_attention_by_hand() -> None:
    memory = EngineMemory(ranks=64, nodes=8, kv_dtype="fp8", max_model_len=131072, max_num_batched_tokens=8192)
    ledger = engine_ledger(GLM5, memory)
    queries_and_outputs = 8192 * 64 * (576 + 576 + 512 + 512)
    assert ledger["sparse attention workspace"].value == 2 * (5 * 131072 * 576 + queries_and_outputs)
    assert ledger["indexer scores"].value == 512 << 20
    # few tokens a step: the workspace is the unpacked contexts, and scores are small
    decode = engine_ledger(GLM5, replace(memory, max_num_batched_tokens=64))
    assert decode["sparse attention workspace"].value / 1e9 == pytest.approx(0.77, abs=0.01)
    assert decode["indexer scores"].value == 4 * 64 * 131072
    # nothing is unpacked in bfloat16, but the indexer gathers its keys all the same
    plain = engine_ledger(GLM5, replace(memory, max_num_batched_tokens=64, kv_dtype="bfloat16"))
    assert plain["sparse attention workspace"].value == 40 * 131072 * 132
    longer = engine_ledger(GLM5, replace(memory, max_num_batched_tokens=64, max_model_len=262144 + 1))
    assert longer["sparse attention workspace"].value < 1.01 * decode["sparse attention workspace"].value
    with pytest.raises(KeyError):
        engine_ledger(load_facts("DeepSeek-V3"), memory)["indexer scores"]
