"""What a plan starts as a vLLM engine, without vLLM. Golden files: the commands of the reference run.

``HPCRL_REWRITE_GOLDEN=1 pytest tests/jobplan/test_vllm_plan.py`` writes them again; read the diff.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_plan_testing import WIDE, flags_of, groups_of

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.supervisor.process.node_values import fill_node_rank

GOLDEN = Path(__file__).parent / "golden"
ANEW = {"kv_load_failure_policy": "recompute"}
"""An engine that cannot fetch KV that it found looks again, and computes what is gone."""
#: the reference run's pool: 10^12 bytes of each node
POOL = "engine.kv_store={segment_gib: 931}"


@pytest.mark.parametrize(
    ("role", "name", "settings"),
    [
        (Role.PREFILL, "prefill", ()),
        (Role.DECODE, "decode", ()),
        (Role.ROUTER, "router", ()),
        (Role.PREFILL, "prefill-pool", (POOL,)),
        (Role.DECODE, "decode-mooncake", ("engine.kv_transfer=mooncake",)),
    ],
)
def test_golden_commands_of_the_reference_run(role: Role, name: str, settings: tuple[str, ...]) -> None:
    group = groups_of("glm5_swe", "h200-28", *settings)[role]
    own = {name: value for name, value in group.env.items() if re.match("VLLM|HPCRL|PYTHONHASH", name)}
    command = re.sub(r" (?=--)", " \\\n    ", " ".join(group.command))
    text = "\n".join([*(f"{name}={value}" for name, value in sorted(own.items())), command, ""])
    path = GOLDEN / f"glm5_swe-{name}.txt"
    if os.environ.get("HPCRL_REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_only_a_deterministic_trainer_gets_what_cublas_needs() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    groups = groups_of("glm5_swe", "h200-28", "trainer.deterministic=true")
    assert {role: group.env[name] for role, group in groups.items() if name in group.env} == {Role.TRAINER: ":4096:8"}
    assert not any(name in group.env for group in groups_of("glm5_swe", "h200-28").values())


def test_workers_get_the_limit_of_the_kept_base_of_adapters() -> None:
    settings = ("trainer.lora={}", "handoff.adapter_base_gib=1.5")
    for given, wanted in ((settings, 3 << 29), ((), None)):
        flags = flags_of(groups_of("quickstart_vllm", "local", *given)[Role.ENGINE])
        assert json.loads(str(flags["additional-config"]))["hpcrl"].get("kept_base_bytes") == wanted


def test_ranks_of_a_wide_replica_cover_all_gpus_once() -> None:
    """Each node starts its own ranks, on ports that do not meet."""
    for role, nodes in ((Role.PREFILL, 2), (Role.DECODE, 8)):
        group = groups_of("glm5_swe", "h200-28")[role]
        # servers, their health, RPC, and a port a rank for KV
        assert (group.nodes, group.ranks, group.ports) == (nodes, 8 * nodes, 18)
        starts, words = [], []
        for node in range(nodes):
            words = [fill_node_rank(word, node, [f"n{i}" for i in range(nodes)]) for word in group.command]
            flags = flags_of(group.model_copy(update={"command": tuple(words)}))
            starts.append(int(str(flags["data-parallel-start-rank"])))
        assert starts == [8 * node for node in range(nodes)]
        assert flags["data-parallel-size"] == str(8 * nodes)
        assert flags["data-parallel-size-local"] == "8"
        filled = fill_placeholders(words, {"python": "py", "host": "n1", "port": "20100", "replica": "0"})
        assert not [word for word in filled if "{" in word and not word.startswith('{"')]
        engine = filled[filled.index("vllm.entrypoints.cli.main") :]
        ports = {engine[engine.index(f"--{name}") + 1] for name in ("data-parallel-rpc-port", "port")}
        assert ports == {"20109", "20100"}
        assert "20108" in filled


def test_engine_of_one_process() -> None:
    """What the orchestrator relies on is asked for, and the environment of CPUs is set."""
    group = groups_of("quickstart_vllm", "local", "engine.vllm_args.hf-overrides={a: [1, 2]}")[Role.ENGINE]
    flags = flags_of(group)
    for name in ("enable-scale-out", "enable-prefix-caching", "enable-prompt-tokens-details", "enforce-eager"):
        assert flags[name] is True
    assert flags["logprobs-mode"] == "processed_logprobs"
    assert flags["generation-config"] == "vllm"
    assert json.loads(str(flags["weight-transfer-config"])) == {"backend": "hpcrl"}
    assert json.loads(str(flags["hf-overrides"])) == {"a": [1, 2]}
    assert (flags["max-model-len"], flags["block-size"], flags["dtype"]) == ("256", "32", "float32")
    assert not [name for name in flags if name.startswith("data-parallel")]
    assert group.env["VLLM_SERVER_DEV_MODE"] == group.env["HPCRL_VLLM_PLUGIN"] == "1"
    assert (group.env["VLLM_CPU_KVCACHE_SPACE"], group.env["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    assert group.env["TORCH_COMPILE_DISABLE"] == "1"
    compiled = groups_of("quickstart_vllm", "local", "engine.vllm_args={}")[Role.ENGINE]
    assert "TORCH_COMPILE_DISABLE" not in compiled.env
    assert group.env["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    threads = groups_of("quickstart_vllm", "local", "engine.threads=2")[Role.ENGINE]
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in threads.env
    assert group.ready.kind == "http"
    assert group.ready.path == "/health"


def test_experts_are_returned_on_request() -> None:
    flag = "enable-return-routed-experts"
    for recipe, settings in (("quickstart_vllm", ("engine.kv_store=null",)), ("quickstart", ())):
        assert flag not in flags_of(groups_of(recipe, "local", *settings)[Role.ENGINE])
        for setting in ("engine.return_routed_experts=true", "trainer.router_replay=true"):
            asked = groups_of(recipe, "local", *settings, setting)[Role.ENGINE]
            assert flags_of(asked)[flag] is True


@pytest.mark.parametrize(
    ("settings", "doors"),
    [
        ((), ("access.RunAccessBehindRouter", "routed_experts_middleware.RunAccessBehindRouterWithRows")),
        (
            ("engine.router.kind=direct", "engine.replicas=1"),
            ("access.RunAccess", "routed_experts_middleware.RunAccessWithRows"),
        ),
    ],
)
def test_rows_of_experts_stay_at_servers_that_return_them(settings: tuple[str, ...], doors: tuple[str, str]) -> None:
    asked = [groups_of("quickstart_vllm", "local", *settings, *more) for more in ((), ("trainer.router_replay=true",))]
    found = [flags_of(groups[Role.ENGINE])["middleware"] for groups in asked]
    assert found == [f"hpcrl.inference.vllm.{door}" for door in doors]
    for door in doors:
        module, name = door.split(".")
        assert hasattr(importlib.import_module(f"hpcrl.inference.vllm.{module}"), name)


def test_the_memory_of_a_gpu_that_plans_count_with_reaches_vllm() -> None:
    def memory_flags(*settings: str) -> dict[str, str]:
        command = groups_of("qwen3_30b_a3b_node", "h200-28", *settings)[Role.ENGINE].command
        wanted = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-dtype")
        return {word: command[i + 1] for i, word in enumerate(command) if word in wanted}

    share = "engine.memory.gpu_memory_utilization=0.6"
    assert memory_flags() == {"--gpu-memory-utilization": "0.9"}
    assert memory_flags(share) == {"--gpu-memory-utilization": "0.6"}
    fp8 = memory_flags("engine.memory.kv_cache_dtype=fp8")
    assert fp8 == {"--gpu-memory-utilization": "0.9", "--kv-cache-dtype": "fp8"}
    # beside a trainer vLLM would measure what is free while the trainer takes and gives back memory
    same = memory_flags(share, "engine.placement=shared_gpus", "engine.kv_cache_gib=1.5")
    assert same == {"--gpu-memory-utilization": "0.6", "--kv-cache-memory-bytes": str(3 << 29)}


def test_engines_of_a_trainer_in_fp8_keep_its_scales() -> None:
    """vLLM would round them up to powers of two, those of published weights as well."""
    for role in (Role.PREFILL, Role.DECODE):
        assert groups_of("glm5_swe", "h200-28")[role].env["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
        without = groups_of("glm5_swe", "h200-28", "trainer.precision.fp8=null")[role]
        assert "VLLM_USE_DEEP_GEMM_E8M0" not in without.env


def test_a_cpu_engine_ignores_the_gpus_of_its_node() -> None:
    group = groups_of("quickstart_vllm", "devcluster")[Role.ENGINE]
    assert group.ranks == 1
    assert "VLLM_USE_DEEP_GEMM" not in group.env
    gpu = groups_of("quickstart_vllm", "devcluster", "engine.device=auto")[Role.ENGINE]
    assert gpu.ranks == 8
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu.env


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("port", "come from the plan"),
        ("logprobs-mode", "the trainer computes"),
        ("weight-transfer-config.backend", "hand-offs"),
        ("no-enable-prefix-caching", "rely on it"),
        ("tensor-parallel-size", "nodes and GPUs"),
        ("config", "one by one"),
        ("enable-return-routed-experts", "it is engine.return_routed_experts"),
    ],
)
def test_flags_of_hpcrl_are_refused_with_the_reason(flag: str, reason: str) -> None:
    check_args("quickstart_vllm", {flag: 1}, f"hpcrl sets --{flag} itself", reason)


@pytest.mark.parametrize("flag", ["--enforce-eager", "max_num_seqs", "-tp", "Seed"])
def test_misspelt_flags_are_refused(flag: str) -> None:
    check_args("quickstart_vllm", {flag: 1}, "not a long flag name")


def test_flags_without_vllm_are_refused() -> None:
    check_args("quickstart", {"enforce-eager": True}, "no effect", "embedded")


def check_args(recipe: str, args: dict[str, Any], *expected: str) -> None:
    loaded = load_recipe(recipe)
    engine = loaded.value.engine.model_copy(update={"vllm_args": args})
    changed = loaded.__class__(
        loaded.value.model_copy(update={"engine": engine}), source=loaded.source, origins=loaded.origins
    )
    with pytest.raises(ConfigError) as error:
        check_rules(changed, load_cluster("local"))
    for part in expected:
        assert part in str(error.value)


def test_replicas_of_one_rank_and_of_several_may_be_submitted() -> None:
    check_rules(load_recipe("quickstart_vllm"), load_cluster("local"))
    check_rules(load_recipe("quickstart_vllm"), load_cluster("devcluster"))
    check_rules(load_recipe("quickstart_vllm", WIDE), load_cluster("devcluster"))
    check_rules(load_recipe("quickstart_vllm", [*WIDE, "job.layout=elastic"]), load_cluster("devcluster"))


def test_nothing_of_the_reference_run_is_refused() -> None:
    check_rules(load_recipe("glm5_swe"), load_cluster("h200-28"))


def test_a_node_of_one_rank_is_a_server_of_its_replica() -> None:
    """vLLM's program that leads the ranks of a node refuses to lead one."""
    group = groups_of("quickstart_vllm", "devcluster", "engine.nodes=2", "engine.replicas=1", "engine.kv_store=null")[
        Role.ENGINE
    ]
    assert (group.ranks, group.nodes, group.servers_per_node, group.ports) == (2, 2, 1, 3)
    assert group.command[1:4] == ("-P", "-m", "vllm.entrypoints.openai.api_server")
    flags = flags_of(group)
    assert (flags["data-parallel-size"], flags["data-parallel-rank"]) == ("2", "{node_rank}")
    assert (flags["data-parallel-address"], flags["data-parallel-rpc-port"]) == ("{host}", "{port+2}")
    assert flags["host"] == "{node_host}"
    # DeepEP is for GPUs
    assert flags["all2all-backend"] == "allgather_reducescatter"
    assert not {"data-parallel-multi-port-external-lb", "data-parallel-start-rank"} & flags.keys()


def test_an_engine_joins_the_pool_before_it_starts() -> None:
    command = list(groups_of("quickstart_vllm", "local")[Role.ENGINE].command)
    assert command[1:4] == ["-P", "-m", "hpcrl.store.join"]
    join, engine = command[4 : command.index("--")], command[command.index("--") + 1 :]
    assert dict(zip(join[::2], join[1::2], strict=True)) == {
        "--protocol": "tcp",
        "--segment-bytes": str(1 << 28),
        "--local-buffer-bytes": str(1 << 26),
        "--host": "{host}",
    }
    assert engine[:4] == ["{python}", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    connector = json.loads(engine[engine.index("--kv-transfer-config") + 1])
    assert connector == {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", **ANEW}
    without = groups_of("quickstart_vllm", "local", "engine.kv_store=null")[Role.ENGINE].command
    assert "--kv-transfer-config" not in without
    assert without[1:4] == ("-P", "-m", "vllm.entrypoints.openai.api_server")


def connector_of(recipe: str, role: Role, *settings: str) -> Any:
    command = groups_of(recipe, "h200-28", *settings)[role].command
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_ranks_of_a_node_share_its_memory_for_kv_that_leaves_the_gpu() -> None:
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 50 << 30},
    }
    assert connector_of("qwen3_30b_a3b", Role.ENGINE, "engine.memory.kv_offload_gib=400") == offload | ANEW
    both = connector_of("glm5_swe", Role.DECODE, "engine.memory.kv_offload_gib=400")
    assert (both["kv_connector"], both["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    children = both["kv_connector_extra_config"]["connectors"]
    assert children == [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, offload]


def test_kv_continues_to_a_disk_through_a_program_that_bounds_it() -> None:
    tiers = ("engine.memory.kv_offload_gib=400", "engine.memory.kv_offload_disk_gib=2000")
    command = groups_of("qwen3_30b_a3b", "h200-28", *tiers)[Role.ENGINE].command
    assert command[:4] == ("{python}", "-P", "-m", "hpcrl.inference.vllm.disk_tier")
    assert command[4 : command.index("--")] == ("--limit-bytes", str(2000 << 30), "--place", "@kv-disk@")
    extra = connector_of("qwen3_30b_a3b", Role.ENGINE, *tiers)["kv_connector_extra_config"]
    assert extra == {
        "cpu_bytes_to_use": 50 << 30,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": "@kv-disk@"}],
    }


def test_ranks_of_a_node_share_its_segment_and_adapters() -> None:
    pool = "engine.kv_store={segment_gib: 931}"
    decode = groups_of("glm5_swe", "h200-28", pool)[Role.DECODE].command
    words = decode[: decode.index("--")]
    flags = dict(zip(words[4::2], words[5::2], strict=True))
    assert int(flags["--segment-bytes"]) == (931 << 30) // 8
    assert flags["--protocol"] == "rdma"
    assert flags["--devices"].count(",") == 7
    assert flags["--node"] == "{node_rank}"
