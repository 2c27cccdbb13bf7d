"""Nodes of the small job connect to each other: real sockets, each node a thread with a loopback address of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcrl.sites.node_reach import RunAddresses, check_connectivity


class Ports(NamedTuple):
    first_port: int = 21000
    last_port: int = 21999


def all_meet(directory: Path, addresses: dict[str, str]) -> dict[str, dict[str, str]]:
    with ThreadPoolExecutor(len(addresses)) as pool:
        nodes = {node: pool.submit(check_connectivity, directory, node, Ports(), addresses) for node in addresses}
        return {node: future.result(60) for node, future in nodes.items()}


def test_all_pairs_of_nodes_connect(tmp_path: Path) -> None:
    assert all_meet(tmp_path, {f"n{i}": f"127.91.7.{i}" for i in (1, 2, 3)}) == {"n1": {}, "n2": {}, "n3": {}}


def test_who_cannot_be_reached_is_named_by_the_others(tmp_path: Path) -> None:
    # 192.0.2.0/24 is nobody's: to listen there fails, as on an address that the node has not
    found = all_meet(tmp_path, {"n1": "127.91.7.1", "n2": "127.91.7.2", "n3": "192.0.2.7"})
    assert {node: sorted(unreached) for node, unreached in found.items()} == {
        "n1": ["n3"],
        "n2": ["n3"],
        "n3": ["n1", "n2"],
    }
    assert all("n3 cannot listen on 192.0.2.7" in why for unreached in found.values() for why in unreached.values())


def test_a_connection_that_is_refused_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # n2 says that it listens, and does not: as behind a firewall
    (tmp_path / "listens-n2").write_text("9")
    (tmp_path / "met-n2").touch()
    assert "127.91.7.2:9" in check_connectivity(tmp_path, "n1", Ports(), {"n1": "127.91.7.1", "n2": "127.91.7.2"})["n2"]


def test_addresses_travel_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RunAddresses({"n1": "10.0.0.1"}, "no")
    for name, value in found.to_env().items():
        monkeypatch.setenv(name, value)
    assert RunAddresses.from_env() == found
