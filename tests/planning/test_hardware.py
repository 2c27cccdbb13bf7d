"""Numbers of a profile: in bytes and seconds where they are, named where they are not."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import GpuConfig
from hpcrl.config.load import load_cluster
from hpcrl.config.plan import Role
from hpcrl.errors import ConfigError
from hpcrl.planning.hardware import filesystem_rate, node_hardware


def _site(name: str) -> SlurmCluster:
    site = load_cluster(name).value
    assert isinstance(site, SlurmCluster)
    return site


def test_h200() -> None:
    site = _site("h200-28")
    node = node_hardware(site, Role.DECODE)
    # 143771 MiB of nvidia-smi, to a tenth of a GiB
    assert node.gpu_bytes / (143771 << 20) == pytest.approx(1, abs=1e-3)
    assert node.nic_rate == 8 * 50e9
    assert node.gpu_flops("fp8") == 1979e12
    assert node.nvlink_rate == 450e9
    assert node.pcie_rate == 64e9
    assert node.gpu_memory_rate == 4800e9
    assert node.host_memory_rate == 614e9
    assert filesystem_rate(site, "node_read_gb_s") == 20e9
    assert node_hardware(site, Role.ORCHESTRATOR).partition == "gpu"


@pytest.mark.parametrize(
    ("number", "key"),
    [
        ("gpu_bytes", "gpu.memory_gib"),
        ("gpu_memory_rate", "gpu.memory_gb_s"),
        ("nvlink_rate", "gpu.nvlink_gb_s"),
        ("pcie_rate", "gpu.pcie_gb_s"),
        ("nic_rate", "nics.0.gb_s"),
        ("host_memory_rate", "memory_gb_s"),
    ],
)
def test_a_missing_number_is_named(number: str, key: str) -> None:
    node = node_hardware(_site("roce-h100"), Role.TRAINER)
    with pytest.raises(ConfigError) as caught:
        getattr(node, number)
    finding = caught.value.findings[0]
    assert finding.key == f"cluster.partitions.train.node.{key}"
    assert "not in the profile" in finding.what
    assert key in finding.hint


def test_missing_rates_of_tables() -> None:
    site = _site("roce-h100")
    with pytest.raises(ConfigError, match=r"gpu\.tflops\.fp8"):
        node_hardware(site, Role.TRAINER).gpu_flops("fp8")
    with pytest.raises(ConfigError, match=r"cluster\.filesystem\.read_gb_s"):
        filesystem_rate(site, "read_gb_s")


@pytest.mark.parametrize("rate", [0.0, 1e-300, 1e300, float("nan")])
def test_rates_that_no_hardware_has_are_refused(rate: float) -> None:
    """Times computed with them would be no numbers."""
    with pytest.raises(ValidationError):
        GpuConfig(memory_gb_s=rate)
    with pytest.raises(ValidationError):
        GpuConfig(tflops={"bfloat16": rate})
