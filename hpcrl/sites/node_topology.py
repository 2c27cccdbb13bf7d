"""Sockets of the GPUs and adapters of a node, and the adapter nearest to each GPU: from ``/sys``.

A GPU and an adapter are the nearer, the more bridges their paths in the PCI tree have in common, as ``nvidia-smi topo
-m`` shows it (``PIX``, ``PXB``). A value that cannot be read is None or left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec", re.ASCII)


class AdapterPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an adapter of ``/sys/class/infiniband``.

    Attributes
    ----------
    name, port:
        As ``ibv_devices`` shows it, and the number of the port.
    path:
        PCI addresses from the root of the tree down to the adapter; empty where unknown, as for virtual ones.
    numa:
        Number of its NUMA node; None: unknown.
    active:
        Whether the port's state is ACTIVE; None: unknown.
    gb_s:
        Rate in GB/s each way; None: unknown.
    link:
        ``InfiniBand`` or ``Ethernet``; empty where unknown.
    """

    name: str
    port: int
    path: tuple[str, ...] = ()
    numa: int | None = None
    active: bool | None = None
    gb_s: float | None = None
    link: str = ""


class NodeTopology(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a node that matter for where data travels.

    Attributes
    ----------
    cpus:
        CPUs by NUMA node, as lists of the kernel (``0-47,96-143``).
    gpu_paths:
        By the PCI address of a GPU: the addresses from the root of the tree down to it.
    gpu_numa:
        By the PCI address of a GPU: its NUMA node; None: unknown.
    ports:
        All ports of adapters.
    """

    cpus: dict[int, str] = {}
    gpu_paths: dict[str, tuple[str, ...]] = {}
    gpu_numa: dict[str, int | None] = {}
    ports: list[AdapterPort] = []


def read_topology(sys: Path = Path("/sys")) -> NodeTopology:
    """Read a node's topology; ``sys`` is where its kernel shows devices."""
    gpus = [device for device in _listed(sys / "bus/pci/devices") if _is_gpu(device)]
    return NodeTopology(
        cpus={
            int(match[1]): _text(path / "cpulist")
            for path in _listed(sys / "devices/system/node")
            if (match := re.fullmatch(r"node([0-9]{1,4})", path.name, re.ASCII))
        },
        gpu_paths={device.name: _path(device) for device in gpus},
        gpu_numa={device.name: _numa(device) for device in gpus},
        ports=[port for device in _listed(sys / "class/infiniband") for port in _ports(device)],
    )


def nearest_adapters(path: Sequence[str], ports: Sequence[AdapterPort]) -> list[AdapterPort]:
    """Return the ports that share the longest part of their path with a GPU; empty where none shares a bridge.

    Two that are equally near are both returned.
    """
    shared = [(_common(path, port.path), port) for port in ports]
    most = max((count for count, _ in shared), default=0)
    return [port for count, port in shared if count == most and most > 0]


def parse_rate(text: str) -> float | None:
    """Return GB/s of a port's ``rate`` (``400 Gb/sec (4X NDR)`` is 50); None where it says none."""
    match = _RATE.match(text)
    return float(match[1]) / 8 if match and float(match[1]) > 0 else None


def parse_cpu_list(text: str) -> list[int]:
    """Return the CPUs of a list of the kernel (``0-2,8``); empty where it is none."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part, re.ASCII)
        if match is None:
            return []
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return cpus


def _ports(device: Path) -> list[AdapterPort]:
    path, numa = _path(device / "device"), _numa(device / "device")
    found = []
    for port in _listed(device / "ports"):
        if not port.name.isdecimal():
            continue
        state = _text(port / "state")
        found.append(
            AdapterPort(
                name=device.name,
                port=int(port.name),
                path=path,
                numa=numa,
                active="ACTIVE" in state if state else None,
                gb_s=parse_rate(_text(port / "rate")),
                link=_text(port / "link_layer"),
            )
        )
    return found


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == _NVIDIA and _text(device / "class")[:6] in _DISPLAYS


def _path(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses on the way to a device, roots (``pci0000:16``) first."""
    try:
        parts = Path(os.path.realpath(device, strict=True)).parts
    except OSError:
        return ()
    return tuple(
        part for part in parts if re.fullmatch(r"(?:pci)?[0-9a-f]{4,5}:[0-9a-f]{2}(?::[0-9a-f]{2}\.[0-7])?", part)
    )


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many bridges two paths have in common; the last part of each is the device itself."""
    count = 0
    for one, other in zip(first[:-1], second[:-1], strict=False):
        if one != other:
            break
        count += 1
    return count


def _numa(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) else None


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
