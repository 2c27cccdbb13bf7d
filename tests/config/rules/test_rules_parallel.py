"""Rules about parallelism and memory settings: each broken by one change, each has a hint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.rules.table import KERNEL_RULES, PARALLEL_RULES, QUANTISATION_RULES, check_rules
from hpcrl.errors import ConfigError

RULES = (*PARALLEL_RULES, *KERNEL_RULES, *QUANTISATION_RULES)
GLM5 = ("job.payload=probe",)

#: without the flag that makes FP8 of hand-offs
NO_FLAG = ("engine.vllm_args={gpu-memory-utilization: 0.75}",)
UNQUANTISED = ("engine.memory.weights=as_dtype", *NO_FLAG)

#: rule, settings that break it, key of the finding
BROKEN = {
    "planned-settings": (("job.payload=roles", "engine.tp=2"), "engine.tp"),
    "dispatcher-fits": (
        ("trainer.parallelism.dispatcher=deepep", "trainer.parallelism.ep=1"),
        "trainer.parallelism.dispatcher",
    ),
    "kernels-fit": (
        ("trainer.kernels.sparse_attention=triton", "trainer.dtype=float32"),
        "trainer.kernels.sparse_attention",
    ),
    "deterministic-holds": (
        ("trainer.deterministic=true", "trainer.kernels.sparse_attention=flash_mla_cudnn"),
        "trainer.kernels.sparse_attention",
    ),
    "world-size": (("trainer.parallelism.cp=5",), "trainer.parallelism.cp"),
    "replica-size": (("engine.tp=3",), "engine.tp"),
    "adapters-load": (("trainer.lora.rank=1024",), "trainer.lora.rank"),
    "adapters-train": (("trainer.lora.rank=12",), "trainer.lora.rank"),
    "replay-sees-all-routes": (
        ("trainer.router_replay=true", "engine.decode.vllm_args.async-scheduling=true"),
        "engine.decode.vllm_args.async-scheduling",
    ),
    "quantised-once": (("handoff.kind=fp8",), "engine.vllm_args.quantization"),
    "fp8-is-one": (("trainer.precision.fp8.keep=['*.o_proj']",), "trainer.precision.fp8"),
    "fp8-multiplies": (("trainer.dtype=float32",), "trainer.precision.fp8.backend"),
    "planned-engine-memory": (
        ("engine.vllm_args.gpu-memory-utilization=0.8",),
        "engine.vllm_args.gpu-memory-utilization",
    ),
    "checkpointing-applies": (
        ("trainer.memory.activation_checkpointing=none", "trainer.memory.checkpoint_every_layers=2"),
        "trainer.memory.checkpoint_every_layers",
    ),
    "activation-offload-applies": (
        ("trainer.memory.activation_checkpointing=none",),
        "trainer.memory.activation_offload",
    ),
    "optimizer-offloaded-once": (("trainer.memory.parameter_offload=true",), "trainer.memory.optimizer_offload"),
    "compile-applies": (
        ("trainer.memory.compile=true", "trainer.memory.activation_checkpointing=selective"),
        "trainer.memory.activation_checkpointing",
    ),
    "head-chunk-applies": (
        ("trainer.memory.lm_head_chunk_tokens=40000",),
        "trainer.memory.lm_head_chunk_tokens",
    ),
    "engine-memory-applies": (("engine.backend=embedded",), "engine.memory.weights"),
    "one-kv-tier": (
        ("engine.memory.kv_offload_gib=10.0", "engine.kv_store.segment_gib=100.0"),
        "engine.memory.kv_offload_gib",
    ),
    "offload-leaves-gpu": (
        ("engine.memory.kv_offload_gib=10.0", "engine.device=cpu"),
        "engine.memory.kv_offload_gib",
    ),
    "disk-below-host": (("engine.memory.kv_offload_disk_gib=10.0",), "engine.memory.kv_offload_gib"),
    "host-holds-offload": (("engine.memory.kv_offload_gib=3000.0",), "engine.memory.kv_offload_gib"),
}


def _check(*settings: str, planning: bool = False) -> None:
    check_rules(load_recipe("glm5_swe", (*GLM5, *settings)), load_cluster("h200-28"), planning=planning)


def test_the_reference_recipe_keeps_all_rules() -> None:
    _check()


@pytest.mark.parametrize("name", BROKEN)
def test_rule(name: str) -> None:
    settings, key = BROKEN[name]
    rule = next(rule for rule in RULES if rule.name == name)
    with pytest.raises(ConfigError) as caught:
        _check(*settings)
    mine = [finding for finding in caught.value.findings if finding.what.endswith(f"[{name}]")]
    assert key in [finding.key for finding in mine]
    assert all(finding.hint == rule.hint for finding in mine)


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in RULES} == set(BROKEN)


def test_a_plan_may_ask_for_what_this_version_cannot_start() -> None:
    _check("job.payload=roles", planning=True)
    with pytest.raises(ConfigError, match="world-size"):
        _check("job.payload=roles", "trainer.parallelism.cp=5", planning=True)


@pytest.mark.parametrize("name", ["dp_replicate", "ep", "cp"])
def test_copies_leave_ranks_that_other_degrees_divide(name: str) -> None:
    """224 ranks: 7 copies of 32."""
    degree = {"dp_replicate": 9, "ep": 28, "cp": 28}[name]
    settings = [f"trainer.parallelism.{name}={degree}", "trainer.ranks=224", "trainer.nodes=28"]
    copies = [] if name == "dp_replicate" else ["trainer.parallelism.dp_replicate=7"]
    with pytest.raises(ConfigError) as caught:
        _check("job.payload=roles", *settings, *copies)
    found = [f.key for f in caught.value.findings if f.what.endswith("[world-size]")]
    assert f"trainer.parallelism.{name}" in found


def test_deepep_takes_bfloat16_to_other_gpus() -> None:
    _check("trainer.parallelism.dispatcher=deepep")
    for setting in ("trainer.parallelism.ep=1", "trainer.dtype=float32"):
        with pytest.raises(ConfigError, match="dispatcher-fits"):
            _check("trainer.parallelism.dispatcher=deepep", setting)


@pytest.mark.parametrize("where", ["env", "env_by_role"])
def test_a_profile_does_not_take_from_cublas_what_a_deterministic_trainer_needs(where: str) -> None:
    name, loaded = "CUBLAS_WORKSPACE_CONFIG", load_cluster("h200-28")
    recipe = load_recipe("glm5_swe", (*GLM5, "trainer.deterministic=true"))
    for value in (":0:0", ":16:8"):
        variables: dict[str, Any] = {"env": {name: value}, "env_by_role": {"trainer": {name: value}}}
        site = replace(loaded, value=loaded.value.model_copy(update={where: variables[where]}))
        if value == ":16:8":
            check_rules(recipe, site)
            continue
        with pytest.raises(ConfigError, match="deterministic-holds") as caught:
            check_rules(recipe, site)
        role = ".trainer" if where == "env_by_role" else ""
        assert [finding.key for finding in caught.value.findings] == [f"cluster.{where}{role}.{name}"]


def test_hints_resolve_the_conflict() -> None:
    """What the hint says keeps the rules again."""
    _check("trainer.deterministic=true")
    _check("trainer.lora.rank=16", "trainer.precision.fp8=null", *UNQUANTISED)
    _check("handoff.kind=fp8", *NO_FLAG)
    _check("engine.memory.kv_offload_gib=500.0")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((*NO_FLAG,), "engine.memory.weights"),
        (("engine.memory.weights=as_dtype",), "engine.memory.weights"),
        (("handoff.kind=fp8", "engine.memory.weights=as_dtype", *NO_FLAG), "engine.memory.weights"),
    ],
)
def test_weights_that_are_planned_as_others_than_served(settings: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(*settings)
    assert [finding.key for finding in caught.value.findings if "quantised-once" in finding.what] == [key]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (UNQUANTISED, "handoff.kind"),
        (("engine.vllm_args.quantization=fp8",), "engine.vllm_args.quantization"),
        (("handoff.dtype=float32",), "handoff.dtype"),
        (("engine.dtype=float32",), "engine.dtype"),
        (("trainer.precision.fp8.experts=false",), "trainer.precision.fp8"),
        # one side of the engines alone
        ((*NO_FLAG, "engine.decode.vllm_args.quantization=fp8_per_block"), "handoff.kind"),
    ],
)
def test_a_trainer_in_fp8_has_the_weights_of_its_engines(settings: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(*settings)
    assert key in [finding.key for finding in caught.value.findings if "[fp8-is-one]" in finding.what]


SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"env": {SCALES: "1"}}, [f"cluster.env.{SCALES}"]),
        ({"env": {SCALES: "0"}}, []),
        ({"env_by_role": {"engine": {SCALES: "1"}}}, [f"cluster.env_by_role.engine.{SCALES}"]),
        ({"env_by_role": {"decode": {SCALES: "1"}}}, [f"cluster.env_by_role.decode.{SCALES}"]),
        ({"env_by_role": {"trainer": {SCALES: "1"}}}, []),
        ({"gpu_type": "b200"}, ["cluster.partitions.gpu.node.gpu_type"]),
        ({"gpu_type": "nvidia_gb300"}, ["cluster.partitions.gpu.node.gpu_type"]),
        ({"gpu_type": "nvidia_h100_80gb_hbm3"}, []),
        ({"gpu_type": None}, []),
    ],
)
def test_engines_of_a_trainer_in_fp8_keep_its_scales(changed: dict[str, Any], keys: list[str]) -> None:
    """vLLM would round scales up to powers of two; so do GPUs that have no others."""
    loaded = load_cluster("h200-28")
    site = loaded.value.model_dump(exclude_unset=True)
    (node,) = [partition["node"] for partition in site["partitions"].values()]
    if "gpu_type" in changed:
        node["gpu_type"] = changed["gpu_type"]
    variables = {key: value for key, value in changed.items() if key != "gpu_type"}
    profile = replace(loaded, value=SlurmCluster.model_validate({**site, **variables}))
    found: list[str] = []
    try:
        check_rules(load_recipe("glm5_swe", GLM5), profile)
    except ConfigError as error:
        found = [finding.key for finding in error.findings if "[fp8-is-one]" in finding.what]
    assert sorted(set(found)) == keys
    # engines of a trainer without FP8 do as they like
    check_rules(load_recipe("glm5_swe", (*GLM5, "trainer.precision.fp8=null")), profile)


def test_layers_in_fp8_are_not_compiled() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.precision\.fp8: products in FP8 are not compiled.*\[compile-applies\]"
    ):
        _check("trainer.memory.compile=true")


def test_one_quantiser_may_keep_what_it_likes() -> None:
    """Versions in FP8 say themselves what is in them; each side of the engines may have a flag of its own."""
    _check("handoff.kind=fp8", "trainer.precision.fp8.keep=['*.o_proj']", *NO_FLAG)
    sides = [f"engine.{side}.vllm_args.quantization=fp8_per_block" for side in ("prefill", "decode")]
    _check(*NO_FLAG, *sides)


def test_an_adapter_is_not_rounded_to_fp8() -> None:
    with pytest.raises(ConfigError) as caught:
        _check("trainer.lora={}", "handoff.kind=fp8", *NO_FLAG)
    mine = {finding.key for finding in caught.value.findings if "adapters-load" in finding.what}
    assert mine == {"engine.memory.weights", "handoff.kind", "trainer.precision.fp8"}


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("trainer.freeze=['*.mlp.gate.weight']", "trainer.freeze"),
        ("handoff.delta_chain=4", "handoff.delta_chain"),
        ("trainer.memory.compile=true", "trainer.memory.compile"),
        ("trainer.optimizer.kind=muon", "trainer.optimizer.kind"),
    ],
)
def test_adapters_leave_nothing_to_do_for_some_settings(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check("trainer.lora={}", "trainer.precision.fp8=null", setting, *UNQUANTISED)
    assert key in {finding.key for finding in caught.value.findings if "adapters-train" in finding.what}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("algorithm.kl={coefficient: 0.1, reference_every_steps: 3}",), "algorithm.kl.reference_every_steps"),
        (("algorithm.kl={coefficient: 0.1, on_host: true}",), "algorithm.kl.on_host"),
        (("algorithm.kl={coefficient: 0.1, applied_to: reward, estimator: k3}",), "algorithm.kl.estimator"),
    ],
)
def test_settings_of_the_reference_that_do_nothing(settings: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check("trainer.lora={}", "trainer.precision.fp8=null", *settings, *UNQUANTISED)
    assert key in {finding.key for finding in caught.value.findings if "kl-copy-applies" in finding.what}


def test_balanced_experts_are_not_replayed() -> None:
    with pytest.raises(ConfigError, match=r"balancing moves experts.*\[replay-sees-all-routes\]"):
        _check("trainer.router_replay=true", "engine.vllm_args.enable-eplb=true")


def test_experts_are_returned_where_all_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        _check("engine.return_routed_experts=true", "engine.decode.vllm_args.async-scheduling=true")
    assert [finding.key for finding in caught.value.findings if "[replay-sees" in finding.what] == [
        "engine.decode.vllm_args.async-scheduling"
    ]


def test_replay_goes_with_prefill_and_decode() -> None:
    _check("trainer.router_replay=true")


@pytest.mark.parametrize("tier", ["engine.kv_store={segment_gib: 100}", "engine.memory.kv_offload_gib=100"])
def test_replay_goes_with_kv_that_is_fetched(tier: str) -> None:
    check_rules(load_recipe("qwen3_30b_a3b", ("trainer.router_replay=true", tier)), load_cluster("h200-28"))


def test_the_quickstart_is_not_touched() -> None:
    check_rules(load_recipe("quickstart"), load_cluster("local"))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("engine.decode.max_num_seqs=97", "engine.decode.max_num_batched_tokens"),
        ("engine.decode.max_num_batched_tokens=95", "engine.decode.max_num_batched_tokens"),
        ("engine.prefill.max_num_seqs=9000", "engine.prefill.max_num_batched_tokens"),
        ("engine.max_num_batched_tokens=95", None),
    ],
)
def test_a_step_of_each_side_holds_its_sequences(setting: str, key: str | None) -> None:
    """As vLLM checks them: the values that a side is started with, not those of the engine that it replaces."""
    recipe, site = load_recipe("glm5_swe", (setting,)), load_cluster("h200-28")
    if key is None:
        check_rules(recipe, site, planning=True)
        return
    with pytest.raises(ConfigError, match="cannot hold one token of each of") as caught:
        check_rules(recipe, site, planning=True)
    assert [finding.key for finding in caught.value.findings] == [key]
