"""Facts about GPUs from data sheets, for drafts of profiles: a person corrects them, and measurements replace them."""

from __future__ import annotations

import re
from typing import NamedTuple


class GpuModel(NamedTuple):
    """Numbers of a data sheet, in the units of `hpcrl.config.cluster_slurm.GpuConfig`; rates are dense.

    Attributes
    ----------
    name:
        As the vendor calls it.
    nvlink_gb_s, pcie_gb_s:
        Each way: half of what data sheets print. None: the GPU lacks the link.
    """

    name: str
    memory_gib: float
    memory_gb_s: float
    float32: float
    bfloat16: float
    fp8: float | None
    nvlink_gb_s: float | None
    pcie_gb_s: float


_MODELS: tuple[tuple[str, GpuModel], ...] = (
    (r"gb300|b300", GpuModel("NVIDIA B300 SXM", 268.0, 8000, 75, 2250, 4500, 900, 64)),
    (r"gb200", GpuModel("NVIDIA GB200", 185.0, 8000, 80, 2500, 5000, 900, 64)),
    (r"b200", GpuModel("NVIDIA B200 SXM", 179.0, 8000, 75, 2250, 4500, 900, 64)),
    (r"gh200", GpuModel("NVIDIA GH200 (96 GB)", 95.6, 4000, 67, 989, 1979, 450, 64)),
    (r"h200.*nvl", GpuModel("NVIDIA H200 NVL", 140.4, 4800, 60, 835, 1671, 450, 64)),
    (r"h200", GpuModel("NVIDIA H200 SXM", 140.4, 4800, 67, 989, 1979, 450, 64)),
    (r"h20(?!0)", GpuModel("NVIDIA H20", 95.6, 4000, 44, 148, 296, 450, 64)),
    (r"h100.*nvl", GpuModel("NVIDIA H100 NVL", 93.6, 3900, 60, 835, 1671, 300, 64)),
    (r"h100.*pcie", GpuModel("NVIDIA H100 PCIe", 79.6, 2000, 51, 756, 1513, None, 64)),
    (r"h800", GpuModel("NVIDIA H800 SXM", 79.6, 3350, 67, 989, 1979, 200, 64)),
    (r"h100", GpuModel("NVIDIA H100 SXM", 79.6, 3350, 67, 989, 1979, 450, 64)),
    (r"a100.*40|40.*a100", GpuModel("NVIDIA A100 40 GB SXM", 39.6, 1555, 19.5, 312, None, 300, 32)),
    (r"a100.*pcie", GpuModel("NVIDIA A100 80 GB PCIe", 79.3, 1935, 19.5, 312, None, None, 32)),
    (r"a800", GpuModel("NVIDIA A800 80 GB SXM", 79.3, 2039, 19.5, 312, None, 200, 32)),
    (r"a100", GpuModel("NVIDIA A100 80 GB SXM", 79.3, 2039, 19.5, 312, None, 300, 32)),
    (r"l40s", GpuModel("NVIDIA L40S", 44.6, 864, 91.6, 362, 733, None, 32)),
)
"""The first whose pattern is in the type counts: names of variants come before those of the family."""


def gpu_model(gpu_type: str | None) -> GpuModel | None:
    """Return the numbers of a GPU by Slurm's type of it (``h200``, ``nvidia_h100_80gb_hbm3``); None where unknown."""
    word = (gpu_type or "").lower()
    return next((model for pattern, model in _MODELS if re.search(rf"(?<![a-z0-9])(?:{pattern})", word)), None)
