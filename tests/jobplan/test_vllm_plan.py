"""What a plan starts as a vLLM engine, without vLLM. Golden files: the commands of the reference run.

``HPCRL_REWRITE_GOLDEN=1 pytest tests/jobplan/test_vllm_plan.py`` writes them again; read the diff.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.cluster import CLUSTER_KINDS, ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role, RoleGroup
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.inference.vllm.front import engine_flags
from hpcrl.inference.vllm.side import variables as side_variables
from hpcrl.jobplan import absolute_site_paths, check_packages, check_pythons, make_plan
from hpcrl.jobplan.commands.dynamo import kv_events
from hpcrl.jobplan.groups import make_groups
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.supervisor.process.node_values import fill_node_rank

GOLDEN = Path(__file__).parent / "golden"
ANEW = {"kv_load_failure_policy": "recompute"}
"""An engine that cannot fetch KV that it found looks again, and computes what is gone."""
RUN_DIR = Path("/runs/night-1")


def groups_of(recipe: str, cluster: str, *overrides: str, **profile: Any) -> dict[Role, RoleGroup]:
    site = with_values(cluster, **profile)
    return {group.role: group for group in make_groups(load_recipe(recipe, overrides).value, site, "night-1")}


def with_values(cluster: str, **profile: Any) -> ClusterProfile:
    site = load_cluster(cluster).value
    return CLUSTER_KINDS[site.kind].model_validate({**site.model_dump(), **profile})


def flags_of(group: RoleGroup) -> dict[str, str | bool]:
    """Flags with their values; True for those without."""
    flags: dict[str, str | bool] = {}
    words = list(group.command)
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word[2:]] = True if after.startswith("--") else after
    return flags


#: a rank on each GPU of a node
WIDE = ("engine.device=auto", "engine.kv_store=null")
WIDE_SIDES = ("engine.prefill={replicas: 1, nodes: 2}", "engine.decode={replicas: 1, nodes: 1}")
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


def test_a_deterministic_trainer_gets_what_cublas_needs_and_nobody_else() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    groups = groups_of("glm5_swe", "h200-28", "trainer.deterministic=true")
    assert {role: group.env[name] for role, group in groups.items() if name in group.env} == {Role.TRAINER: ":4096:8"}
    assert not any(name in group.env for group in groups_of("glm5_swe", "h200-28").values())


def test_workers_are_told_how_much_of_the_base_of_adapters_they_may_keep() -> None:
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


def test_sides_of_disaggregated_serving_differ() -> None:
    groups = groups_of("glm5_swe", "h200-28")
    prefill, decode = flags_of(groups[Role.PREFILL]), flags_of(groups[Role.DECODE])
    assert (prefill["all2all-backend"], decode["all2all-backend"]) == ("deepep_high_throughput", "deepep_low_latency")
    assert (prefill["max-num-batched-tokens"], decode["max-num-batched-tokens"]) == ("8192", "96")
    assert prefill["enable-dbo"] is True
    assert "enable-dbo" not in decode
    assert decode["no-enable-eplb"] is True
    assert prefill["quantization"] == decode["quantization"] == "fp8_per_block"


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
        ((), ("access.RunAccessBehindRouter", "rows_aside.RunAccessBehindRouterWithRows")),
        (("engine.router.kind=direct", "engine.replicas=1"), ("access.RunAccess", "rows_aside.RunAccessWithRows")),
    ],
)
def test_rows_of_experts_stay_at_servers_that_return_them(settings: tuple[str, ...], doors: tuple[str, str]) -> None:
    asked = [groups_of("quickstart_vllm", "local", *settings, *more) for more in ((), ("trainer.router_replay=true",))]
    found = [flags_of(groups[Role.ENGINE])["middleware"] for groups in asked]
    assert found == [f"hpcrl.inference.vllm.{door}" for door in doors]
    for door in doors:
        module, name = door.split(".")
        assert hasattr(importlib.import_module(f"hpcrl.inference.vllm.{module}"), name)


def test_engines_beside_a_trainer_in_fp8_keep_its_scales() -> None:
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
    check_args("quickstart_vllm", {flag: 1}, "no long name of a flag")


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


def test_kv_goes_on_to_a_disk_through_a_program_that_bounds_it() -> None:
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


def test_the_router_of_a_plan() -> None:
    """It starts empty: the orchestrator, which waits for it, gives it engines that serve."""
    groups = groups_of("quickstart_vllm", "local")
    router = groups[Role.ROUTER]
    flags = flags_of(router)
    assert router.ports == 2
    assert (flags["port"], flags["prometheus-port"]) == ("{port}", "{port+1}")
    assert flags["policy"] == "sticky_least_loaded"
    assert "worker-urls" not in flags
    assert router.policy.restart == "on-failure"
    assert Role.ROUTER in groups[Role.ORCHESTRATOR].after
    assert Role.ROUTER not in groups_of("quickstart_vllm", "local", "engine.router.kind=direct")
    assert Role.ROUTER not in groups_of("quickstart", "local")
    assert Role.ROUTER in groups_of("quickstart", "local", "engine.router.kind=vllm-router")
    assert groups_of("quickstart_vllm", "devcluster")[Role.ROUTER].beside


def test_interpreters_by_role(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    link = tmp_path / "env" / "bin" / "python"
    link.symlink_to(sys.executable)
    site = absolute_site_paths(with_values("local", vllm_python="env/bin/python"), tmp_path)
    # the link itself: behind it is an interpreter without the environment's packages
    assert site.python_of("decode", backend="vllm") == str(link)
    assert site.python_of("engine", backend="embedded") is None
    # vllm-router comes with vLLM's environment, also in front of others
    assert site.python_of("router", backend="embedded") == str(link)
    assert site.python_of("trainer", backend="vllm") is None
    by_role = {"engine": "/e", "prefill": "/p", "trainer": "/t"}
    named = with_values("local", vllm_python="/v", python_by_role=by_role)
    assert [named.python_of(role, backend="vllm") for role in ("prefill", "decode", "trainer")] == ["/p", "/e", "/t"]
    groups = {g.role: g for g in make_groups(load_recipe("quickstart_vllm").value, named, "night-1")}
    assert (groups[Role.ENGINE].python, groups[Role.TRAINER].python) == ("/e", "/t")
    assert groups[Role.ORCHESTRATOR].python is None


def test_paths_in_containers_stay(tmp_path: Path) -> None:
    container = {"kind": "pyxis", "image": "/images/hpcrl.sqsh"}
    site = with_values("devcluster", container=container, vllm_python="opt/vllm/bin/python")
    assert absolute_site_paths(site, tmp_path).vllm_python == "opt/vllm/bin/python"


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart_vllm").value
    loaded = load_cluster("local")
    site = loaded.__class__(
        with_values("local", vllm_python=str(tmp_path / "none")), source=loaded.source, origins=loaded.origins
    )
    plan = make_plan(recipe, site.value, "night-1", RUN_DIR)
    with pytest.raises(ConfigError, match="bootstrap") as error:
        check_pythons(plan, site)
    assert str(tmp_path / "none") in str(error.value)


def test_an_interpreter_on_nodes_alone_is_not_missing() -> None:
    recipe = load_recipe("quickstart_vllm").value
    loaded = load_cluster("devcluster")
    site = loaded.__class__(
        with_values("devcluster", vllm_python="/only/on/nodes/python"), source=loaded.source, origins=loaded.origins
    )
    check_pythons(make_plan(recipe, site.value, "night-1", RUN_DIR), site)


SIDES = ("engine.prefill={replicas: 2, nodes: 1}", "engine.decode={replicas: 1, nodes: 1}", "engine.replicas=1")
EMBEDDED_SIDES = (*SIDES, "engine.backend=embedded", "engine.kv_store=null", "engine.vllm_args={}")


def words_after(group: RoleGroup, program: str) -> list[str]:
    """The words of one of the programs that a command runs one after the other."""
    words = list(group.command)
    words = words[words.index(program) + 1 :]
    return words[: words.index("--")] if "--" in words else words


def test_sides_on_cpus_have_mooncake_between_them() -> None:
    groups = groups_of("quickstart_vllm", "local", *SIDES, "engine.kv_store=null")
    for role, part in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        transfer = json.loads(str(flags_of(groups[role])["kv-transfer-config"]))
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("MooncakeConnector", part)
        assert transfer["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}
        assert groups[role].ports == 2
        assert words_after(groups[role], "hpcrl.inference.vllm.side")[:6] == [
            *("--connector", "mooncake", "--towards", "{host}", "--port", "{port+1}")
        ]
    router = groups[Role.ROUTER]
    assert router.after == (Role.PREFILL, Role.DECODE)
    front = words_after(router, "hpcrl.inference.vllm.front")
    assert front == ["--connector", "mooncake", "--bootstrap-offset", "1"]


def test_sides_with_a_pool_use_both() -> None:
    groups = groups_of("quickstart_vllm", "local", *SIDES)
    transfer = json.loads(str(flags_of(groups[Role.PREFILL])["kv-transfer-config"]))
    assert transfer["kv_connector"] == "MultiConnector"
    inner = [each["kv_connector"] for each in transfer["kv_connector_extra_config"]["connectors"]]
    assert inner == ["MooncakeConnector", "MooncakeStoreConnector"]
    words = list(groups[Role.PREFILL].command)
    assert words.index("hpcrl.store.join") < words.index("hpcrl.inference.vllm.side")


def test_ranks_of_a_wide_side_have_ports_of_their_own_for_kv() -> None:
    """vLLM adds a rank's index in the whole replica: what lies on nodes before is taken off."""
    for node in range(2):
        group = groups_of("glm5_swe", "h200-28")[Role.PREFILL]
        words = [fill_node_rank(word, node) for word in words_after(group, "hpcrl.inference.vllm.side")]
        given = fill_placeholders(words, {"host": "10.0.0.1", "port": "20100"})
        flags = dict(zip(given[::2], given[1::2], strict=True))
        assert (flags["--port"], flags["--ranks-before"]) == ("20110", str(8 * node))
        own = side_variables("nixl", address="10.0.0.2", port=20110, ranks_before=8 * node)
        ports = [int(own["VLLM_NIXL_SIDE_CHANNEL_PORT"]) + 8 * node + rank for rank in range(8)]
        assert ports == list(range(20110, 20118))


def test_the_router_of_two_sides_gets_their_addresses() -> None:
    flags = engine_flags("mooncake", ["http://a:1", "http://b:5"], ["http://c:9"], bootstrap_offset=1)
    assert flags == [
        *("--vllm-pd-disaggregation", "--kv-connector", "mooncake"),
        *("--prefill", "http://a:1", "2", "--prefill", "http://b:5", "6", "--decode", "http://c:9"),
    ]
    assert engine_flags("nixl", ["http://a:1"], ["http://c:9"], bootstrap_offset=None)[4:6] == ["http://a:1", "none"]
    with pytest.raises(HpcrlError, match="no decode engines"):
        engine_flags("nixl", ["http://a:1"], [], bootstrap_offset=None)


def test_dynamo_stands_before_the_same_engines() -> None:
    kind = "engine.router.kind=dynamo"
    plain, groups = groups_of("quickstart_vllm", "local"), groups_of("quickstart_vllm", "local", kind)
    router, engine = groups[Role.ROUTER], groups[Role.ENGINE]
    assert router.command[:4] == ("{python}", "-P", "-m", "hpcrl.inference.dynamo.router")
    assert router.ready == plain[Role.ROUTER].ready
    flags = flags_of(router)
    assert (flags["model"], flags["block-size"], flags["session-ttl-s"]) == ("quickstart_vllm", "32", "600")
    # the engine publishes above its server, where the router looks
    assert flags["events-offset"] == "1"
    own = ("--kv-events-config", json.dumps(events := kv_events(1, nodes=1, ranks_per_node=1), sort_keys=True))
    assert events["endpoint"] == "tcp://*:{port+1}"
    start = engine.command.index("--kv-events-config")
    assert engine.command[start : start + 2] == own
    # and answers its health checks to those alone who bring the token, which this router does
    others = [word.replace("RunAccessBehindRouter", "RunAccess") for word in plain[Role.ENGINE].command]
    assert list(engine.command[:start] + engine.command[start + 2 :]) == others != list(plain[Role.ENGINE].command)
    assert engine.ports == plain[Role.ENGINE].ports + 1


def test_each_rank_of_a_wide_replica_publishes_above_its_server() -> None:
    """vLLM adds the index of a rank in the replica to the port that it is given."""
    groups = groups_of("qwen3_30b_a3b", "h200-28", "engine.router.kind=dynamo", "engine.replicas=1", "engine.nodes=3")
    engine, offset = groups[Role.ENGINE], int(flags_of(groups[Role.ROUTER])["events-offset"])
    assert engine.ports >= offset + 8
    seen = set()
    for node in range(3):
        port = 21000 + 100 * node
        words = fill_placeholders(
            engine.command, {"python": "p", "run_dir": "/r", "host": "h", "replica": "0", "port": str(port)}
        )
        filled = [fill_node_rank(word, node, ["a", "b", "c"]) for word in words]
        config = json.loads(filled[filled.index("--kv-events-config") + 1])
        base = int(config["endpoint"].removeprefix("tcp://*:"))
        seen |= {base + rank - port - rank % 8 for rank in range(8 * node, 8 * (node + 1))}
    assert seen == {offset}


@pytest.mark.parametrize(
    ("settings", "site", "message"),
    [
        ([*SIDES, "engine.router.kind=dynamo"], "local", "leads no request from prefill to decode"),
        ([*SIDES, "engine.router.kind=direct"], "local", "nothing leads a request"),
        (["engine.kv_transfer=nixl"], "local", "no effect without prefill"),
        ([*EMBEDDED_SIDES, "engine.kv_transfer=nixl"], "local", "in a way of their own"),
        ([*EMBEDDED_SIDES, "engine.router.kind=direct"], "local", "nothing leads a request"),
        ([*SIDES, "job.layout=elastic"], "devcluster", "replicas that come and go"),
        ([*WIDE, "engine.pause=none"], "devcluster", "computed by layers of two versions"),
        (["engine.pause=none"], "local", "computed by layers of two versions"),
        ([*WIDE, *SIDES, "engine.kv_transfer=mooncake"], "devcluster", "replicas of several ranks was not worked out"),
        (["engine.kv_store=null", *WIDE_SIDES], "devcluster", "NIXL needs GPUs"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], site: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rules(load_recipe("quickstart_vllm", settings), load_cluster(site))


@pytest.mark.parametrize("settings", [SIDES, EMBEDDED_SIDES])
def test_sides_of_one_rank_may_be_submitted(settings: tuple[str, ...]) -> None:
    check_rules(load_recipe("quickstart_vllm", settings), load_cluster("local"))


def test_embedded_sides_are_planned_as_those_of_vllm() -> None:
    """Roles, what waits for what, the limits of each side's steps; the router is told of KV as by NIXL's connector."""
    small = ("engine.prefill.max_num_batched_tokens=512", "engine.decode.max_num_seqs=8")
    theirs = groups_of("quickstart_vllm", "local", *SIDES, "engine.kv_store=null", *small)
    groups = groups_of("quickstart_vllm", "local", *EMBEDDED_SIDES, *small)
    assert {role: (g.replicas, g.after) for role, g in groups.items()} == {
        role: (g.replicas, g.after) for role, g in theirs.items()
    }
    for role, batched, seqs in ((Role.PREFILL, "512", "64"), (Role.DECODE, "2048", "8")):
        flags, command = flags_of(groups[role]), groups[role].command
        assert "hpcrl.inference.embedded.server" in command
        assert (flags["max-num-batched-tokens"], flags["max-num-seqs"]) == (batched, seqs)
        assert flags["weight-reader"] == f"{role}-{{replica}}"
        # the router asks for health without a token, and KV comes from the one port of the server
        assert "--open-health" in command
        assert groups[role].ports == 1
    assert words_after(groups[Role.ROUTER], "hpcrl.inference.vllm.front")[:2] == ["--connector", "nixl"]


def test_embedded_engines_join_a_pool_as_those_of_vllm() -> None:
    pool = ("engine.kv_store={segment_gib: 0.5, local_buffer_gib: 0.25}",)
    theirs = groups_of("quickstart_vllm", "local", *SIDES, *pool)
    groups = groups_of("quickstart_vllm", "local", *EMBEDDED_SIDES, *pool)
    assert groups[Role.STORE] == theirs[Role.STORE]
    for role in (Role.PREFILL, Role.DECODE):
        command = groups[role].command
        join = words_after(groups[role], "hpcrl.store.join")
        assert join == words_after(theirs[role], "hpcrl.store.join")
        assert "hpcrl.inference.embedded.server" in command[command.index("--") :]
        assert groups[role].after == (Role.STORE,)


def test_embedded_engines_in_a_pool_need_its_client(tmp_path: Path) -> None:
    """In their own environment, which is another than that of vLLM's engines."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    recipe = load_recipe("quickstart", ("engine.kv_store={segment_gib: 0.5}",))
    for role in ("store", "engine"):
        site = with_values("local", python_by_role={role: str(python)})
        with pytest.raises(ConfigError, match=r"engine\.kv_store: .* has no mooncake") as error:
            check_packages(recipe, make_plan(recipe.value, site, "n", RUN_DIR))
        assert "[store]'" in str(error.value)


def test_a_router_that_is_not_installed_is_a_finding(tmp_path: Path) -> None:
    """For the interpreter that will run it; where that cannot be seen, a note says so."""
    recipe = load_recipe("quickstart_vllm")
    # that of the tests: the router's package is in the environment of engines alone
    with pytest.raises(ConfigError, match=r"has no vllm_router") as error:
        check_packages(recipe, make_plan(recipe.value, with_values("local", vllm_python=sys.executable), "n", RUN_DIR))
    assert "python_by_role.router" in str(error.value)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    installed = with_values("local", vllm_python=str(fake))
    assert check_packages(recipe, make_plan(recipe.value, installed, "n", RUN_DIR)) == []
    hidden = with_values("local", vllm_python="/only/on/nodes/python")
    assert "not visible here" in check_packages(recipe, make_plan(recipe.value, hidden, "n", RUN_DIR))[0]
    direct = load_recipe("quickstart_vllm", ["engine.router.kind=direct"])
    assert check_packages(direct, make_plan(direct.value, installed, "n", RUN_DIR)) == []


def test_a_pool_of_rollouts_needs_its_package_where_it_is_written_and_read(tmp_path: Path) -> None:
    """And two ports above the orchestrator's, where files need one."""
    recipe = load_recipe("quickstart", ["rollouts.warehouse.backend=mooncake"])
    without, there = tmp_path / "without", tmp_path / "there"
    without.write_text("#!/bin/sh\nexit 3\n")
    there.write_text("#!/bin/sh\nexit 0\n")
    for python in (without, there):
        python.chmod(0o755)

    def checked(**pythons: Path) -> list[str]:
        site = with_values("local", python_by_role={role: str(path) for role, path in pythons.items()})
        return check_packages(recipe, make_plan(recipe.value, site, "n", RUN_DIR))

    assert checked(orchestrator=there, trainer=there) == []
    for role, other in (("orchestrator", "trainer"), ("trainer", "orchestrator")):
        with pytest.raises(ConfigError, match=r"has no mooncake") as error:
            checked(**{role: without, other: there})
        assert f"python_by_role.{role}, or backend: embedded" in str(error.value)
    files = load_recipe("quickstart")
    ports = [
        next(g.ports for g in make_plan(r.value, with_values("local"), "n", RUN_DIR).groups if g.role == "orchestrator")
        for r in (recipe, files, load_recipe("quickstart", ["rollouts.warehouse.directory=null"]))
    ]
    assert ports == [3, 2, 1]
