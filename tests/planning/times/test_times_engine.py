"""Times of engines: against two published services, and how they must move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.collectives import RankGroup, all_reduce
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.report import make_outlook
from hpcrl.planning.times.engine import decode_step, kv_read_bytes, prefill_token
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.serving import ServingFleet
from hpcrl.planning.times.shapes import EngineShape
from hpcrl.planning.times.workload import resolve_workload

V3, GLM5 = load_facts("DeepSeek-V3"), load_facts("GLM-5")
WIDE = EngineShape(replicas=1, nodes=9, gpus_per_node=8, expert_parallel=72, weight_dtype="fp8")


def rates(**gpu: float) -> Rates:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    node = node_hardware(cluster, Role.DECODE).node
    own = node.model_copy(update={"gpu": node.gpu.model_copy(update=gpu)})
    return Rates(NodeHardware(cluster, "gpu", own), load_calibration())


def step(shape: EngineShape = WIDE, *, batch: float = 64, context: float = 4000) -> float:
    seconds = decode_step(V3, shape, rates(memory_gb_s=3350), batch=batch, context=context).seconds
    assert seconds is not None
    return seconds


def test_published_services_are_predicted_within_a_quarter() -> None:
    # SGLang on 72 H100: 22.3k tokens/s a node with 256 sequences a GPU
    assert step(batch=256, context=2050) == pytest.approx(8 * 256 / 22300, rel=0.25)
    # DeepSeek on 144 H800: 14.8k tokens/s a node at 21 tokens/s a user
    own = replace(WIDE, nodes=18, expert_parallel=144)
    seconds = decode_step(V3, own, rates(memory_gb_s=3350, nvlink_gb_s=200), batch=88, context=4989).seconds
    assert seconds == pytest.approx(1 / 21, rel=0.25)
    # SGLang on 32 H100: 52.3k prompt tokens/s a node
    four = replace(WIDE, nodes=4, expert_parallel=32)
    token = prefill_token(V3, four, rates(memory_gb_s=3350), context=1000).seconds
    assert token is not None
    assert 8 / token == pytest.approx(52300, rel=0.1)


def test_a_step_grows_with_batch_and_context_but_less_than_in_proportion() -> None:
    assert step(batch=1) < step(batch=64) < step(batch=128) < 2 * step(batch=64)
    assert step(context=1000) < step(context=64000)


def test_sparse_attention_reads_the_indexers_keys_of_all_and_the_rest_of_few() -> None:
    short, long = (kv_read_bytes(GLM5, context, "fp8") for context in (2048, 131072))
    assert short == pytest.approx(2048 * GLM5.kv_bytes_per_token("fp8"))
    # 132 bytes of 788 a token grow
    assert long - short == pytest.approx((131072 - 2048) * 132 * 78)


def test_a_query_reads_what_it_sees_and_the_state() -> None:
    oss = load_facts("gpt-oss-120b")
    token = 2 * 8 * 64 * 2
    assert kv_read_bytes(oss, 100, "bfloat16") == 36 * 100 * token
    assert kv_read_bytes(oss, 50_000, "bfloat16") == 18 * (50_000 + 128) * token
    # in a chunk, a query sees half of it in the mean
    llama, token = load_facts("Llama-4-Scout-17B-16E-Instruct"), 2 * 8 * 128 * 2
    assert kv_read_bytes(llama, 8000, "bfloat16") == 48 * 8000 * token
    assert kv_read_bytes(llama, 50_000, "bfloat16") == (12 * 50_000 + 36 * 8193 / 2) * token
    qwen = load_facts("Qwen3-Next-80B-A3B-Instruct")
    read = kv_read_bytes(qwen, 50_000, "bfloat16")
    assert read == 50_000 * qwen.kv_bytes_per_token() + qwen.state_bytes_per_sequence()


def test_a_step_is_a_line_near_its_batch() -> None:
    recipe = load_recipe("glm5_swe").value
    workload = resolve_workload(recipe, load_calibration())
    own = rates()
    decode = EngineShape(replicas=1, nodes=8, gpus_per_node=8, expert_parallel=64, weight_dtype="fp8", max_num_seqs=96)
    line = ServingFleet(GLM5, workload, decode, own).step_line(32)
    for batch in (24, 32, 48):
        context = workload.mean("context")
        exact = decode_step(GLM5, decode, own, batch=batch, context=context).seconds
        sequences = batch * decode.data_parallel
        drawn = line.base_s + sequences * (line.per_sequence_s + line.per_kv_token_s * context)
        assert drawn == pytest.approx(exact, rel=0.05)
    assert min(line) > 0


def test_engines_saturate_and_rollouts_queue() -> None:
    recipe = load_recipe("glm5_swe").value
    workload = resolve_workload(recipe, load_calibration())
    own = rates()
    decode = EngineShape(replicas=1, nodes=8, gpus_per_node=8, expert_parallel=64, weight_dtype="fp8", max_num_seqs=96)
    prefill = replace(decode, replicas=4, nodes=2, expert_parallel=16)
    serving = ServingFleet(GLM5, workload, decode, own, prefill, own)
    few, many, flood = serving(256), serving(1024), serving(100_000)
    assert few.limit == "in flight"
    assert few.rate < many.rate < flood.rate <= serving.most[0]
    assert few.token_s < many.token_s
    # Little's law holds everywhere
    for in_flight, served in ((256, few), (1024, many), (100_000, flood)):
        assert served.durations.mean * served.rate == pytest.approx(in_flight, rel=0.02)
    # one node of prompts is too few: it binds
    small = ServingFleet(GLM5, workload, decode, own, replace(prefill, replicas=1), own)
    assert small(100_000).limit == "prefill"


def test_a_side_decodes_as_many_sequences_as_it_may_itself() -> None:
    recipe, cluster = load_recipe("glm5_swe", ("engine.decode.max_num_seqs=5",)).value, load_cluster("h200-28").value
    outlook = make_outlook(recipe, cluster, load_calibration(), load_facts("GLM-5"))
    assert outlook.layout is not None
    assert outlook.layout.decode.max_num_seqs == 5
    assert outlook.loop is not None
    assert outlook.loop.served.batch <= 5


def sums(shape: EngineShape, batch: float) -> tuple[float, float]:
    """Seconds of a decode step in all-to-alls, and in collectives of tensor parallelism."""
    table = decode_step(V3, shape, rates(), batch=batch, context=4000)
    found = {term.name: term.value or 0.0 for term in table}
    return found.get("decode.all_to_all", 0.0), found.get("decode.tensor_parallel", 0.0)


def test_outputs_of_experts_are_brought_together_once() -> None:
    """By the combine where tokens were dispatched, by an all-reduce where every rank has all of them; never by both."""
    layers, sparse, batch = len(V3.layers), len(V3.moe_layers), 512.0
    own = rates()
    each = all_reduce(batch * V3.hidden_size * 2, RankGroup.inner(8, 8), own.collectives)
    within = replace(WIDE, nodes=1, expert_parallel=8, tensor_parallel=8)
    assert sums(within, batch) == (0.0, pytest.approx(2 * layers * each))
    across = replace(within, nodes=2, expert_parallel=16)
    dispatch, reduce = sums(across, batch)
    # attention and dense blocks in whole; of a sparse block the gather of what the combine distributed
    assert reduce == pytest.approx((2 * layers - sparse / 2) * each)
    assert dispatch > 0
    assert sums(replace(across, tensor_parallel=1), batch / 8) == (pytest.approx(dispatch), 0.0)
    # experts that are cut, not distributed
    cut = replace(within, expert_parallel=1)
    assert sums(cut, batch) == sums(within, batch)
    assert cut.expert_shards == 8


def test_prompts_pay_for_tensor_parallelism() -> None:
    own = rates()
    alone = replace(WIDE, nodes=1, expert_parallel=8)
    shared = replace(alone, tensor_parallel=8)
    term = prefill_token(V3, shared, own, context=1000)["prefill.tensor_parallel"]
    group = RankGroup.inner(8, 8)
    links = replace(own.collectives, hop_s=0.0, local_hop_s=0.0)
    assert term.value == pytest.approx(8 * 2 * len(V3.layers) * all_reduce(V3.hidden_size * 2, group, links))
    names = [term.name for term in prefill_token(V3, shared, own, context=1000)]
    assert "prefill.all_to_all" not in names
    assert "prefill.all_to_all" in [term.name for term in prefill_token(V3, alone, own, context=1000)]
