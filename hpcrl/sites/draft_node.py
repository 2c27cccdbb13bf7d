"""Lines of a drafted profile that one node of a partition can fill: adapters, their GPUs, sockets."""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.sites.node_topology import AdapterPort, NodeTopology, nearest_adapters
from hpcrl.sites.yaml_text import yaml_text


class SeenNode(NamedTuple):
    """Node of a partition that could be inspected.

    Attributes
    ----------
    name:
        Slurm's name of it.
    topology:
        Topology from its kernel.
    """

    name: str
    topology: NodeTopology


def fabric_kind(topology: NodeTopology) -> str | None:
    """Return the kind of fabric of the adapters that GPUs talk through; None where there are none, or of two kinds."""
    links = {port.link for port, _ in _adapters(topology)}
    return {frozenset({"InfiniBand"}): "infiniband", frozenset({"Ethernet"}): "roce"}.get(frozenset(links))


def adapter_lines(seen: SeenNode) -> list[str]:
    """Return the lines of ``nics`` with comments on sockets; empty where the node shows no adapter.

    GPUs are numbered by their PCI addresses, as the driver does. An adapter is written where it is up and the nearest
    one of a GPU: those of storage and management are on bridges of their own, and are named in a comment.
    """
    topology = seen.topology
    if not topology.ports:
        return []
    adapters = _adapters(topology)
    lines = [f"      # as node {seen.name} shows it; `nvidia-smi topo -m` there says the same"]
    for numa, cpus in sorted(topology.cpus.items()):
        gpus = [str(number) for number, bus in enumerate(sorted(topology.gpu_paths)) if topology.gpu_numa[bus] == numa]
        names = dict.fromkeys(port.name for port in topology.ports if port.numa == numa)
        parts = [f"CPUs {cpus}", *([f"GPUs {', '.join(gpus)}"] if gpus else [])]
        parts += [f"adapters {', '.join(names)}"] if names else []
        lines.append(f"      # NUMA node {numa}: {'; '.join(parts)}")
    others = dict.fromkeys(port.name for port in topology.ports if port not in [each for each, _ in adapters])
    if others:
        lines.append(f"      # not nearest to a GPU, or down, and so left out: {', '.join(others)}")
    if not adapters:
        return [*lines, "      # nics:", "      #   - {name: mlx5_0, gpus: [0]}"]
    lines.append("      nics:")
    for port, near in adapters:
        number = "" if port.port == 1 else f", port: {port.port}"
        rate = "" if port.gb_s is None else f", gb_s: {port.gb_s:g}"
        lines.append(f"        - {{name: {yaml_text(port.name)}{number}, gpus: {near}{rate}}}")
    return lines


def _adapters(topology: NodeTopology) -> list[tuple[AdapterPort, list[int]]]:
    """Return the ports that GPUs talk through, each with its GPUs, in the order of the first of these."""
    up = [port for port in topology.ports if port.active]
    found: dict[tuple[str, int], tuple[AdapterPort, list[int]]] = {}
    for number, bus in enumerate(sorted(topology.gpu_paths)):
        for port in nearest_adapters(topology.gpu_paths[bus], up):
            found.setdefault((port.name, port.port), (port, []))[1].append(number)
    return list(found.values())
