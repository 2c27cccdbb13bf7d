"""Facts about a node from its kernel and driver: read on the node, judged by `hpcrl.sites.fact_findings`."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.sites.gpu_state import GpuState, GpuXid, ask_driver, parse_xids
from hpcrl.sites.node_topology import NodeTopology, read_topology

_COMMAND_S = 20.0
_PIECE = 256 << 20
_CHUNK = 8 << 20
_DISK_S = 20.0
"""Longest time of writing, and of reading: what was reached until then counts."""
_LEAST_FREE = 4 << 30
_SMALL_WRITES = 5


class DiskRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the shared filesystem from one node; None is unknown.

    Attributes
    ----------
    write_gb_s:
        One file, written and made durable.
    small_write_s:
        Writing a small file and making it durable, the median of some.
    read_gb_s:
        Reading a file that another node has written, or our own without the page cache.
    """

    write_gb_s: float | None = None
    small_write_s: float | None = None
    read_gb_s: float | None = None


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a node; a value that cannot be read there is None, with an entry in ``unknown``.

    Attributes
    ----------
    gpus:
        GPUs as the driver reports them.
    xids:
        Errors of GPUs in the kernel's log.
    topology:
        NUMA nodes, GPUs and adapters.
    gpudirect:
        Mechanism by which adapters reach the memory of GPUs: ``peermem``, ``dmabuf`` or ``none``.
    locked:
        Reason why a piece of memory cannot be locked; empty where it can.
    disk:
        Rates of the shared filesystem.
    unknown:
        Values that could not be read, each with the reason.
    """

    gpus: list[GpuState] = []
    xids: list[GpuXid] | None = None
    topology: NodeTopology = NodeTopology()
    gpudirect: str | None = None
    locked: str | None = None
    disk: DiskRates = DiskRates()
    unknown: list[str] = []


def read_facts(*, has_driver: bool, root: Path = Path("/")) -> NodeFacts:
    """Read the facts of this node except those of its disk; this takes some seconds.

    Parameters
    ----------
    has_driver:
        Whether the node has a driver of NVIDIA; without one GPUs are not queried.
    root:
        Directory of ``/sys`` and ``/proc``.
    """
    facts = NodeFacts(topology=read_topology(root / "sys"), locked=lock_memory(_PIECE))
    if not has_driver:
        return facts
    unknown = []
    gpus = ask_driver(_run)
    if not gpus:
        unknown.append("clocks, ECC and PCIe of GPUs (nvidia-smi does not answer)")
    log = _run(["dmesg"])
    if log is None:
        unknown.append("errors of GPUs in the kernel's log (users may not read dmesg there)")
    gpudirect = gpudirect_way(
        modules=_text(root / "proc/modules"),
        driver=_text(root / "proc/driver/nvidia/version"),
        symbols=_text(root / "proc/kallsyms"),
        kernel=platform.release(),
    )
    if gpudirect is None:
        unknown.append("GPUDirect (the kernel does not show its modules or symbols)")
    silent = [
        name
        for name, values in (
            ("ECC", [gpu.uncorrected for gpu in gpus]),
            ("reasons of clocks", [gpu.throttle for gpu in gpus]),
            ("width of PCIe", [gpu.link_width for gpu in gpus]),
            ("replaced rows of memory", [gpu.remap_failed for gpu in gpus]),
        )
        if None in values
    ]
    if silent:
        unknown.append(f"{', '.join(silent)} of GPUs (nvidia-smi has no values)")
    return msgspec.structs.replace(
        facts, gpus=gpus, xids=None if log is None else parse_xids(log), gpudirect=gpudirect, unknown=unknown
    )


def gpudirect_way(*, modules: str, driver: str, symbols: str, kernel: str) -> str | None:
    """Return how adapters reach the memory of GPUs: ``peermem``, ``dmabuf`` or ``none``; None where that is unknown.

    Parameters
    ----------
    modules, driver, symbols:
        Texts of ``/proc/modules``, ``/proc/driver/nvidia/version`` and ``/proc/kallsyms``.
    kernel:
        Release of the kernel.
    """
    names = {line.split(" ", 1)[0] for line in modules.splitlines()}
    if names & {"nvidia_peermem", "nv_peer_mem"}:
        return "peermem"
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", kernel, re.ASCII)
    if not names or not driver or not symbols or match is None:
        return None
    # dma-buf needs the open modules of the driver, and a kernel whose RDMA takes such buffers
    new_enough = (int(match[1]), int(match[2])) >= (5, 12)
    return "dmabuf" if new_enough and "Open Kernel Module" in driver and "ib_umem_dmabuf_get" in symbols else "none"


def lock_memory(size: int) -> str:
    """Lock a piece of memory for a moment, as RDMA does; returns why that fails, empty where it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, size) as piece:
        view = (ctypes.c_char * size).from_buffer(piece)
        try:
            address = ctypes.c_void_p(ctypes.addressof(view))
            if libc.mlock(address, ctypes.c_size_t(size)):
                return f"mlock of {size >> 20} MiB: {os.strerror(ctypes.get_errno())}"
            libc.munlock(address, ctypes.c_size_t(size))
        finally:
            del view  # memory that is exported cannot be closed
    return ""


def write_rates(path: Path, *, size: int = _PIECE, limit_s: float = _DISK_S) -> DiskRates:
    """Write a file of ``size`` bytes at most and make it durable; OSError where that fails.

    Nothing is written where the filesystem is nearly full.
    """
    room = os.statvfs(path.parent)
    if room.f_bavail * room.f_frsize < max(_LEAST_FREE, 4 * size):
        return DiskRates()
    # incompressible data, because some filesystems compress
    chunk = os.urandom(min(_CHUNK, size))
    begun, written = time.monotonic(), 0
    with path.open("xb", buffering=0) as stream:
        while written < size and time.monotonic() - begun < limit_s:
            written += stream.write(chunk)
        os.fsync(stream.fileno())
    rate = written / (time.monotonic() - begun) / 1e9
    times = sorted(_small_write(path.with_name(f"{path.name}-small-{i}")) for i in range(_SMALL_WRITES))
    return DiskRates(write_gb_s=rate, small_write_s=times[len(times) // 2])


def _small_write(path: Path) -> float:
    begun = time.monotonic()
    with path.open("xb", buffering=0) as stream:
        stream.write(b"x" * 4096)
        os.fsync(stream.fileno())
    return time.monotonic() - begun


def read_back(path: Path, *, limit_s: float = _DISK_S) -> float | None:
    """Return the rate of reading a file in GB/s, without the page cache of this node where the kernel drops it."""
    begun, read = time.monotonic(), 0
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while time.monotonic() - begun < limit_s and (part := stream.read(_CHUNK)):
            read += len(part)
    return read / max(1e-9, time.monotonic() - begun) / 1e9 if read else None


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMMAND_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
