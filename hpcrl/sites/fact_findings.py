"""Findings from the facts of a node: GPUs in trouble, adapters that are down, disks that are slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.cluster_slurm import FilesystemConfig, NodeConfig
from hpcrl.sites.gpu_state import GpuState, throttle_reasons
from hpcrl.sites.library_findings import FindingRow
from hpcrl.sites.node_facts import DiskRates, NodeFacts
from hpcrl.sites.node_topology import nearest_adapters
from hpcrl.sites.profile_check import Severity

_OTHER_MEMORY = 0.03
"""Maximum difference of a GPU's memory from the profile's, as a share, that counts as rounding."""
_SLOW_DISK = 0.3
_SLOW_RATE = 0.95


def fact_findings(facts: NodeFacts, node: NodeConfig, filesystem: FilesystemConfig) -> Iterator[FindingRow]:
    """Judge the facts of a node."""
    for gpu in facts.gpus:
        yield from _gpu(gpu, node)
    for xid in facts.xids or ():
        if not xid.of_programs:
            what = f"the kernel's log has XID {xid.number} of the GPU at {xid.bus}: {xid.text or 'no reason given'}"
            way = "NVIDIA's table of XIDs says what to do; most of these need a reset or another GPU"
            yield FindingRow("gpu-xid", Severity.WARNING, "", what, way)
    yield from _adapters(facts, node)
    if node.gpus and node.fabric.kind != "ethernet" and facts.gpudirect == "none":
        what = "there is no GPUDirect: neither nvidia_peermem nor what dma-buf needs is there"
        way = "load nvidia_peermem, or install the open kernel modules of the driver; else data goes through the host"
        yield FindingRow("no-gpudirect", Severity.WARNING, "", what, way)
    if facts.locked and (node.fabric.kind != "ethernet" or facts.gpus):
        what = f"a piece of memory cannot be locked: {facts.locked}"
        yield FindingRow("pinned-memory", Severity.ERROR, "", what, "set LimitMEMLOCK=infinity for slurmd")
    yield from _disk(facts.disk, filesystem)
    if facts.unknown:
        what = f"unknown there: {'; '.join(facts.unknown)}"
        yield FindingRow(
            "facts-unknown", Severity.NOTE, "", what, "ask an admin of the node; nothing was seen of these"
        )


def _gpu(gpu: GpuState, node: NodeConfig) -> Iterator[FindingRow]:
    name = f"GPU {gpu.index} ({gpu.bus})"
    if gpu.needs_reset:
        yield FindingRow("gpu-reset", Severity.ERROR, "", f"{name} needs a reset", "drain the node and reset the GPU")
    if gpu.uncorrected:
        what = f"{name} has {gpu.uncorrected} uncorrected errors of memory since the driver was loaded"
        yield FindingRow(
            "gpu-ecc", Severity.ERROR, "", what, "drain the node; a reset clears them, if the GPU is sound"
        )
    if gpu.ecc is False:
        what = f"{name} has ECC off: errors of memory go unseen"
        yield FindingRow("gpu-ecc-off", Severity.WARNING, "", what, "`nvidia-smi -e 1` and a reset")
    if gpu.remap_failed:
        what = f"{name} has no spare row of memory left"
        yield FindingRow("gpu-rows", Severity.ERROR, "", what, "have the GPU replaced")
    elif gpu.remap_pending:
        what = f"{name} waits for a reset to replace a row of memory"
        yield FindingRow("gpu-rows", Severity.WARNING, "", what, "reset the GPU when the node is empty")
    if gpu.throttle is not None and (reasons := throttle_reasons(gpu.throttle)):
        at = "" if gpu.sm_mhz is None else f" at {gpu.sm_mhz} of {gpu.max_sm_mhz or '?'} MHz"
        hot = "" if gpu.temperature_c is None else f", {gpu.temperature_c} degrees"
        what = f"{name} is held back{at}{hot}: {', '.join(reasons)}"
        way = "look at cooling and power of the node (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`)"
        yield FindingRow("gpu-throttled", Severity.WARNING, "", what, way)
    if gpu.link_width is not None and gpu.max_link_width is not None and gpu.link_width < gpu.max_link_width:
        what = f"{name} has {gpu.link_width} of {gpu.max_link_width} lanes of PCIe"
        yield FindingRow("gpu-pcie", Severity.WARNING, "", what, "have it reseated: copies to the host are slower")
    wanted = node.gpu.memory_gib
    if wanted and gpu.memory_mib and abs(gpu.memory_mib / 1024 / wanted - 1) > _OTHER_MEMORY:
        what = f"{name} ({gpu.name}) has {gpu.memory_mib / 1024:.1f} GiB, and the profile says {wanted:g}"
        yield FindingRow("gpu-memory", Severity.WARNING, "", what, "correct gpu.memory_gib")


def _adapters(facts: NodeFacts, node: NodeConfig) -> Iterator[FindingRow]:
    ports = {(port.name, port.port): port for port in facts.topology.ports}
    buses = {gpu.index: gpu.bus for gpu in facts.gpus}
    profile = [ports[nic.name, nic.port] for nic in node.nics if (nic.name, nic.port) in ports]
    for nic in node.nics:
        port = ports.get((nic.name, nic.port))
        if port is None:
            continue
        if port.active is False:
            what = f"port {nic.port} of {nic.name} is not active"
            yield FindingRow("nic-down", Severity.ERROR, "", what, "`ibstat` there says its state; look at the cable")
        elif nic.gb_s is not None and port.gb_s is not None and port.gb_s < _SLOW_RATE * nic.gb_s:
            what = f"{nic.name} runs at {port.gb_s:g} GB/s, and the profile says {nic.gb_s:g}"
            yield FindingRow("nic-slow", Severity.WARNING, "", what, "look at cable and switch port; or correct gb_s")
        for index in nic.gpus:
            path = facts.topology.gpu_paths.get(buses.get(index, ""), ())
            nearest = nearest_adapters(path, profile)
            if nearest and port not in nearest:
                names = ", ".join(each.name for each in nearest)
                what = f"{nic.name} is not the nearest adapter of GPU {index}: {names} is"
                yield FindingRow("nic-far", Severity.WARNING, "", what, "correct `gpus` of nics (`nvidia-smi topo -m`)")


def _disk(disk: DiskRates, filesystem: FilesystemConfig) -> Iterator[FindingRow]:
    for doing, rate, wanted, key in (
        ("writes", disk.write_gb_s, filesystem.node_write_gb_s, "node_write_gb_s"),
        ("reads", disk.read_gb_s, filesystem.node_read_gb_s, "node_read_gb_s"),
    ):
        if rate is not None and wanted is not None and rate < _SLOW_DISK * wanted:
            what = (
                f"one stream {doing} the shared filesystem at {rate:.2f} GB/s, and the profile says {wanted:g} a node"
            )
            way = "measure it with several streams (fio, IOR); correct the figure if it is no better"
            yield FindingRow("filesystem-slow", Severity.NOTE, f"filesystem.{key}", what, way)


def facts_summary(nodes: Sequence[NodeFacts]) -> list[str]:
    """Return lines for people: CPUs, GPUs and adapters by socket of the first node, and the shared filesystem."""
    lines = []
    for facts in nodes[:1]:
        topology, buses = facts.topology, {gpu.bus: gpu.index for gpu in facts.gpus}
        for numa, cpus in sorted(topology.cpus.items()) if topology.gpu_paths or topology.ports else ():
            gpus = [str(buses.get(bus, bus)) for bus, at in topology.gpu_numa.items() if at == numa]
            names = dict.fromkeys(port.name for port in topology.ports if port.numa == numa)
            parts = [f"CPUs {cpus}"]
            parts += [f"GPUs {', '.join(gpus)}"] if gpus else []
            parts += [f"adapters {', '.join(names)}"] if names else []
            lines.append(f"NUMA node {numa}: {'; '.join(parts)}")
    # one node writes, and another one reads
    write, read, small = (
        next((rate for facts in nodes if (rate := getattr(facts.disk, name)) is not None), None)
        for name in ("write_gb_s", "read_gb_s", "small_write_s")
    )
    rates = [
        *([] if write is None else [f"writes {write:.2f} GB/s"]),
        *([] if read is None else [f"reads {read:.2f} GB/s"]),
        *([] if small is None else [f"makes a small file durable in {small * 1000:.1f} ms"]),
    ]
    return [*lines, f"the shared filesystem {', '.join(rates)} (one stream)"] if rates else lines
