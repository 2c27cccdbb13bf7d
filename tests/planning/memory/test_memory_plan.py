"""Memory of GPUs and hosts: the reference run fits, smaller ones do not and are told why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.lora import LoraConfig
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.inference import kept_rows
from hpcrl.models import ModelFacts, load_facts
from hpcrl.planning.ledger import GIB, Ledger, Term, explain
from hpcrl.planning.memory.activations import (
    ActivationShape,
    attention_output_bytes,
    saved_bytes,
)
from hpcrl.planning.memory.engine import EngineMemory, engine_ledger, kv_bytes_of_rank, kv_capacity
from hpcrl.planning.memory.fit import MemoryReport, engine_memory, memory_report, trainer_memory
from hpcrl.planning.memory.host import KEPT_ROWS_BYTES
from hpcrl.planning.memory.margin import expert_margin
from hpcrl.planning.memory.padding import model_padding
from hpcrl.planning.memory.remedies import change, why_not
from hpcrl.planning.memory.settings import TrainerMemory
from hpcrl.planning.memory.trainer import trainer_moments, trainer_peak

GLM5 = load_facts("GLM-5")


def _glm5(*settings: str) -> tuple[Recipe, ClusterProfile]:
    return load_recipe("glm5_swe", settings).value, load_cluster("h200-28").value


def _report(*settings: str) -> MemoryReport:
    return memory_report(*_glm5(*settings), GLM5)


def test_the_reference_split_fits_with_named_headroom() -> None:
    report = _report()
    assert report.ok
    assert [(place.role.value, place.kind) for place in report.places] == [
        ("trainer", "gpu"),
        ("trainer", "host"),
        ("prefill", "gpu"),
        ("prefill", "host"),
        ("decode", "gpu"),
        ("decode", "host"),
    ]
    for place in report.places:
        assert place.headroom is not None
        assert place.headroom > 0
        assert place.ledger.largest.name in place.summary()


def test_a_shared_node_has_one_host_and_engines_have_the_gpus_that_are_left() -> None:
    qwen, cluster = load_facts("Qwen3-30B-A3B"), load_cluster("h200-28").value

    def report(*settings: str) -> MemoryReport:
        return memory_report(load_recipe("qwen3_30b_a3b_node", settings).value, cluster, qwen)

    shared = report()
    assert [(place.role, place.kind) for place in shared.places] == [
        (Role.TRAINER, "gpu"),
        (Role.ENGINE, "gpu"),
        (Role.TRAINER, "host"),
    ]
    # the same four GPUs a role, on nodes of their own
    apart = [report("engine.placement=apart").place(role, "host").needed for role in (Role.TRAINER, Role.ENGINE)]
    host = shared.place(Role.TRAINER, "host")
    mine = sum(term.value for term in host.ledger if term.counts and not term.name.startswith("engines: "))
    assert mine == apart[0]
    # four ranks each
    assert host.ledger["engines: processes"].value == host.ledger["processes"].value
    experts = shared.place(Role.ENGINE, "gpu").ledger["expert weights"].value
    assert experts == 2 * report("engine.placement=apart").place(Role.ENGINE, "gpu").ledger["expert weights"].value
    two = report("engine.replicas=2")
    assert two.place(Role.ENGINE, "gpu").ledger["expert weights"].value == 2 * experts
    window = "engines: window of a version on the node"
    assert two.place(Role.TRAINER, "host").ledger[window].value == 2 * host.ledger[window].value


def test_known_sizes_of_the_reference_run() -> None:
    report = _report()
    gpu = report.place(Role.TRAINER, "gpu").ledger
    # 744B parameters in float32 over 96 GPUs
    assert gpu["master weights"].value == 4 * 743_911_218_432 // 96
    # 12 nodes do not divide 32 experts, but the 6,144 numbers of a token: a little is left, of matrices whose rows 96
    # does not divide
    experts = 75 * 256 * 3 * 6144 * 2048
    padding = gpu["padding of shards"].value / 8 * 96
    assert 0 < padding < 0.02 * (743_911_218_432 - experts)
    # two float32 moments on the hosts, 8 GPUs a node
    moments = report.place(Role.TRAINER, "host").ledger["optimizer state"].value
    assert moments == pytest.approx(8 * (743_911_218_432 + padding) / 12, rel=1e-6)
    decode = report.place(Role.DECODE, "gpu")
    assert decode.ledger["expert weights"].value / GIB == pytest.approx(10.5, abs=0.1)
    assert decode.kv is not None
    assert decode.kv.sequences > 1


@pytest.mark.parametrize(
    ("settings", "role", "kind"),
    [
        (("trainer.nodes=8", "trainer.ranks=64"), Role.TRAINER, "gpu"),
        (("trainer.memory.activation_checkpointing=none",), Role.TRAINER, "gpu"),
        (("trainer.memory.optimizer_offload=false",), Role.TRAINER, "gpu"),
        (("engine.prefill.nodes=1",), Role.PREFILL, "gpu"),
        (("engine.kv_store.segment_gib=1900.0",), Role.DECODE, "host"),
    ],
)
def test_what_does_not_fit_is_told_what_would_help(settings: tuple[str, ...], role: Role, kind: str) -> None:
    recipe, cluster = _glm5(*settings)
    shortages = {(s.place.role, s.place.kind): s for s in why_not(recipe, cluster, GLM5)}
    shortage = shortages[role, kind]
    assert shortage.missing > 0
    assert "GiB short" in shortage.place.summary()
    assert shortage.knobs
    for knob in shortage.knobs:
        # the knob is true: planned again, the place fits, with the head-room that was promised
        again = memory_report(change(recipe, knob.changes), cluster, GLM5).place(role, kind)
        assert again.ok
        assert again.headroom == knob.headroom
        assert "--set" in str(knob)


def test_embedded_engines_of_two_sides_and_their_pool_are_counted() -> None:
    """On nodes each gives memory to the pool; on one machine all engines of both sides are there."""
    pool = "engine.kv_store={segment_gib: 3}"
    for role in (Role.PREFILL, Role.DECODE):
        ledger = _report("engine.backend=embedded", pool).place(role, "host").ledger
        assert (ledger["Mooncake segment"].value, ledger["Mooncake buffers"].value) == (3 * GIB, GIB)
    sides = ("engine.prefill={replicas: 2, nodes: 1}", "engine.decode={replicas: 3, nodes: 1}")
    local = load_cluster("local").value
    report = memory_report(load_recipe("quickstart", (*sides, pool)).value, local, GLM5)
    (engines,) = [term for place in report.places for term in place.ledger.terms if term.name == "engines"]
    assert engines.inputs["replicas"] == 5
    assert engines.value > 5 * 4 * GIB


def test_a_missing_number_is_named() -> None:
    recipe, _ = _glm5()
    with pytest.raises(ConfigError, match=r"cluster\.partitions\.train\.node\.gpu\.memory_gib"):
        memory_report(recipe, load_cluster("roce-h100").value, GLM5)


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


def test_the_host_holds_versions_and_checkpoints_that_are_written_aside() -> None:
    recipe, cluster = _glm5()

    def host(*settings: str) -> dict[str, int]:
        changed = load_recipe("glm5_swe", ("job.payload=probe", *settings)).value
        return {t.name: t.value for t in memory_report(changed, cluster, GLM5).place(Role.TRAINER, "host").ledger.terms}

    plain, parameters = host(), GLM5.num_parameters()
    padding = model_padding(GLM5, shards=96, ep=8)
    # bfloat16, and float32 weights with two moments as ranks hold them, of 12 nodes
    assert plain["images of a version"] == pytest.approx(2 * parameters / 12, rel=1e-3)
    assert plain["copy for a checkpoint"] == pytest.approx(parameters + padding, rel=1e-3)
    assert "copy for a checkpoint" not in host("checkpoint.mode=sync")
    deltas = host("handoff.delta_chain=4")
    assert deltas["images of a version"] == 2 * plain["images of a version"]
    assert deltas["changes of a delta"] == pytest.approx(0.5 * plain["images of a version"])
    assert host("handoff.overlap=false")["images of a version"] == 8 * (1 << 30)
    quantised = host("handoff.kind=fp8", "engine.vllm_args={}")
    assert quantised["images of a version"] < 0.52 * plain["images of a version"]
    assert recipe.checkpoint.mode == "async"


def test_experts_that_move_are_read_by_all_ranks_of_their_side() -> None:
    """Balanced experts (EPLB) of one side: its ranks read the whole version, those of the other their own experts."""

    def versions(*settings: str) -> dict[Role, int]:
        report = _report(*settings)
        sides = (Role.PREFILL, Role.DECODE)
        return {role: report.place(role, "host").ledger["next version"].value for role in sides}

    still, moving = versions(), versions("engine.decode.vllm_args.enable-eplb=true")
    assert moving[Role.PREFILL] == still[Role.PREFILL]
    assert moving[Role.DECODE] > 10 * still[Role.DECODE]


def test_what_workers_keep_of_the_base_of_adapters_is_counted() -> None:
    def kept(*settings: str) -> dict[str, int]:
        ledger = _report("trainer.lora={}", *settings).place(Role.DECODE, "host").ledger
        return {term.name: term.value for term in ledger.terms}

    assert "kept base of adapters" not in {t.name for t in _report().place(Role.DECODE, "host").ledger.terms}
    assert kept()["kept base of adapters"] == 8 * 8 * (1 << 30)
    # without a limit a little less than they load: embeddings, head and norms of layers have no adapters
    most = kept("handoff.adapter_base_gib=1000.0")
    assert 0.8 * most["next version"] < most["kept base of adapters"] < most["next version"]
    attention = kept("handoff.adapter_base_gib=1000.0", "trainer.lora.targets=[attention]")
    assert 0 < attention["kept base of adapters"] < 0.5 * most["kept base of adapters"]


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


def test_a_copy_of_the_start_model_is_where_the_recipe_has_it() -> None:
    plain, kl = _report(), "algorithm.kl={coefficient: 0.1}"
    on_gpus, on_hosts = _report(kl), _report("algorithm.kl={coefficient: 0.1, on_host: true}")
    padding = model_padding(GLM5, shards=96, ep=8)
    copy = 2 * (GLM5.num_parameters() + padding) // 96
    for place, report in (("gpu", on_gpus), ("host", on_hosts)):
        ranks = {"gpu": 1, "host": 8}[place]
        assert report.place(Role.TRAINER, place).ledger["reference weights"].value == copy * ranks
        more = report.place(Role.TRAINER, place).ledger.total - plain.place(Role.TRAINER, place).ledger.total
        # the share that the allocator of a GPU cannot use comes with it
        assert copy * ranks <= more <= 1.05 * copy * ranks + 1
    other = on_hosts.place(Role.TRAINER, "gpu").ledger
    assert other.total == plain.place(Role.TRAINER, "gpu").ledger.total


def test_a_reference_that_is_refreshed_is_saved() -> None:
    start, refreshed = (
        _report("checkpoint.mode=async", f"algorithm.kl={{coefficient: 0.1{more}}}")
        .place(Role.TRAINER, "host")
        .ledger["copy for a checkpoint"]
        .value
        for more in ("", ", reference_every_steps: 5")
    )
    assert refreshed * 12 == pytest.approx(start * 14, rel=1e-6)


@pytest.mark.parametrize("settings", [(), ("trainer.parallelism.ep=1", "trainer.parallelism.dispatcher=deepep")])
def test_no_buffer_of_deepep_where_it_carries_nothing(settings: tuple[str, ...]) -> None:
    assert "DeepEP buffer" not in _names_of_trainer(*settings)


def test_recipe_with_deepep_has_its_buffer() -> None:
    assert "DeepEP buffer" in _names_of_trainer("trainer.parallelism.dispatcher=deepep")


def _names_of_trainer(*settings: str) -> set[str]:
    return {term.name for term in _report(*settings).place(Role.TRAINER, "gpu").ledger.terms}


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


def test_ledger_sums_what_cannot_be_given_back() -> None:
    terms = (Term("a", 3 * GIB, "3"), Term("cache", 5 * GIB, "5", counts=False), Term("nothing", 0, "0"), None)
    ledger = Ledger.of("now", terms)
    assert ledger.total == 3 * GIB
    assert [term.name for term in ledger.terms] == ["a", "cache"]
    assert ledger.largest.name == "a"
    assert explain(Term("b", GIB, "x / y", {"x": 2.0, "y": 0.5}, "assumed")) == (
        "b: 1.00 GiB = x / y with x = 2, y = 0.5 [assumed]"
    )


def test_local_run() -> None:
    recipe = load_recipe("quickstart").value
    place = memory_report(recipe, load_cluster("local").value, load_facts("Qwen3-0.6B")).places[0]
    assert place.capacity is None
    assert place.headroom is None
    assert place.ok
    assert {"trainer ranks", "engines"} <= {term.name for term in place.ledger.terms}


def test_each_side_of_serving_has_its_own_limits() -> None:
    """A step of a side sizes what it computes in, and DeepEP's buffers by the tokens that a rank may dispatch."""
    gpu = {role: _report().place(role, "gpu").ledger for role in (Role.PREFILL, Role.DECODE)}
    assert gpu[Role.PREFILL]["activations of a step"].inputs["T"] == 8192
    assert gpu[Role.DECODE]["activations of a step"].inputs["T"] == 96
    # NVLink and RDMA where a replica has several nodes; four times a message for each expert and token
    assert gpu[Role.PREFILL]["expert dispatch"].value == 2 * GIB
    assert gpu[Role.DECODE]["expert dispatch"].value == GIB + 4 * 256 * 96 * (2 * 6144 + 4 * 48)

    def dispatch(*settings: str) -> int:
        return _report(*settings).place(Role.DECODE, "gpu").ledger["expert dispatch"].value

    assert dispatch("engine.decode.max_num_seqs=48") == dispatch()
    assert dispatch("engine.decode.max_num_batched_tokens=192") - GIB == 2 * (dispatch() - GIB)
    assert _report("engine.decode.max_num_seqs=48").place(Role.DECODE, "gpu").ledger["logits"].inputs["sequences"] == 48


def test_engines_that_do_both_dispatch_as_they_are_started() -> None:
    """`hpcrl.jobplan.commands.vllm` gives the low-latency kernels to engines that only decode."""
    engine = load_recipe("qwen3_30b_a3b").value.engine
    one = engine_memory(engine, ranks=8, nodes=1, role=Role.ENGINE)
    assert engine_ledger(load_facts("Qwen3-30B-A3B"), one)["expert dispatch"].value == GIB


def test_too_large_steps_of_a_decode_engine_are_the_first_hint() -> None:
    recipe, cluster = _glm5("engine.decode.max_num_batched_tokens=8192")
    shortage = next(s for s in why_not(recipe, cluster, GLM5) if s.place.role is Role.DECODE)
    assert shortage.knobs[0].changes == (("engine.decode.max_num_batched_tokens", 96),)


def test_a_plan_overflows_just_above_its_margin() -> None:
    recipe, cluster = _glm5()
    margin = expert_margin(recipe, cluster, GLM5)
    assert margin is not None
    assert margin.overflows is not None
    assert margin.overflows == pytest.approx(2.45, abs=0.05)
    gpu_bytes = _report().place(Role.TRAINER, "gpu").capacity
    assert gpu_bytes is not None
    own = trainer_memory(recipe, device="cuda")
    fits = [
        trainer_peak(GLM5, replace(own, expert_imbalance=margin.overflows + change)).total <= gpu_bytes
        for change in (0.0, 0.01)
    ]
    assert fits == [True, False]


def test_margins_at_their_ends() -> None:
    recipe, cluster = _glm5("trainer.nodes=6", "trainer.ranks=48")
    short = expert_margin(recipe, cluster, GLM5)
    assert short is not None
    assert short.overflows is not None
    assert short.overflows < 1
    assert "however even" in str(short)
    recipe, cluster = _glm5("trainer.parallelism.cp=32", "trainer.parallelism.ep=8")
    roomy = expert_margin(recipe, cluster, GLM5)
    assert roomy is not None
    assert roomy.overflows is None
    assert expert_margin(_glm5("trainer.parallelism.ep=1")[0], cluster, GLM5) is None


def test_latent_attention_is_copied_beside_fp8_weights() -> None:
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


def test_fp8_and_the_indexer_of_a_trainer_by_hand() -> None:
    """Input and output gradient of the widest product twice in a byte; queries, keys and scores of the indexer."""

    def backward(facts: ModelFacts, memory: TrainerMemory) -> Ledger:
        return next(m for m in trainer_moments(facts, memory) if m.name.startswith("backward"))

    memory = TrainerMemory(ranks=96, ep=8, cp=4, micro_batch_tokens=131072, fp8=True, activation_checkpointing="full")
    peak = backward(GLM5, memory)
    rows = 32768 * 8 * 1.25
    assert peak["FP8 copies of activations"].value == round(2 * (1 + 4 / 128) * rows * (6144 + 2 * 2048))
    queries, keys = 2 * 32768 * 32 * 128, 2 * 131072 * 128
    assert peak["indexer"].value == queries + keys + (1 << 30)
    without = backward(GLM5, replace(memory, fp8=False))
    with pytest.raises(KeyError):
        without["FP8 copies of activations"]
    assert without["indexer"].value == peak["indexer"].value
    with pytest.raises(KeyError):
        backward(load_facts("DeepSeek-V3"), memory)["indexer"]


def test_rows_of_prompts_are_counted_where_kv_is_fetched() -> None:
    """On the orchestrator's node; engines without a pool and without sides know all rows of what they answer."""

    def kept(*settings: str) -> list[float | None]:
        places = _report("engine.return_routed_experts=true", *settings).places
        ledgers = [place.ledger for place in places if (place.role, place.kind) == (Role.TRAINER, "host")]
        return [term.value for ledger in ledgers for term in ledger.terms if term.name == "routed experts of prompts"]

    alone = ("engine.prefill=null", "engine.decode=null", "engine.nodes=8", "engine.replicas=2")
    assert kept(*alone) == []
    assert kept() == [GIB]
    assert kept(*alone, "engine.kv_store={segment_gib: 880}", "engine.routed_experts_gib=3") == [3 * GIB]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_servers_of_engines_keep_rows_until_they_are_fetched(role: Role) -> None:
    """Each of the eight on a node."""

    def kept(*settings: str) -> list[float | None]:
        ledger = _report(*settings).place(role, "host").ledger
        return [term.value for term in ledger.terms if term.name == "kept routed experts"]

    assert kept("engine.return_routed_experts=true") == [8 * KEPT_ROWS_BYTES] == [8 * kept_rows._LIMIT_BYTES]
    assert kept() == []


def test_routed_experts_in_flight_are_counted_up_to_their_limit() -> None:
    """One rollout may always run; where the limit is less than that the plan says so."""

    def kept(*settings: str) -> tuple[float, str]:
        ledger = _report("engine.return_routed_experts=true", *settings).place(Role.TRAINER, "host").ledger
        ((value, formula),) = [(term.value, term.formula) for term in ledger.terms if term.name == "routed experts"]
        return value, formula

    recipe = _glm5()[0]
    one = recipe.engine.max_model_len * 78 * 8 * 3
    without, formula = kept()
    assert without == recipe.rollouts.max_in_flight * one
    assert kept("rollouts.routes_in_flight_gib=5000") == (without, formula)
    assert kept("rollouts.routes_in_flight_gib=200")[0] == 200 * GIB
    value, formula = kept("rollouts.routes_in_flight_gib=0.1")
    assert value == one
    assert formula == "one rollout: rollouts.routes_in_flight_gib (0.1) holds none"


def test_memory_for_finished_rollouts_is_counted_up_to_its_limit() -> None:
    """On the orchestrator's node: with routes of a large model it is its limit, without them what there can be."""

    def kept(*settings: str) -> float | None:
        ledger = _report(*settings).place(Role.TRAINER, "host").ledger
        values = [term.value for term in ledger.terms if term.name == "warehouse of rollouts"]
        return values[0] if values else None

    recipe = _glm5()[0]
    count = (recipe.rollouts.ready_batches + 2) * recipe.rollouts.rollouts_per_step
    without = count * recipe.engine.max_model_len * 17
    assert kept("rollouts.warehouse.limit_gib=500") == without
    routed = without + count * recipe.engine.max_model_len * 78 * 8
    assert kept("engine.return_routed_experts=true", "rollouts.warehouse.limit_gib=500") == routed
    assert kept("engine.return_routed_experts=true", "rollouts.warehouse.limit_gib=3") == 3 * GIB
    assert kept("rollouts.warehouse.directory=null") is None
    assert kept("rollouts.warehouse={backend: mooncake, limit_gib: 500}") == 500 * GIB
