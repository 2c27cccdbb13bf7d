"""The store in a plan: its role, the order of starts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.config.rules.store import STORE_RULES
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.store.endpoints import StoreEndpoints
from hpcrl.store.master import _parse, master_command


def plan_of(cluster: str, *settings: str) -> Plan:
    recipe = absolute_paths(load_recipe("quickstart", settings).value, Path("/x"))
    return make_plan(recipe, load_cluster(cluster).value, "r", Path("/runs/r"))


POOL = ("engine.backend=vllm", "engine.kv_store.segment_gib=0.25")


def test_engines_come_after_the_master_and_end_before_it() -> None:
    plan = plan_of("local", *POOL, "engine.kv_store.lease_ttl_s=7")
    store, engine = plan.group(Role.STORE), plan.group(Role.ENGINE)
    assert engine.after == (Role.STORE,)
    assert store.policy.drain_order > engine.policy.drain_order
    values = {"{host}": "127.0.0.1", "{port}": "21000"}
    settings = _parse([values.get(part, part) for part in store.command[4:]])
    assert store.ports == 3
    assert store.policy.restart == "on-failure"
    endpoints = StoreEndpoints(host="127.0.0.1", rpc_port=21000, metadata_port=21001, admin_port=21002)
    command = master_command("mooncake_master", endpoints, settings)
    assert "--default_kv_lease_ttl=7000" in command
    assert "--enable_offload=false" in command
    assert not any("etcd" in part for part in command)


def test_a_site_with_etcd_has_its_master_elected() -> None:
    recipe, local = load_recipe("quickstart", [*POOL]).value, load_cluster("local").value
    site = local.model_copy(update={"etcd": ["http://a:2379", "http://b:2379"]})
    plan = make_plan(recipe, site, "r", Path("/runs/r"))
    command = plan.group(Role.STORE).command
    assert command[command.index("--etcd") + 1] == "http://a:2379;http://b:2379"


def test_under_slurm_the_master_is_on_the_trainers_node() -> None:
    store = plan_of("h200-28", *POOL).group(Role.STORE)
    assert store.beside
    assert "GLOO_SOCKET_IFNAME" in store.env
    assert "NCCL_IB_HCA" not in store.env


def test_a_recipe_without_a_pool_has_no_store() -> None:
    plan = plan_of("local")
    assert Role.STORE not in {group.role for group in plan.groups}
    assert plan.group(Role.ENGINE).after == ()


@pytest.mark.parametrize(
    ("rule", "cluster", "settings"),
    [
        ("store-fits-host", "h200-28", ["engine.backend=vllm", "engine.kv_store.segment_gib=100000"]),
        ("store-disk-place", "local", [*POOL, "engine.kv_store.disk_gib=1"]),
        ("store-rdma", "local", [*POOL, "engine.kv_store.protocol=rdma"]),
        ("store-rdma", "devcluster", [*POOL, "engine.kv_store.local_buffer_gib=0.01", "engine.kv_store.protocol=rdma"]),
    ],
)
def test_each_rule_has_a_case(rule: str, cluster: str, settings: list[str]) -> None:
    recipe, site = load_recipe("quickstart", settings).value, load_cluster(cluster).value
    assert [r.name for r in STORE_RULES if list(r.check(recipe, site))] == [rule]


@pytest.mark.parametrize("cluster", ["local", "h200-28"])
def test_a_good_pool_breaks_no_rule(cluster: str) -> None:
    site: ClusterProfile = load_cluster(cluster).value
    assert [r.name for r in STORE_RULES if list(r.check(load_recipe("quickstart", POOL).value, site))] == []
