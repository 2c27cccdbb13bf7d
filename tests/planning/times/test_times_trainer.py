"""Times of a training step: what they must add up to, and how they must move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.config.plan import Role
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.distributions import LogNormal, quantiles_of
from hpcrl.planning.hardware import NodeHardware, node_hardware
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_peak
from hpcrl.planning.times import trainer as times_trainer
from hpcrl.planning.times import work as times_work
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from hpcrl.planning.times.work import PACKED, pack_rows, sequence_work

GLM5 = load_facts("GLM-5")
SHAPE = TrainerShape(
    nodes=12, gpus_per_node=8, context_parallel=4, expert_parallel=8, compute_dtype="fp8", micro_batch_tokens=131072
)
BATCH = TrainerBatch(256, quantiles_of(LogNormal(kind="lognormal", median=48000, sigma=0.45, maximum=131072)))


def rates() -> Rates:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    return Rates(node_hardware(cluster, Role.TRAINER), load_calibration())


def seconds(shape: TrainerShape = SHAPE, batch: TrainerBatch = BATCH) -> float:
    total = trainer_step(GLM5, shape, batch, rates()).seconds
    assert total is not None
    return total


def test_kernels_take_their_operations_over_the_rate() -> None:
    dense = load_facts("Qwen3-8B")
    lengths = Quantiles((2048.0,))
    shape = TrainerShape(nodes=1, gpus_per_node=8, recompute="none", micro_batch_tokens=2048)
    own = rates()
    table = trainer_step(dense, shape, TrainerBatch(64, lengths), own)
    linear = table["compute.linear"].value
    # 6 operations a parameter and token, the embedding looked up and not multiplied
    multiplied = dense.num_parameters() - dense.vocab_size * dense.hidden_size
    expected = 6 * multiplied * 64 * 2048 / 8 / (989e12 * 0.80) / own.calibration.share("trainer_busy")
    assert linear == pytest.approx(expected, rel=0.01)


def test_kernels_without_products_move_what_is_kept() -> None:
    """By hand, of a dense layer in bfloat16: what a pass keeps goes once through memory in it, 1.25 times backwards."""
    dense = load_facts("Qwen3-8B")
    d, q, kv, f, layers, tokens = 4096, 4096, 1024, 12288, 36, 64 * 2048 / 8
    norms = 2 * (4 * d)
    attention = (q + kv) * 4 + 2 * kv + 2 * q + 4 * 32
    kept = layers * (norms + attention + 2 * 3 * f)
    own = rates()
    shape = TrainerShape(nodes=1, gpus_per_node=8, recompute="none", micro_batch_tokens=2048)
    found = {
        how: trainer_step(dense, replace(shape, recompute=how), TrainerBatch(64, Quantiles((2048.0,))), own)
        for how in ("none", "full")
    }
    each = tokens / own.memory / own.calibration.share("trainer_busy")
    once = found["none"]["compute.memory"].value
    again = found["full"]["compute.memory"].value
    assert once == pytest.approx((2.25 * kept + 20 * dense.vocab_size) * each, rel=0.001)
    assert again is not None
    assert again - once == pytest.approx(kept * each, rel=0.001)


def test_dispatch_sends_the_given_rows() -> None:
    def dispatch(shape: TrainerShape) -> float:
        return trainer_step(GLM5, shape, BATCH, rates())["ep.all_to_all"].value or 0.0

    wide = replace(SHAPE, expert_parallel=32)
    # torch sends a row to each of 8 experts, DeepEP one to each of 4 nodes
    assert dispatch(replace(wide, rows_sent=4.0)) == pytest.approx(dispatch(wide) / 2, rel=0.01)
    assert dispatch(replace(wide, rows_sent=8.0)) == dispatch(wide)


@pytest.mark.parametrize("model", ["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Next-80B-A3B-Instruct"])
def test_projections_of_linear_mixers_are_matrix_products(model: str) -> None:
    facts = load_facts(model)
    work = sequence_work(facts, Quantiles((4096.0,)))
    projections = sum(layer.mixer.projection_flops for layer in facts.layers if layer.mixer is not None)
    assert work.linear > projections + 2 * facts.vocab_size * facts.hidden_size
    # the scans are small beside them
    assert work.scores < projections


def test_features_move_the_step_the_right_way() -> None:
    assert seconds(replace(SHAPE, recompute="none")) < seconds(replace(SHAPE, recompute="selective")) < seconds()
    assert seconds(replace(SHAPE, compute_dtype="bfloat16")) > seconds()
    assert seconds(replace(SHAPE, offload_optimizer=True)) > seconds()
    assert seconds(replace(SHAPE, head_twice=True)) > seconds()
    some = seconds(replace(SHAPE, recompute_every=4))
    assert seconds(replace(SHAPE, recompute="none")) < some < seconds()
    on_host = {"offload_parameters": True}
    assert seconds(replace(SHAPE, **on_host)) > seconds(replace(SHAPE, offload_optimizer=True))
    assert seconds(replace(SHAPE, nodes=24)) < seconds() < seconds(replace(SHAPE, nodes=6))
    assert seconds(batch=replace(BATCH, router_replay=True)) > seconds()
    # a forward pass more, of the two and twice as much backward that there are with recomputation
    beside = seconds(replace(SHAPE, reference="device"))
    assert 1.1 * seconds() < beside < 1.4 * seconds()
    assert seconds(replace(SHAPE, reference="host")) > beside
    # experts on other nodes: dispatch goes through the adapters
    assert seconds(replace(SHAPE, expert_parallel=32)) > seconds()


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    """What steps share is kept: of another shape, batch or rates nothing else may come."""
    own, other = rates(), rates()
    slow = replace(other, calibration=other.calibration.moved("efficiencies.trainer_busy", 0.5))
    asked = [
        (replace(SHAPE, offload_optimizer=moments, offload_activations=inputs, context_parallel=cp), batch, on)
        for moments in (True, False)
        for inputs in (True, False)
        for cp in (4, 8)
        for batch in (BATCH, replace(BATCH, router_replay=True))
        for on in (own, slow)
    ]
    after_others = [trainer_step(GLM5, *one) for one in asked]
    assert len({(table.seconds, tuple(term.name for term in table)) for table in after_others}) == len(asked)
    for one, table in zip(asked, after_others, strict=True):
        times_trainer._on_devices.cache_clear()
        assert trainer_step(GLM5, *one) == table


def test_selective_recomputation_repeats_neither_experts_nor_exchanges() -> None:
    none, selective, full = (
        trainer_step(GLM5, replace(SHAPE, recompute=how), BATCH, rates()) for how in ("none", "selective", "full")
    )
    for name in ("compute.experts", "compute.attention", "ep.all_to_all"):
        assert none[name].value == selective[name].value < full[name].value, name
    assert none["compute.linear"].value < selective["compute.linear"].value == full["compute.linear"].value


def test_short_steps_cannot_hide_the_collectives() -> None:
    few = TrainerBatch(32, Quantiles((2048.0,)))
    shape = replace(SHAPE, context_parallel=1, micro_batch_tokens=4096)
    exposed = trainer_step(GLM5, shape, few, rates())["fsdp.exposed"].value
    assert exposed is not None
    assert exposed > 1.0
    assert trainer_step(GLM5, SHAPE, BATCH, rates())["fsdp.exposed"].value == 0.0


def test_a_missing_number_is_named_and_the_rest_is_known() -> None:
    own = rates()
    node = own.hardware.node
    bare = node.model_copy(update={"gpu": node.gpu.model_copy(update={"nvlink_gb_s": None})})
    cut = Rates(NodeHardware(own.hardware.cluster, "gpu", bare), own.calibration)
    table = trainer_step(GLM5, SHAPE, BATCH, cut)
    assert table.seconds is None
    assert table.missing == ("cluster.partitions.gpu.node.gpu.nvlink_gb_s",)
    assert (table["compute.linear"].value or 0) > 0


def test_packing_fills_micro_batches_as_the_orchestrator_does() -> None:
    from hpcrl.models.packing import training_cost
    from hpcrl.rollouts.batches.packing import pack

    lengths = quantiles_of(LogNormal(kind="lognormal", median=3000, sigma=0.8, maximum=8192))
    sizes = [round(size) for size in reversed(lengths.sample(64))]
    for facts, cost in ((None, float), (GLM5, training_cost(GLM5))):
        own = pack_rows(lengths, 64, 4, 8192, facts)
        shards = pack(sizes, budget=8192, world_size=4, cost=cost)
        assert own.micro_batches == len(shards[0])
        costs = [cost(size) for size in sizes]
        slowest = sum(max(sum(costs[i] for i in shard[row]) for shard in shards) for row in range(len(shards[0])))
        assert own.imbalance(4) == pytest.approx(4 * slowest / sum(costs), rel=0.02)


def test_work_of_long_sequences_is_more_than_of_short_ones() -> None:
    short, long = sequence_work(GLM5, Quantiles((1000.0,))), sequence_work(GLM5, Quantiles((100_000.0,)))
    assert short.linear == pytest.approx(long.linear)
    assert long.indexer > 10 * short.indexer
    # sparse attention looks at no more than its top-k
    assert long.scores < 10 * short.scores


def test_a_huge_batch_is_packed_as_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = quantiles_of(LogNormal(kind="lognormal", median=20_000.0, sigma=0.8, maximum=131_072))
    large, huge = (pack_rows(lengths, rollouts, 24, 131_072) for rollouts in (PACKED, 10**4 * PACKED))
    assert huge.tokens == pytest.approx(10**4 * large.tokens)
    assert huge.critical_tokens == pytest.approx(10**4 * large.critical_tokens)
    assert huge.micro_batches == 10**4 * large.micro_batches
    # and a large one nearly as when its rollouts are packed one by one
    monkeypatch.setattr(times_work, "PACKED", 2 * PACKED)
    whole = pack_rows.__wrapped__(lengths, 2 * PACKED, 24, 131_072)
    assert whole.critical_tokens == pytest.approx(2 * large.critical_tokens, rel=0.01)
    assert whole.micro_batches == pytest.approx(2 * large.micro_batches, rel=0.02)


def test_a_ring_carries_expanded_keys_and_gradients() -> None:
    """DeepSeek-V3: 128 heads of 192 and 128 channels, where 576 numbers a token are gathered."""
    facts = load_facts("DeepSeek-V3")
    full, ring = (
        trainer_step(facts, replace(SHAPE, cp_scheme=scheme), BATCH, rates())["cp.keys_and_values"]
        for scheme in ("gather", "ring")
    )
    assert ring.inputs["bytes"] / full.inputs["bytes"] == pytest.approx(128 * 320 / 576)
    # there, once more where the layer is computed again, and gradients back, in the dtype of the model
    assert full.inputs["times"] == (2 if SHAPE.recompute == "full" else 1) + 1
    # keys travel with gradients in float32
    assert ring.inputs["times"] == full.inputs["times"] + 2


def test_gathered_latents_are_less_to_send_and_more_to_compute() -> None:
    """DeepSeek-V3 sends queries, keys, values and outputs of all heads by Ulysses, each to one rank of four."""
    facts = load_facts("DeepSeek-V3")
    ulysses, gather = (
        trainer_step(facts, replace(SHAPE, cp_scheme=scheme), BATCH, rates()) for scheme in ("ulysses", "gather")
    )
    sent = ulysses["cp.keys_and_values"].inputs["bytes sent"], gather["cp.keys_and_values"].inputs["bytes"]
    assert sent[0] / sent[1] == pytest.approx(128 * 2 * 320 / (576 * SHAPE.context_parallel))
    assert gather["cp.keys_and_values"].value < ulysses["cp.keys_and_values"].value
    # forward, again, and both gradients of all tokens, less what linear layers count of a rank's own
    expansion = gather["cp.expansion"].inputs
    assert expansion["operations a token"] == len(facts.layers) * 2 * 512 * 128 * 256
    passes = 2 if SHAPE.recompute == "full" else 1
    assert expansion["times"] == SHAPE.context_parallel * (passes + 1 + 2) - (passes + 2)
    assert "cp.expansion" not in [term.name for term in ulysses.terms]


def test_copies_hold_more_each_and_add_up_their_gradients() -> None:
    """A rank of two copies holds what one of half the ranks does; gathers stay within a copy."""
    shape = replace(SHAPE, copies=2)
    assert shape.shards == SHAPE.ranks // 2
    tables = [trainer_step(GLM5, own, BATCH, rates()) for own in (SHAPE, shape)]
    names = ("optimizer.memory", "fsdp.gather", "fsdp.reduce_scatter")
    (memory, gather, scatter), (more, near, both) = ([table[name].value or 0.0 for name in names] for table in tables)
    assert more == pytest.approx(2 * memory)
    assert near < gather
    assert both / near > scatter / gather
    copied, sharded = (
        trainer_peak(GLM5, TrainerMemory(ranks=ranks, dp_replicate=copies, micro_batch_tokens=8192)).total
        for ranks, copies in ((64, 2), (32, 1))
    )
    assert copied == sharded
