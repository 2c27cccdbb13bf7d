"""Collectives by Gloo over nodes that are processes of this machine: contents, hangs, and which node is to blame."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcrl.processes.daemon_threads import DaemonExecutor
from hpcrl.sites.network_check import NetworkPlan, NetworkReport, check_network, group_result, join_group, start_group
from hpcrl.sites.network_group import GroupResult

PLAN = NetworkPlan(
    python=sys.executable,
    elements=1 << 12,
    loops=2,
    limit_s=120.0,
    first_port=22000,
    last_port=22999,
    environ={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
)
#: replaces a collective of torch in the processes of one node
FAULTS = {
    "wrong": """
import torch.distributed as dist
whole = dist.all_to_all_single
def broken(output, given, *more, **others):
    given = given.clone()
    given[-1] += 1
    return whole(output, given, *more, **others)
dist.all_to_all_single = broken
""",
    "hang": """
import time, torch.distributed as dist
dist.all_reduce = lambda *given, **others: time.sleep(3600)
""",
    "crash": """
import os, torch.distributed as dist
dist.all_reduce = lambda *given, **others: os.abort()
""",
}


class Nodes:
    """Nodes that are threads, each with processes of its own on an address of its own."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.directory = directory
        self.addresses = {name: f"127.93.5.{i + 1}" for i, name in enumerate(names)}
        self.scripts: dict[str, Path] = {}

    def break_node(self, node: str, fault: str) -> None:
        """Run the script of one node with a torch whose collectives are not those of the others."""
        from hpcrl.sites.network_check import SCRIPT

        path = self.directory / f"script-{node}.py"
        path.write_text(SCRIPT.read_text().replace("\nif __name__", f"\n{FAULTS[fault]}\nif __name__"))
        self.scripts[node] = path

    def run(self, plan: NetworkPlan) -> Callable[[tuple[str, ...], int], GroupResult]:
        from hpcrl.sites.network_check import SCRIPT

        def run(nodes: tuple[str, ...], number: int) -> GroupResult:
            name = start_group(self.directory, plan, nodes, self.addresses, number)
            pool = DaemonExecutor(len(nodes))
            futures = [
                pool.submit(join_group, self.directory, name, node, script=self.scripts.get(node, SCRIPT))
                for node in nodes
            ]
            for future in futures:
                future.result(plan.limit_s + 60)
            pool.shutdown()
            return group_result(self.directory, plan, nodes, name, late_s=0.0)

        return run

    def check(self, plan: NetworkPlan) -> NetworkReport:
        return check_network(list(self.addresses), plan, self.run(plan), time_left=lambda: 1e6)


@pytest.mark.slow
def test_nodes_that_work_take_one_try_and_have_rates(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, ranks_per_node=2)
    report = Nodes(tmp_path, ["n1", "n2"]).check(plan)
    assert [(t.nodes, t.kind, t.what) for t in report.tries] == [(("n1", "n2"), "good", "")]
    assert (report.nodes, report.pairs, report.open) == ([], [], [])
    (tried,) = report.tries
    assert tried.reduce_gb_s is not None
    assert tried.exchange_gb_s is not None
    assert 0 < tried.reduce_gb_s < 1000


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong", "crash"])
def test_the_node_that_brings_wrong_data_or_dies_is_found(fault: str, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ["n1", "n2", "n3"])
    nodes.break_node("n2", fault)
    report = nodes.check(PLAN)
    assert (report.nodes, report.pairs) == (["n2"], [])
    assert report.tries[0].kind == {"wrong": "wrong", "crash": "failed"}[fault]
    assert "n2" in report.tries[0].what
    if fault == "crash":
        assert "SIGABRT" in report.tries[0].what


@pytest.mark.slow
def test_a_hang_ends_in_time_and_is_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ["n1", "n2"])
    nodes.break_node("n2", "hang")
    plan = msgspec.structs.replace(PLAN, limit_s=25.0)
    result = nodes.run(plan)(("n1", "n2"), 0)
    assert result.kind == "hang"
    assert "did not end in time" in result.what


def test_where_time_is_over_no_group_is_begun(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ["n1", "n2"])
    report = check_network(["n1", "n2"], PLAN, nodes.run(PLAN), time_left=lambda: PLAN.limit_s - 1)
    assert (report.tries, report.skipped) == ([], "no time was left to test it")
    assert os.listdir(tmp_path) == []


def test_a_node_without_its_address_is_a_failure_of_the_group(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, ["n1"])
    # 192.0.2.0/24 is nobody's
    nodes.addresses["n1"] = "192.0.2.9"
    result = nodes.run(PLAN)(("n1",), 0)
    assert result.kind == "failed"
    assert result.what.startswith("n1 ")
