"""Facts of a node: read from its kernel and disk here, and judged where they are invented."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import FilesystemConfig, NodeConfig
from hpcrl.config.load import load_cluster
from hpcrl.sites import node_facts
from hpcrl.sites.fact_findings import fact_findings, facts_summary
from hpcrl.sites.gpu_state import GpuState, GpuXid
from hpcrl.sites.library_findings import FindingRow
from hpcrl.sites.node_facts import (
    DiskRates,
    NodeFacts,
    gpudirect_way,
    lock_memory,
    read_back,
    read_facts,
    write_rates,
)
from hpcrl.sites.node_topology import AdapterPort, NodeTopology
from hpcrl.sites.profile_check import Severity

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.12  Fri May 24 10:00:00 UTC 2024\n"
MODULES = "nvidia_uvm 4956160 4 - Live 0x0000000000000000\nnvidia 11563008 100 nvidia_uvm, Live 0x0000000000000000\n"
PEERMEM = "nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\n" + MODULES
SYMBOLS = "0000000000000000 T ib_umem_dmabuf_get\t[ib_uverbs]\n"

GPU = GpuState(
    index=0,
    name="NVIDIA H200",
    bus="0000:1b:00.0",
    memory_mib=143771,
    temperature_c=40,
    sm_mhz=1980,
    max_sm_mhz=1980,
    link_width=16,
    max_link_width=16,
    throttle=1,
    ecc=True,
    uncorrected=0,
    corrected=3,
    remap_pending=False,
    remap_failed=False,
)
NEAR, FAR = ("pci0000:16", "0000:16:01.0", "0000:17:00.0"), ("pci0000:97", "0000:97:01.0", "0000:98:00.0")
PORTS = [
    AdapterPort(name="mlx5_0", port=1, path=(*NEAR, "0000:1a:00.0"), numa=0, active=True, gb_s=50.0),
    AdapterPort(name="mlx5_3", port=1, path=(*FAR, "0000:9c:00.0"), numa=1, active=True, gb_s=50.0),
]
TOPOLOGY = NodeTopology(
    cpus={0: "0-47", 1: "48-95"},
    gpu_paths={"0000:1b:00.0": (*NEAR, "0000:1b:00.0")},
    gpu_numa={"0000:1b:00.0": 0},
    ports=PORTS,
)
GOOD = NodeFacts(gpus=[GPU], xids=[], topology=TOPOLOGY, gpudirect="peermem", locked="")


@pytest.fixture(scope="module")
def node() -> NodeConfig:
    profile = load_cluster("h200-28").value
    assert isinstance(profile, SlurmCluster)
    return profile.partitions["gpu"].node


def judged(facts: NodeFacts, node: NodeConfig, **rates: float) -> list[FindingRow]:
    return list(fact_findings(facts, node, FilesystemConfig(**rates)))


def test_a_good_node_gives_no_finding(node: NodeConfig) -> None:
    assert judged(GOOD, node) == []


@pytest.mark.parametrize(
    ("change", "code", "severity", "words"),
    [
        ({"uncorrected": 2}, "gpu-ecc", Severity.ERROR, "2 uncorrected errors"),
        ({"ecc": False}, "gpu-ecc-off", Severity.WARNING, "ECC off"),
        ({"remap_failed": True, "remap_pending": True}, "gpu-rows", Severity.ERROR, "no spare row"),
        ({"remap_pending": True}, "gpu-rows", Severity.WARNING, "waits for a reset"),
        ({"throttle": 0x40, "sm_mhz": 1200}, "gpu-throttled", Severity.WARNING, "at 1200 of 1980 MHz, 40 degrees"),
        ({"link_width": 8}, "gpu-pcie", Severity.WARNING, "8 of 16 lanes"),
        ({"memory_mib": 81559}, "gpu-memory", Severity.WARNING, "79.6 GiB, and the profile says 140.4"),
        ({"needs_reset": True}, "gpu-reset", Severity.ERROR, "needs a reset"),
    ],
)
def test_a_gpu_in_trouble(
    change: dict[str, object], code: str, severity: Severity, words: str, node: NodeConfig
) -> None:
    (row,) = judged(replace(GOOD, gpus=[replace(GPU, **change)]), node)
    assert (row.code, row.severity) == (code, severity)
    assert words in row.what
    assert "GPU 0 (0000:1b:00.0)" in row.what
    assert row.hint


@pytest.mark.parametrize(
    ("change", "code", "severity", "words"),
    [
        ({"xids": [GpuXid(bus="0000:1b:00", number=94, text="Contained")]}, "gpu-xid", Severity.WARNING, "XID 94"),
        ({"gpudirect": "none"}, "no-gpudirect", Severity.WARNING, "GPUDirect"),
        ({"locked": "mlock of 256 MiB: Cannot allocate memory"}, "pinned-memory", Severity.ERROR, "mlock of 256 MiB"),
        ({"unknown": ["ECC (nvidia-smi has no values)"]}, "facts-unknown", Severity.NOTE, "unknown there: ECC"),
    ],
)
def test_a_node_in_trouble(
    change: dict[str, object], code: str, severity: Severity, words: str, node: NodeConfig
) -> None:
    (row,) = judged(replace(GOOD, **change), node)
    assert (row.code, row.severity) == (code, severity)
    assert words in row.what


def test_errors_that_programs_make_are_no_finding(node: NodeConfig) -> None:
    assert judged(replace(GOOD, xids=[GpuXid(bus="0000:1b:00", number=31, text="MMU Fault")]), node) == []


def test_adapters_against_the_profile(node: NodeConfig) -> None:
    def with_port(**change: object) -> list[tuple[str, Severity]]:
        ports = [replace(PORTS[0], **change), PORTS[1]]
        rows = judged(replace(GOOD, topology=replace(TOPOLOGY, ports=ports)), node)
        return [(row.code, row.severity) for row in rows]

    assert with_port(active=False) == [("nic-down", Severity.ERROR)]
    assert with_port(gb_s=25.0) == [("nic-slow", Severity.WARNING)]
    assert with_port(active=None, gb_s=None) == []
    # the profile says that mlx5_0 is the nearest of GPU 0
    swapped = [replace(PORTS[0], path=PORTS[1].path), replace(PORTS[1], path=PORTS[0].path)]
    (row,) = judged(replace(GOOD, topology=replace(TOPOLOGY, ports=swapped)), node)
    assert (row.code, row.severity) == ("nic-far", Severity.WARNING)
    assert row.what == "mlx5_0 is not the nearest adapter of GPU 0: mlx5_3 is"


def test_rates_of_the_filesystem_against_the_profile(node: NodeConfig) -> None:
    facts = replace(GOOD, disk=DiskRates(write_gb_s=0.5, read_gb_s=3.0))
    assert judged(facts, node) == []
    assert judged(facts, node, node_write_gb_s=1.0, node_read_gb_s=10.0) == []
    (row,) = judged(facts, node, node_write_gb_s=10.0, node_read_gb_s=10.0)[:1]
    assert (row.code, row.severity, row.key) == ("filesystem-slow", Severity.NOTE, "filesystem.node_write_gb_s")
    assert judged(replace(GOOD, disk=DiskRates()), node, node_write_gb_s=10.0) == []


def test_what_people_see() -> None:
    writer = replace(GOOD, disk=DiskRates(write_gb_s=1.5, small_write_s=0.002))
    lines = facts_summary([replace(GOOD, disk=DiskRates(read_gb_s=3.25)), writer])
    assert lines == [
        "NUMA node 0: CPUs 0-47; GPUs 0; adapters mlx5_0",
        "NUMA node 1: CPUs 48-95; adapters mlx5_3",
        "the shared filesystem writes 1.50 GB/s, reads 3.25 GB/s, makes a small file durable in 2.0 ms (one stream)",
    ]
    assert facts_summary([NodeFacts()]) == []


@pytest.mark.parametrize(
    ("modules", "driver", "symbols", "kernel", "way"),
    [
        (PEERMEM, CLOSED, "", "5.4.0-80-generic", "peermem"),
        (MODULES, OPEN, SYMBOLS, "5.15.0-1040-nvidia", "dmabuf"),
        (MODULES, OPEN, SYMBOLS, "5.4.0-80-generic", "none"),
        (MODULES, CLOSED, SYMBOLS, "6.8.0", "none"),
        (MODULES, OPEN, "0000000000000000 T kfree\n", "6.8.0", "none"),
        (MODULES, OPEN, "", "6.8.0", None),
        ("", OPEN, SYMBOLS, "6.8.0", None),
        (MODULES, "", SYMBOLS, "6.8.0", None),
        (MODULES, OPEN, SYMBOLS, "unknown", None),
    ],
)
def test_how_adapters_reach_gpus(modules: str, driver: str, symbols: str, kernel: str, way: str | None) -> None:
    assert gpudirect_way(modules=modules, driver=driver, symbols=symbols, kernel=kernel) == way


def test_a_node_without_a_driver_is_asked_nothing_of_gpus(tmp_path: Path) -> None:
    facts = read_facts(has_driver=False, root=tmp_path)
    assert (facts.gpus, facts.xids, facts.gpudirect, facts.unknown) == ([], None, None, [])


def test_what_cannot_be_read_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "_run", lambda command: None)
    facts = read_facts(has_driver=True, root=tmp_path)
    assert (facts.gpus, facts.xids, facts.gpudirect) == ([], None, None)
    assert [text.split(" (")[0] for text in facts.unknown] == [
        "clocks, ECC and PCIe of GPUs",
        "errors of GPUs in the kernel's log",
        "GPUDirect",
    ]


def test_values_that_a_driver_has_not_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str]) -> str | None:
        if command[0] == "dmesg" or command[1] == "--list-gpus":
            return ""
        return "0, NVIDIA H200, 00000000:1B:00.0, 570.158.01, 143771, 33, 345, 1980\n" if "name" in command[1] else None

    monkeypatch.setattr(node_facts, "_run", run)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for name, text in (("modules", PEERMEM), ("kallsyms", ""), ("driver/nvidia/version", CLOSED)):
        (tmp_path / "proc" / name).write_text(text)
    facts = read_facts(has_driver=True, root=tmp_path)
    assert (facts.xids, facts.gpudirect, facts.gpus[0].uncorrected) == ([], "peermem", None)
    (unknown,) = facts.unknown
    assert unknown.startswith("ECC, reasons of clocks, width of PCIe, replaced rows of memory of GPUs")


def test_memory_is_locked_within_the_limit() -> None:
    assert lock_memory(1 << 16) == ""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # root may lock more than its limit
    if soft != resource.RLIM_INFINITY and "CapEff:\t0000000000000000" in Path("/proc/self/status").read_text():
        assert "mlock of" in lock_memory(hard + (1 << 20))


def test_a_file_is_written_and_read_back(tmp_path: Path) -> None:
    rates = write_rates(tmp_path / "bulk", size=1 << 20)
    assert (tmp_path / "bulk").stat().st_size == 1 << 20
    assert rates.write_gb_s is not None
    assert rates.small_write_s is not None
    assert 0 < rates.write_gb_s < 1000
    read = read_back(tmp_path / "bulk")
    assert read is not None
    assert 0 < read < 1000
    (tmp_path / "empty").touch()
    assert read_back(tmp_path / "empty") is None


def test_nothing_is_written_where_there_is_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "_LEAST_FREE", 1 << 60)
    assert write_rates(tmp_path / "bulk", size=1 << 20) == DiskRates()
    assert list(tmp_path.iterdir()) == []
