"""What a plan starts where prefill and decode have engines of their own, and in front of several engines."""

from __future__ import annotations

import json

import pytest
from vllm_plan_testing import EMBEDDED_SIDES, SIDES, WIDE, flags_of, groups_of, words_after

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.inference.vllm.front import front_flags
from hpcrl.inference.vllm.side import variables as side_variables
from hpcrl.jobplan.commands.dynamo import kv_events
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.supervisor.process.node_values import fill_node_rank

WIDE_SIDES = ("engine.prefill={replicas: 1, nodes: 2}", "engine.decode={replicas: 1, nodes: 1}")


def test_sides_of_disaggregated_serving_differ() -> None:
    groups = groups_of("glm5_swe", "h200-28")
    prefill, decode = flags_of(groups[Role.PREFILL]), flags_of(groups[Role.DECODE])
    assert (prefill["all2all-backend"], decode["all2all-backend"]) == ("deepep_high_throughput", "deepep_low_latency")
    assert (prefill["max-num-batched-tokens"], decode["max-num-batched-tokens"]) == ("8192", "96")
    assert prefill["enable-dbo"] is True
    assert "enable-dbo" not in decode
    assert decode["no-enable-eplb"] is True
    assert prefill["quantization"] == decode["quantization"] == "fp8_per_block"


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
    flags = front_flags("mooncake", ["http://a:1", "http://b:5"], ["http://c:9"], bootstrap_offset=1)
    assert flags == [
        *("--vllm-pd-disaggregation", "--kv-connector", "mooncake"),
        *("--prefill", "http://a:1", "2", "--prefill", "http://b:5", "6", "--decode", "http://c:9"),
    ]
    assert front_flags("nixl", ["http://a:1"], ["http://c:9"], bootstrap_offset=None)[4:6] == ["http://a:1", "none"]
    with pytest.raises(HpcrlError, match="no decode engines"):
        front_flags("nixl", ["http://a:1"], [], bootstrap_offset=None)


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
        ([*SIDES, "engine.router.kind=dynamo"], "local", "does not support prefill and decode"),
        ([*SIDES, "engine.router.kind=direct"], "local", "need a router between them"),
        (["engine.kv_transfer=nixl"], "local", "no effect without prefill"),
        ([*EMBEDDED_SIDES, "engine.kv_transfer=nixl"], "local", "by their own protocol"),
        ([*EMBEDDED_SIDES, "engine.router.kind=direct"], "local", "need a router between them"),
        ([*SIDES, "job.layout=elastic"], "devcluster", "does not support elastic replicas"),
        ([*WIDE, "engine.pause=none"], "devcluster", "computed by layers of two versions"),
        (["engine.pause=none"], "local", "computed by layers of two versions"),
        ([*WIDE, *SIDES, "engine.kv_transfer=mooncake"], "devcluster", "does not support replicas of several ranks"),
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
