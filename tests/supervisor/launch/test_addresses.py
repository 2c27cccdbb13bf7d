"""Where nodes listen: rules by what nodes say, and real nodes in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.network.interfaces import machine_id
from hpcrl.supervisor.launch.addresses import choose_addresses
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.launch.survey import NodeAnswer, NodesSilentError, Survey

LOOP = {"lo": ["127.0.0.1", "::1"]}


class Asked(Survey):
    """Nodes that have said this; they see each other by the ways given."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Sequence[str]]], ways: Mapping[str, str] | None = None) -> None:
        super().__init__([], env={}, timeout_s=1.0)
        self.answers = {node: NodeAnswer(node, f"machine of {node}", has) for node, has in nodes.items()}
        self._ways = dict(ways or {})

    def towards(self, host: str) -> dict[str, str]:
        return self._ways


def choose(
    nodes: Mapping[str, Mapping[str, Sequence[str]]],
    known: Mapping[str, str],
    interface: str | None = None,
    *,
    ways: Mapping[str, str] | None = None,
) -> dict[str, str]:
    return choose_addresses(Asked(nodes, ways), interfaces=dict.fromkeys(nodes, interface), known=known, others={})


def two() -> dict[str, Mapping[str, Sequence[str]]]:
    return {f"n{i}": {**LOOP, "eth0": [f"10.0.0.{i}"], "ib0": [f"10.9.0.{i}", f"fd00::{i}"]} for i in (1, 2)}


MANAGEMENT = {"n1": "10.0.0.1", "n2": "10.0.0.2"}


def test_the_interface_of_the_profile_counts_not_the_address_that_slurm_has() -> None:
    assert choose(two(), MANAGEMENT, "ib0") == {"n1": "10.9.0.1", "n2": "10.9.0.2"}


def test_without_one_the_batch_node_says_how_it_sees_the_others() -> None:
    assert choose(two(), MANAGEMENT) == MANAGEMENT


def test_of_several_addresses_slurms_is_taken_else_the_first_ipv4() -> None:
    nodes = {"n1": {"ib0": ["fd00::1", "10.9.0.1", "10.9.0.7"]}, "n2": {"ib0": ["fe80::2", "fd00::2"]}}
    assert choose(nodes, {"n1": "10.9.0.7", "n2": "10.0.0.2"}, "ib0") == {"n1": "10.9.0.7", "n2": "fd00::2"}


def test_a_node_that_knows_itself_as_loopback_is_reached_by_its_way_to_another() -> None:
    known = {"n1": "127.0.1.1", "n2": "10.0.0.2"}
    assert choose(two(), known, ways={"n1": "10.0.0.1"}) == MANAGEMENT
    # an address that the node has not cannot be bound there
    assert choose(two(), {"n1": "192.0.2.7", "n2": "10.0.0.2"}, ways={"n1": "10.0.0.1"}) == MANAGEMENT


@pytest.mark.parametrize(
    ("known", "interface", "ways", "words"),
    [
        (MANAGEMENT, "bond0", {}, ["node n1 has no network interface bond0", "eth0, ib0, lo", "cluster profile"]),
        (MANAGEMENT, "lo", {}, ["interface lo of node n1", "127.0.0.1 (loopback)", "hint"]),
        ({"n1": "127.0.1.1", "n2": "127.0.1.1"}, None, {}, ["n1 is 127.0.1.1", "names no interface", "hint"]),
        ({"n1": "127.0.1.1", "n2": "10.0.0.2"}, None, {"n1": "127.0.0.1"}, ["node n1", "has the source 127.0.0.1"]),
        ({"n1": "127.0.1.1", "n2": "10.0.0.2"}, None, {}, ["node n1", "has no source address", "hint"]),
    ],
)
def test_an_address_that_others_cannot_reach_is_an_error_with_names(
    known: Mapping[str, str], interface: str | None, ways: Mapping[str, str], words: list[str]
) -> None:
    with pytest.raises(HpcrlError) as caught:
        choose(two(), known, interface, ways=ways)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_run_of_one_node_may_be_on_loopback_where_the_supervisor_is() -> None:
    survey = Asked({"n1": LOOP})
    survey.answers["n1"] = survey.answers["n1"]._replace(machine=machine_id())
    own = {"interfaces": {"n1": None}, "known": {"n1": "127.0.1.1"}}
    assert choose_addresses(survey, **own, others={}) == {"n1": "127.0.1.1"}
    # not where the supervisor is elsewhere, as in an allocation that a login node works with
    with pytest.raises(HpcrlError, match=r"n1 is 127\.0\.1\.1"):
        choose_addresses(Asked({"n1": LOOP}), **own, others={})


def test_urls_of_ipv6_have_brackets() -> None:
    assert Address("fd00::1", 20000).url == "http://[fd00::1]:20000"
    assert Address("10.0.0.1", 1, servers=(("fd00::1", 7), ("n2", 8))).urls == ("http://[fd00::1]:7", "http://n2:8")


# -- real tasks on this machine ----------------------------------------------------------------------------------

ANSWERS = [sys.executable, "-P", "-m", "hpcrl.supervisor.launch.node_answers"]


def answers_of(node: str, *before: str) -> tuple[list[str], list[str]]:
    return [*before, "env", f"SLURMD_NODENAME={node}", *ANSWERS], [node]


def test_virtual_nodes_of_one_machine_keep_the_loopback_addresses_of_their_own() -> None:
    known = {"v1": "127.81.3.1", "v2": "127.81.3.2"}
    with Survey([answers_of("v1"), answers_of("v2")], env=os.environ, timeout_s=60) as survey:
        assert {answer.machine for answer in survey.answers.values()} == {machine_id()}
        for interface in ("lo", None):
            interfaces = dict.fromkeys(known, interface)
            assert choose_addresses(survey, interfaces=interfaces, known=known, others={}) == known


@pytest.mark.parametrize(
    ("command", "timeout_s", "words"),
    [
        (["sh", "-c", "echo 'srun: error: Task launch failed on node n1' >&2"], 60.0, ["ended", "Task launch failed"]),
        (["sleep", "60"], 0.5, ["within 0.5 s", "n1", "limits.start_timeout_s"]),
    ],
)
def test_nodes_that_do_not_answer_are_named_in_time(command: list[str], timeout_s: float, words: list[str]) -> None:
    with pytest.raises(NodesSilentError) as caught, Survey([(command, ["n1"])], env=os.environ, timeout_s=timeout_s):
        pass
    assert all(word in str(caught.value) for word in words), caught.value


LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
server.accept()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable, 198.18.77.1 and .2 on its ends; each is a node of its own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"hpcrl-{os.getpid()}-a", f"hpcrl-{os.getpid()}-b")

    def ip(*words: str, check: bool = True) -> int:
        return subprocess.run(["ip", *words], check=check, capture_output=True).returncode

    if ip("netns", "add", names[0], check=False):
        pytest.skip("this machine (or container) makes no network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for i, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"198.18.77.{i}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


@pytest.mark.parametrize("interface", [None, "cable"])
def test_a_node_whose_name_is_127_0_1_1_on_itself_is_reached(
    namespaces: tuple[str, str], interface: str | None
) -> None:
    inside = [("ip", "netns", "exec", name) for name in namespaces]
    commands = [answers_of(node, *before) for node, before in zip(("n1", "n2"), inside, strict=True)]
    with Survey(commands, env=os.environ, timeout_s=60) as survey:
        found = choose_addresses(
            survey,
            interfaces={"n1": interface, "n2": interface},
            known={"n1": "127.0.1.1", "n2": "198.18.77.2"},
            others={},
        )
    assert found == {"n1": "198.18.77.1", "n2": "198.18.77.2"}
    # each node reaches the other one there
    for here, there, address in ((0, 1, found["n2"]), (1, 0, found["n1"])):
        server = subprocess.Popen([*inside[there], sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            port = server.stdout.readline().decode().strip()
            subprocess.run([*inside[here], sys.executable, "-c", CONNECT, address, port], check=True)
        finally:
            server.kill()
            server.communicate()
