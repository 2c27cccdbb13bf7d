"""Requests of the small job of ``hpcrl cluster check --job`` to each node, and the node's report."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from hpcrl.sites.gpu_products import GpuProduct
from hpcrl.sites.library_probe import LibraryAnswer, LibraryQuestion
from hpcrl.sites.network_check import NetworkPlan
from hpcrl.sites.node_facts import NodeFacts
from hpcrl.sites.step_check import StepReport
from hpcrl.storage.msgspec_types import prepared

QUESTIONS = "questions.json"
_PATTERN = "node-*.json"
_POLL_S = 0.2


class NodeQuestions(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to a node, from the profile."""

    nodes: int
    first_port: int
    last_port: int
    interface: str | None
    nics: tuple[str, ...]
    scratch: str | None
    cache: str | None
    libraries: tuple[LibraryQuestion, ...] = ()
    """Libraries that interpreters of roles import."""
    gpus: int = 0
    """GPUs of the node."""
    network: NetworkPlan | None = None
    """Settings of the trial of the network; None where no interpreter with torch is known."""
    step_options: tuple[str, ...] = ()
    """Options of ``srun`` that ask for the GPUs."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one node.

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
        Ports of the profile's range that were in use, and the checked ports (a sample of the range).
    ephemeral_first:
        First port that the kernel gives to connections; 0 where it is not known.
    has_interface, missing_nics:
        The profile's network interface and adapters.
    address, address_problem:
        Address where a run would listen on the node, or the reason why it could not.
    unreached:
        Other nodes that it cannot connect to there, each with the reason.
    step:
        Result of a small role in its own step (`hpcrl.sites.step_check`).
    scratch_problem, cache_problem:
        Reason why the directory cannot be used; empty where it can, or none is named.
    gpus:
        GPUs that the driver reports; None where there is not an NVIDIA driver.
    libraries:
        Libraries that interpreters of roles import there.
    products:
        A product on each GPU; empty where there is not a driver.
    facts:
        Facts from kernel and driver about the node.
    c_compiler, cxx_compiler:
        Whether there is one where Triton, on GPUs, and torch, on processors, look for it.
    clock_ahead_s:
        Clock of the node minus clock of the filesystem's server.
    visible_s, negative_lag_s:
        First node only: seconds until a new file was in the listing, and the further seconds until a lookup of its name
        found it, after an earlier lookup had failed. None where it never did, or there is one node.
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
    libraries: list[LibraryAnswer] = []
    products: list[GpuProduct] = []
    facts: NodeFacts = NodeFacts()


def report_name(index: int) -> str:
    """Return the name of a node's report in the directory of the check."""
    return f"node-{index}.json"


def read_questions(directory: Path) -> NodeQuestions:
    """Return what the job was asked."""
    return msgspec.json.decode((directory / QUESTIONS).read_bytes(), type=prepared(NodeQuestions))


def read_reports(directory: Path, nodes: int, *, late_s: float) -> list[NodeReport]:
    """Return the reports of nodes that are seen within a time; there are fewer than ``nodes`` where it is over."""
    deadline = time.monotonic() + late_s
    while True:
        # listed, not opened by name: the lag of names is what is measured
        found = sorted(path for path in directory.iterdir() if path.match(_PATTERN))
        if len(found) == nodes or time.monotonic() > deadline:
            return [msgspec.json.decode(path.read_bytes(), type=prepared(NodeReport)) for path in found]
        time.sleep(_POLL_S)
