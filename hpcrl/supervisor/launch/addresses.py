"""Chooses the address on which each node of a run listens and is reached.

Only the node itself knows: Slurm's ``NodeAddr`` may be on the management network, and a node often knows its own name
as 127.0.1.1. The interface that the profile names counts; without one, the address by which the batch node sees the
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcrl.errors import HpcrlError
from hpcrl.network.interfaces import machine_id, only_local, preferred, resolve
from hpcrl.supervisor.launch.survey import NodeAnswer, Survey

_SLURMS = "the address that Slurm has"


def choose_addresses(
    survey: Survey,
    *,
    interfaces: Mapping[str, str | None],
    known: Mapping[str, str],
    others: Mapping[str, str],
) -> dict[str, str]:
    """Return for each node the address on which it listens and the others reach it.

    Parameters
    ----------
    survey:
        Survey that the nodes have answered.
    interfaces:
        The interface that the profile names for each node; None where it names none.
    known:
        Slurm's address of each node (``NodeAddr``, else its name).
    others:
        Addresses of nodes of the run that were asked before.

    Raises
    ------
    HpcrlError
        A node does not have the interface, or has no address that others can reach; the message names both.
    """
    # if all nodes share this machine (one node, or a virtual cluster) loopback is a network like any other
    local = all(answer.machine == machine_id() for answer in survey.answers.values())
    seen = {node: _seen(known[node]) for node in survey.answers}
    chosen: dict[str, str] = {}
    open_nodes: list[NodeAnswer] = []
    for node, answer in sorted(survey.answers.items()):
        interface = interfaces[node]
        if interface is not None:
            chosen[node] = _of_interface(answer, interface, seen[node], local=local)
        elif seen[node] and (local or (not only_local(seen[node]) and _has(answer, seen[node]))):
            chosen[node] = seen[node]
        else:
            open_nodes.append(answer)
    if open_nodes:
        chosen |= _by_route(survey, open_nodes, {**others, **chosen}, known)
    return chosen


def interface_of(answer: NodeAnswer, address: str) -> str:
    """Return the name of a node's interface that has the chosen address."""
    for name, addresses in answer.interfaces.items():
        if address in addresses:
            return name
    # an address of 127.0.0.0/8 need not be listed to be there
    return next(name for name, addresses in answer.interfaces.items() if "loopback" in map(only_local, addresses))


def _seen(host: str) -> str:
    try:
        return resolve(host)
    except OSError:
        return ""


def _has(answer: NodeAnswer, address: str) -> bool:
    return any(address in addresses for addresses in answer.interfaces.values())


def _of_interface(answer: NodeAnswer, interface: str, seen: str, *, local: bool) -> str:
    if interface not in answer.interfaces:
        raise HpcrlError(
            f"node {answer.node} has no network interface {interface} that is up; it has "
            f"{', '.join(sorted(answer.interfaces))}\n"
            "    hint: correct `interface` of its partition in the cluster profile"
        )
    mine = answer.interfaces[interface]
    # all of 127.0.0.0/8 is on the loopback interface, and virtual nodes have an address of their own there
    loops = any(only_local(address) == "loopback" for address in mine)
    if local and loops and seen and only_local(seen) == "loopback":
        return seen
    usable = [address for address in mine if local or not only_local(address)]
    if seen in usable:
        return seen
    best = preferred(usable)
    if best is None:
        has = ", ".join(f"{address} ({only_local(address)})" for address in mine) or "no address"
        raise HpcrlError(
            f"interface {interface} of node {answer.node} has no address that other nodes could reach: {has}\n"
            "    hint: name an interface with an address of the nodes' network in the cluster profile"
        )
    return best


def _by_route(
    survey: Survey, open_nodes: Sequence[NodeAnswer], chosen: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return addresses of nodes that Slurm's names do not lead to: the source of each one's route to another node."""
    if not chosen:
        node = open_nodes[0].node
        raise HpcrlError(
            f"no node of the run can be reached by {_SLURMS}: {node} is {known[node]}, which is "
            f"{_seen(known[node]) or 'unknown'} here, and the cluster profile names no interface\n"
            "    hint: set `interface` of the partition in the cluster profile (`ip -br address` lists them)"
        )
    target_node, target = next(iter(chosen.items()))
    ways = survey.towards(target)
    found: dict[str, str] = {}
    for answer in open_nodes:
        way = ways.get(answer.node, "")
        if not way or only_local(way):
            raise HpcrlError(
                f"node {answer.node} cannot be reached by {_SLURMS} ({known[answer.node]}: "
                f"{_seen(known[answer.node]) or 'unknown'} here), and its route to {target_node} ({target}) has "
                f"{f'the source {way}' if way else 'no source address'}\n"
                "    hint: set `interface` of the partition in the cluster profile"
            )
        found[answer.node] = way
    return found
