"""Memory of GPUs and hosts: the reference run fits, smaller ones do not and are told why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.inference import kept_rows
from hpcrl.models import load_facts
from hpcrl.planning.ledger import GIB, Ledger, Term, explain
from hpcrl.planning.memory.fit import MemoryReport, memory_report, trainer_memory
from hpcrl.planning.memory.host import KEPT_ROWS_BYTES
from hpcrl.planning.memory.margin import expert_margin
from hpcrl.planning.memory.padding import model_padding
from hpcrl.planning.memory.remedies import change, why_not
from hpcrl.planning.memory.trainer import trainer_peak

GLM5 = load_facts("GLM-5")


def _glm5(*settings: str) -> tuple[Recipe, ClusterProfile]:
    """Return the reference run without router replay, unless ``settings`` ask for it."""
    without = ("trainer.router_replay=false", "rollouts.routes_in_flight_gib=null")
    return load_recipe("glm5_swe", (*without, *settings)).value, load_cluster("h200-28").value


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


def test_on_the_same_gpus_each_side_has_its_part() -> None:
    qwen, cluster = load_facts("Qwen3-30B-A3B"), load_cluster("h200-28").value
    node = load_cluster("h200-28").value.partitions["gpu"].node

    def report(*settings: str) -> MemoryReport:
        named = ("engine.placement=shared_gpus", "engine.memory.gpu_memory_utilization=0.4", *settings)
        return memory_report(load_recipe("qwen3_30b_a3b_node", named).value, cluster, qwen)

    found = report("engine.kv_cache_gib=20")
    trainer, engine = found.place(Role.TRAINER, "gpu"), found.place(Role.ENGINE, "gpu")
    assert node.gpu is not None
    assert trainer.capacity is not None
    assert engine.capacity is not None
    assert trainer.capacity + engine.capacity == pytest.approx(node.gpu.memory_gib * GIB)
    assert engine.capacity == pytest.approx(0.4 * node.gpu.memory_gib * GIB)
    assert engine.ledger["KV cache"].value == 20 * GIB
    assert engine.kv is not None
    assert engine.kv.cache_bytes == 20 * GIB
    assert found.place(Role.TRAINER, "host").ledger["engines: processes"].value > 0
    # more than the engine's share, and less than one sequence: vLLM would not start
    assert not report("engine.kv_cache_gib=40").place(Role.ENGINE, "gpu").ok
    assert not report("engine.kv_cache_gib=1").place(Role.ENGINE, "gpu").ok


def test_what_makes_room_on_the_same_gpus_is_found() -> None:
    qwen, site = load_facts("Qwen3-30B-A3B"), load_cluster("h200-28").value
    for settings, key in (
        (("engine.memory.gpu_memory_utilization=0.7",), "engine.memory.gpu_memory_utilization"),
        (("engine.memory.gpu_memory_utilization=0.3", "engine.kv_cache_gib=1"), "engine.kv_cache_gib"),
    ):
        more = "engine.kv_cache_gib=10" if "engine.kv_cache_gib=1" not in settings else "engine.threads=1"
        recipe = load_recipe("qwen3_30b_a3b_node", ["engine.placement=shared_gpus", more, *settings]).value
        (shortage,) = why_not(recipe, site, qwen)
        assert key in [changed for knob in shortage.knobs for changed, _ in knob.changes]


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
def test_a_plan_that_does_not_fit_names_settings_that_help(settings: tuple[str, ...], role: Role, kind: str) -> None:
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


def test_no_hint_makes_another_short_place_shorter() -> None:
    """Host memory that is short is no place for the parameters of a GPU that is short."""
    qwen, cluster = load_facts("Qwen3-30B-A3B"), load_cluster("h200-28").value
    recipe = load_recipe("quickstart", ["trainer.nodes=1", "trainer.ranks=1"]).value
    assert isinstance(cluster, SlurmCluster)
    gpu = cluster.partitions["gpu"]
    assert gpu.node is not None
    less = gpu.model_copy(update={"node": gpu.node.model_copy(update={"memory_gib": 200.0})})
    tight = cluster.model_copy(update={"partitions": {**cluster.partitions, "gpu": less}})
    before = {(s.place.role, s.place.kind): s for s in why_not(recipe, tight, qwen)}
    assert before.keys() >= {(Role.TRAINER, "gpu"), (Role.TRAINER, "host")}
    for knob in (knob for shortage in before.values() for knob in shortage.knobs):
        for place in memory_report(change(recipe, knob.changes), tight, qwen).short:
            was = before[place.role, place.kind].place
            assert (place.headroom or 0) >= (was.headroom or 0), knob


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


def test_engines_register_memory_for_what_they_pull() -> None:
    settings = ("handoff.transport=fabric", "handoff.read_streams=3")
    terms = {role: _report(*settings).place(role, "host").ledger for role in (Role.PREFILL, Role.DECODE)}
    for ledger in terms.values():
        assert ledger["segments pulled over the fabric"].value == 8 * 3 * (64 << 20)


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
    served = host("handoff.transport=fabric", "handoff.fabric_versions=2")
    assert served["versions served over the fabric"] == 2 * plain["images of a version"]
    assert "versions served over the fabric" not in plain
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


def test_too_large_steps_of_a_decode_engine_are_the_first_hint() -> None:
    recipe, cluster = _glm5("engine.decode.max_num_batched_tokens=8192")
    shortage = next(s for s in why_not(recipe, cluster, GLM5) if s.place.role is Role.DECODE)
    assert shortage.knobs[0].changes == (("engine.decode.max_num_batched_tokens", 96),)


def test_a_plan_overflows_just_above_its_margin() -> None:
    recipe, cluster = _glm5()
    margin = expert_margin(recipe, cluster, GLM5)
    assert margin is not None
    assert margin.overflows is not None
    assert margin.overflows == pytest.approx(2.86, abs=0.05)
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
    assert "perfectly balanced" in str(short)
    recipe, cluster = _glm5("trainer.parallelism.cp=32", "trainer.parallelism.ep=8")
    roomy = expert_margin(recipe, cluster, GLM5)
    assert roomy is not None
    assert roomy.overflows is None
    assert expert_margin(_glm5("trainer.parallelism.ep=1")[0], cluster, GLM5) is None


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
