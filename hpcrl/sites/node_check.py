"""Checks of a site that need a compute node: they run there, as a small job of ``hpcrl cluster check --job``.

The batch process starts one task a node. Each writes ``node-<index>.json`` into the directory of the check; the first
two measure how a name that did not exist becomes visible. All times that are compared are of one clock. Before that,
each node connects to each other one, on the addresses that a run would use.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.network.ports import is_free
from hpcrl.sites.gpu_products import GpuProduct, multiply_on_gpus
from hpcrl.sites.library_probe import probe_libraries
from hpcrl.sites.node_facts import DiskRates, read_back, read_facts, write_rates
from hpcrl.sites.node_reach import RunAddresses, check_connectivity
from hpcrl.sites.node_report import NodeQuestions, NodeReport, read_questions, report_name
from hpcrl.sites.step_check import StepReport
from hpcrl.storage.files import atomic_write, write_json

_PROBE, _ASKED, _BULK = "probe", "asked", "bulk"
_LAG_LIMIT_S = 120.0
"""Longest wait for a name; NFS forgets a negative entry after a minute by default."""
_POLL_S = 0.05
_PORT_SAMPLE = 200
_NODE_S = 660.0
"""Longest time of all on a node. The batch process waits a minute longer."""
_IMPORTS_S = 420.0
"""Longest time of imports; the rest is for products on GPUs."""


def look_around(directory: Path, index: int, questions: NodeQuestions) -> NodeReport:
    """Answer the questions on this node; the first two nodes also measure the lag of names."""
    until = time.monotonic() + _NODE_S
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    addresses = RunAddresses.from_env()
    unreached = {} if addresses.problem else check_connectivity(directory, host, questions, addresses.by_node)
    visible_s = negative_lag_s = None
    if questions.nodes > 1 and index == 0:
        visible_s, negative_lag_s = _wait_for_name(directory)
    elif index == 1:
        _create_when_asked(directory)
    disk, problem = _measure_disk(directory, index, questions.nodes)
    facts = read_facts(has_driver=_gpus() is not None)
    shm = os.statvfs("/dev/shm")
    ports = _sample(questions.first_port, questions.last_port)
    return NodeReport(
        host=host,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shm_bytes=shm.f_blocks * shm.f_frsize,
        has_scontrol=_answers("scontrol", "version"),
        busy_ports=[port for port in ports if not is_free("", port)],
        looked_at_ports=len(ports),
        ephemeral_first=_ephemeral_first(),
        has_interface=questions.interface is None or Path("/sys/class/net", questions.interface).exists(),
        missing_nics=[name for name in questions.nics if not Path("/sys/class/infiniband", name).exists()],
        scratch_problem=_directory_problem(questions.scratch),
        cache_problem=_directory_problem(questions.cache),
        gpus=_gpus(),
        c_compiler=_is_there(os.environ.get("CC"), "gcc", "clang"),
        cxx_compiler=_is_there(os.environ.get("CXX"), "g++"),
        clock_ahead_s=_clock_ahead_s(directory, index),
        visible_s=visible_s,
        negative_lag_s=negative_lag_s,
        address=addresses.by_node.get(host, ""),
        address_problem=addresses.problem,
        unreached=unreached,
        step=StepReport.from_env(),
        libraries=probe_libraries(questions.libraries, budget_s=min(_IMPORTS_S, until - time.monotonic())),
        products=_products(questions, until),
        facts=msgspec.structs.replace(
            facts,
            disk=disk,
            unknown=[*facts.unknown, *([f"rates of the shared filesystem ({problem})"] if problem else [])],
        ),
    )


def _measure_disk(directory: Path, index: int, nodes: int) -> tuple[DiskRates, str]:
    """Measure the shared filesystem: the second node writes and the first reads, or the only one does both.

    Returns also why that failed; empty where it did not, or this node has no part in it.
    """
    path, told = directory / _BULK, f"{_BULK}-told"
    rates = DiskRates()
    try:
        if index == min(1, nodes - 1):
            rates = write_rates(path)
            atomic_write(directory / told, b"" if rates.write_gb_s is None else b"written")
        if index == 0:
            deadline = time.monotonic() + _LAG_LIMIT_S
            while told not in os.listdir(directory):
                if time.monotonic() > deadline:
                    return rates, "the other node did not write in time"
                time.sleep(_POLL_S)
            if not (directory / told).read_bytes():
                return rates, "there is little room left"
            rates = msgspec.structs.replace(rates, read_gb_s=read_back(path))
    except OSError as error:
        return rates, str(error)
    return rates, ""


def _products(questions: NodeQuestions, until: float) -> list[GpuProduct]:
    if not questions.gpus or _gpus() is None or questions.network is None:
        return []
    plan = questions.network
    return multiply_on_gpus(plan.python, questions.gpus, environ=plan.environ, budget_s=until - time.monotonic())


def _wait_for_name(directory: Path) -> tuple[float | None, float | None]:
    """Look for a name that is not there, have it created, and see when list and lookup show it."""
    probe = directory / _PROBE
    probe.exists()  # now the client may cache that the name does not exist
    atomic_write(directory / _ASKED, b"")
    started = time.monotonic()
    listed: float | None = None
    while (now := time.monotonic()) - started < _LAG_LIMIT_S:
        if listed is None and _PROBE in os.listdir(directory):
            listed = now - started
        if probe.exists():
            found = time.monotonic() - started
            listed = found if listed is None else listed
            return listed, found - listed
        time.sleep(_POLL_S)
    return listed, None


def _create_when_asked(directory: Path) -> None:
    deadline = time.monotonic() + _LAG_LIMIT_S
    while _ASKED not in os.listdir(directory):
        if time.monotonic() > deadline:
            return  # the first node reports that it saw nothing
        time.sleep(_POLL_S)
    atomic_write(directory / _PROBE, b"")


def _sample(first: int, last: int) -> list[int]:
    step = max(1, (last - first + 1) // _PORT_SAMPLE)
    return list(range(first, last + 1, step))


def _ephemeral_first() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _gpus() -> int | None:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return None


def _is_there(*programs: str | None) -> bool:
    return any(shutil.which(name) for name in programs if name)


def _directory_problem(path: str | None) -> str:
    if path is None:
        return ""
    mine = Path(path, f".hpcrl-check-{socket.gethostname()}-{os.getpid()}")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        mine.write_bytes(b"")
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return ""


def _clock_ahead_s(directory: Path, index: int) -> float:
    """Return the seconds by which the clock is ahead of the time that the server gives to a file written now."""
    path = directory / f"clock-{index}"
    before = time.time()
    path.write_bytes(b"x")
    after = time.time()
    stamp = path.stat().st_mtime
    # a report from inside the write is impossible
    return before - stamp if stamp < before else min(0.0, after - stamp)


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main(directory: Path) -> None:
    """Run the checks of a node."""
    index = int(os.environ["SLURM_PROCID"])
    write_json(directory / report_name(index), look_around(directory, index, read_questions(directory)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
