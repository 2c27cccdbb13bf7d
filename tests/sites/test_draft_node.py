"""Drafts that are written on a compute node have its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from test_node_topology import tree
from test_profiles import RECORDED, run

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster
from hpcrl.sites import draft_machine
from hpcrl.sites.draft_node import SeenNode, adapter_lines, fabric_kind
from hpcrl.sites.node_topology import NodeTopology, read_topology
from hpcrl.sites.site_facts import partitions_of_machine

NODES = [node["NodeName"] for node in RECORDED.show("node")]


@pytest.fixture
def topology(tmp_path: Path) -> NodeTopology:
    return read_topology(tree(tmp_path))


def test_adapters_near_gpus_are_written_and_others_named(topology: NodeTopology) -> None:
    lines = adapter_lines(SeenNode("n7", topology))
    nics = yaml.safe_load("\n".join(lines))["nics"]
    assert nics == [{"name": "mlx5_0", "gpus": [0], "gb_s": 50}, {"name": "mlx5_1", "gpus": [1], "gb_s": 50}]
    text = "\n".join(lines)
    assert "node n7" in text
    assert "# NUMA node 0: CPUs 0-47,96-143; GPUs 0; adapters mlx5_0" in text
    assert "left out: mlx5_2" in text
    assert fabric_kind(topology) == "infiniband"


def test_what_is_down_or_of_another_port_or_link(topology: NodeTopology) -> None:
    ports = [replace(topology.ports[0], active=None), replace(topology.ports[1], port=2, link="Ethernet", gb_s=None)]
    changed = replace(topology, ports=ports)
    text = "\n".join(adapter_lines(SeenNode("n7", changed)))
    assert yaml.safe_load(text)["nics"] == [{"name": "mlx5_1", "port": 2, "gpus": [1]}]
    assert "left out: mlx5_0" in text
    assert fabric_kind(changed) == "roce"
    assert fabric_kind(replace(topology, ports=[topology.ports[0], ports[1]])) is None


def test_a_node_without_adapters_or_gpus_fills_nothing(topology: NodeTopology) -> None:
    assert adapter_lines(SeenNode("n7", NodeTopology())) == []
    assert fabric_kind(NodeTopology()) is None
    without = adapter_lines(SeenNode("n7", replace(topology, gpu_paths={}, gpu_numa={})))
    assert yaml.safe_load("\n".join(without)) is None


def test_a_machine_knows_its_partitions() -> None:
    assert partitions_of_machine(RECORDED, [NODES[0]]) == {"gpu": NODES[0]}
    assert partitions_of_machine(RECORDED, ["login1", ""]) == {}


def test_init_on_a_compute_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology(tree(tmp_path))
    monkeypatch.setattr(draft_machine, "read_topology", lambda: topology)
    monkeypatch.setenv("SLURMD_NODENAME", NODES[0])
    path = tmp_path / "mine.yaml"
    command = ["cluster", "init", "mine", "--runs-root", str(tmp_path / "runs"), "--python", "/usr/bin/python3"]
    assert run(monkeypatch, *command, "--output", str(path)) == 0
    site = load_cluster(str(path)).value
    assert isinstance(site, SlurmCluster)
    node = site.partitions["gpu"].node
    assert node.fabric.kind == "infiniband"
    assert [(nic.name, nic.gpus, nic.gb_s) for nic in node.nics] == [("mlx5_0", (0,), 50.0), ("mlx5_1", (1,), 50.0)]
    # on another machine nothing is known of nodes
    monkeypatch.setenv("SLURMD_NODENAME", "login1")
    other = tmp_path / "other.yaml"
    assert run(monkeypatch, *command, "--output", str(other)) == 0
    assert "kind: CHANGE_ME" in other.read_text()
