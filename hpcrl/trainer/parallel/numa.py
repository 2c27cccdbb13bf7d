"""Bind a rank to the processors and the memory of the socket that its GPU is on.

A node of eight GPUs has two or more NUMA nodes. Pinned buffers in the memory of the other socket cross the link between
the sockets on every copy, which all ranks share. Slurm does not bind ranks: one task starts all of a node. torch's own
binding (``torch.numa``) leaves the memory where it is, and takes node 0 where the system does not know the node.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import re
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call by machine; glibc has no function for it."""
_MPOL_PREFERRED = 1
"""Memory of another node is taken where the preferred one has none: ``linux/mempolicy.h``."""
_MOST_NODES = 1024
"""The kernel's own limit of NUMA nodes (``CONFIG_NODES_SHIFT`` is 10 at most)."""


def bind_near(device: torch.device, sysfs: Path = Path("/sys")) -> int | None:
    """Bind this thread, and those that it starts from now on, to the NUMA node of a GPU.

    Call it before anything large is allocated and before threads are started. The log contains the result or why it was
    not; a rank that is not bound is slower and nothing else.

    Returns
    -------
    The number of the NUMA node; None if the rank was not bound: the device is not a CUDA device, the machine has one
    NUMA node, or does not say which one the GPU is on.
    """
    if device.type != "cuda" or len(list(sysfs.glob("devices/system/node/node[0-9]*"))) < 2:
        return None
    address = pci_address(torch.cuda.get_device_properties(device))
    try:
        node = int((sysfs / f"bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        node = -1  # the kernel's value if firmware does not report the node
    if node < 0:
        _log.warning("the NUMA node of GPU %s is unknown: its rank is not bound", address)
        return None
    return node if bind_to_node(node, sysfs) else None


def bind_to_node(node: int, sysfs: Path = Path("/sys")) -> bool:
    """Bind this thread to the processors of a NUMA node that it may use, and prefer the memory of the node.

    Returns
    -------
    Whether it was bound. It is not where it may use no processor of the node, or the node cannot be read.
    """
    try:
        local = processors_of((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as error:
        _log.warning("the processors of NUMA node %d cannot be read: %s", node, error)
        return False
    usable = local & os.sched_getaffinity(0)
    if not usable:
        _log.warning("Slurm gave no processor of NUMA node %d, which has the GPU of this rank", node)
        return False
    os.sched_setaffinity(0, usable)
    error_number = _prefer_memory(node)
    if error_number:
        _log.warning("memory of NUMA node %d cannot be preferred: %s", node, os.strerror(error_number))
    _log.info("this rank runs on the %d processors of NUMA node %d", len(usable), node)
    return True


def pci_address(properties: object) -> str:
    """Give the PCI address of a device by its properties, as ``/sys/bus/pci/devices`` spells it."""
    domain, bus, slot = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def processors_of(text: str) -> set[int]:
    """Read a list of processors as the kernel writes it: ``0-47,96-143``.

    Raises
    ------
    ValueError
        The text is not such a list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{part!r} is not a range of processors")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def _prefer_memory(node: int) -> int:
    """Set the memory policy of this thread. Returns the number of the error, or 0."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or node >= _MOST_NODES:
        return errno.ENOSYS
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node // bits] = 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # the kernel reads one bit less than the size that it gets
    done = libc.syscall(ctypes.c_long(number), _MPOL_PREFERRED, mask, ctypes.c_ulong(_MOST_NODES + 1))
    return 0 if done == 0 else ctypes.get_errno()
