"""What only a compute node can tell about a site: runs there, as a small job of ``hpcrl cluster check --job``.

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
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.daemon_threads import run_process
from hpcrl.decoding import prepared
from hpcrl.fs import atomic_write, write_json
from hpcrl.interpreter import module_command
from hpcrl.ports import is_free
from hpcrl.sites.node_reach import RunAddresses, meet
from hpcrl.sites.step_check import StepReport, check_step
from hpcrl.slurm.launch_arguments import step_environment

__all__ = ["REPORT_PATTERN", "NodeQuestions", "NodeReport", "look_around"]

REPORT_PATTERN = "node-*.json"
QUESTIONS = "questions.json"
_PROBE, _ASKED = "probe", "asked"
_LAG_LIMIT_S = 120.0
"""Longest wait for a name; NFS forgets a negative entry after a minute by default."""
_POLL_S = 0.05
_IMPORT_TIMEOUT_S = 240.0
"""Longest import of torch and vLLM from a busy shared filesystem."""
_PORT_SAMPLE = 200


class NodeQuestions(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at; from the profile."""

    nodes: int
    first_port: int
    last_port: int
    interface: str | None
    nics: tuple[str, ...]
    scratch: str | None
    cache: str | None
    imports: dict[str, tuple[str, ...]] = {}
    """What roles import, by their interpreter."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one node told.

    Attributes
    ----------
    host:
        Slurm's name of it.
    memlock_bytes, open_files:
        Limits of a task; -1 without a limit. ``open_files`` is the hard limit: hpcrl raises the soft one to it.
    shm_bytes:
        Size of ``/dev/shm``.
    has_scontrol:
        Whether ``scontrol`` answers on the node.
    busy_ports, looked_at_ports:
        Ports of the profile's range (a sample of it) that were taken.
    ephemeral_first:
        First port that the kernel gives to connections; 0 where it does not tell.
    has_interface, missing_nics:
        The profile's network interface and adapters.
    address, address_problem:
        Where a run would listen on the node, or why it could not.
    unreached:
        Other nodes that it cannot connect to there, each with the reason.
    step:
        How a small role went in a step of its own (`hpcrl.sites.step_check`).
    scratch_problem, cache_problem:
        Why the directory cannot be used; empty where it can, or none is named.
    gpus:
        GPUs that the driver shows; None where there is no NVIDIA driver.
    c_compiler, cxx_compiler:
        Whether there is one where Triton and torch look for it: layers are compiled with it, on GPUs and on processors.
    clock_ahead_s:
        Clock of the node minus clock of the filesystem's server.
    visible_s, negative_lag_s:
        First node only: until a new file was in the listing; and how much later a lookup of its name found it, which
        had failed before. None where it never did, or there is one node.
    """

    host: str
    memlock_bytes: int
    open_files: int
    shm_bytes: int
    has_scontrol: bool
    busy_ports: list[int]
    looked_at_ports: int
    ephemeral_first: int
    has_interface: bool
    missing_nics: list[str]
    scratch_problem: str
    cache_problem: str
    gpus: int | None
    c_compiler: bool
    cxx_compiler: bool
    clock_ahead_s: float
    visible_s: float | None = None
    negative_lag_s: float | None = None
    address: str = ""
    address_problem: str = ""
    unreached: dict[str, str] = {}
    step: StepReport = StepReport()
    failed_imports: dict[str, str] = {}
    """By interpreter: why what its roles import cannot be imported there."""


def look_around(directory: Path, index: int, questions: NodeQuestions) -> NodeReport:
    """Answer the questions on this node; the first two nodes also measure the lag of names."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    addresses = RunAddresses.from_env()
    unreached = {} if addresses.problem else meet(directory, host, questions, addresses.by_node)
    visible_s = negative_lag_s = None
    if questions.nodes > 1 and index == 0:
        visible_s, negative_lag_s = _wait_for_name(directory)
    elif index == 1:
        _create_when_asked(directory)
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
        failed_imports={
            python: problem
            for python, modules in questions.imports.items()
            if (problem := import_problem(python, modules))
        },
    )


def _wait_for_name(directory: Path) -> tuple[float | None, float | None]:
    """Look for a name that is not there, have it created, and see when list and lookup show it."""
    probe = directory / _PROBE
    probe.exists()  # now the client may remember that there is no such name
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
            return  # the first node says that it saw nothing
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
    """Against the time that the filesystem's server gives to a file written now."""
    path = directory / f"clock-{index}"
    before = time.time()
    path.write_bytes(b"x")
    after = time.time()
    stamp = path.stat().st_mtime
    # inside of the write nothing can be said
    return before - stamp if stamp < before else min(0.0, after - stamp)


def import_problem(python: str, modules: Sequence[str]) -> str:
    """Import modules with an interpreter, and return why that failed; empty where it did not.

    They are imported and not only looked for: a package for another processor or driver is there, and does not load.
    """
    if shutil.which(python) is None:
        return "there is no such program"
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    try:
        result = subprocess.run(
            [python, "-P", "-c", code, *modules],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"importing {', '.join(modules)} takes longer than {_IMPORT_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error)
    if not result.returncode:
        return ""
    return (result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"])[-1]


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _batch(directory: Path, questions: NodeQuestions) -> int:
    """Start one task a node and wait for all."""
    command = [
        *("srun", f"--nodes={questions.nodes}", f"--ntasks={questions.nodes}", "--ntasks-per-node=1", "--export=ALL"),
        *("--overlap", *module_command(sys.executable, "hpcrl.sites.node_check", "node", str(directory))),
    ]
    env = step_environment(os.environ)
    step = run_process(check_step(directory, env))
    env |= RunAddresses.ask(questions.interface).to_env() | step.to_env()
    return subprocess.run(command, check=False, env=env, timeout=4 * _LAG_LIMIT_S).returncode


def main(part: str, directory: Path) -> int:
    """Entry point on the nodes: ``batch DIRECTORY`` or ``node DIRECTORY``."""
    questions = msgspec.json.decode((directory / QUESTIONS).read_bytes(), type=prepared(NodeQuestions))
    if part == "batch":
        return _batch(directory, questions)
    index = int(os.environ["SLURM_PROCID"])
    write_json(directory / f"node-{index}.json", look_around(directory, index, questions))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
