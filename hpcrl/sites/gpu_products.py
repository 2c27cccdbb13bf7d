"""One small product on each GPU of a node, compared with the processor: whether GPUs compute at all, and right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.sites.foreign_script import one_line, run_script
from hpcrl.sites.library_findings import FindingRow
from hpcrl.sites.profile_check import Severity
from hpcrl.storage.msgspec_types import prepared

SCRIPT = Path(__file__).with_name("product_script.py")
_LIMIT_S = 120.0
"""Longest time of a process that tries GPUs, the import of torch included."""
_BUDGET_S, _LEAST_S = 240.0, 10.0
_NO_TIME = "no time was left to test it"
_SIZE, _SPEED_SIZE, _LOOPS = 512, 4096, 20
_PINNED = 256 << 20
_FLOAT32, _BFLOAT16 = 1e-5, 1e-2
"""Largest difference by the norm. Sums of 512 products in float32 differ by some 1e-6; bfloat16 rounds to 2^-9."""
_SLOW = 0.4
"""Share of the profile's TFLOP/s below which a GPU is slow: small products reach some 0.7 of a data sheet."""
_SLOW_COPY = 0.5


class GpuProduct(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one GPU.

    Attributes
    ----------
    device:
        Its number in torch.
    name:
        Its name in the driver; empty where unknown.
    problem:
        Reason why there is not a product: an error, a crash, a hang. Empty where there is one.
    float32, bfloat16:
        Difference from the processor by the norm. None: no number (NaN or infinite).
    tflops:
        Measured speed in bfloat16; 0 where it was not measured.
    pinned_problem:
        Reason why memory of the host cannot be pinned and copied; empty where it can, or was not tried.
    to_gpu_gb_s, to_host_gb_s:
        Rates of copies of pinned memory; 0 where they were not measured.
    """

    device: int
    name: str = ""
    problem: str = ""
    float32: float | None = None
    bfloat16: float | None = None
    tflops: float = 0.0
    pinned_problem: str = ""
    to_gpu_gb_s: float = 0.0
    to_host_gb_s: float = 0.0


class _Answered(msgspec.Struct, frozen=True):
    device: int
    begun: bool = False
    done: bool = False
    name: str = ""
    error: str = ""
    float32: float | None = None
    bfloat16: float | None = None
    tflops: float = 0.0
    pinned_error: str = ""
    to_gpu_gb_s: float = 0.0
    to_host_gb_s: float = 0.0


def multiply_on_gpus(
    python: str,
    gpus: int,
    *,
    environ: Mapping[str, str] | None = None,
    kind: str = "cuda",
    limit_s: float = _LIMIT_S,
    budget_s: float = _BUDGET_S,
    script: Path = SCRIPT,
) -> list[GpuProduct]:
    """Try GPUs 0 to ``gpus - 1`` with the torch of an interpreter; return one answer for each.

    A process tries them one after the other. A GPU that does not answer is left out, and the next process continues
    after it.

    Parameters
    ----------
    kind:
        ``cuda``, or ``cpu``: the processor in place of each GPU.
    limit_s, budget_s:
        Longest time of one process, and of all.
    """
    found: dict[int, GpuProduct] = {}
    deadline = time.monotonic() + budget_s
    while left := [index for index in range(gpus) if index not in found]:
        left_s = min(limit_s, deadline - time.monotonic())
        if left_s < min(_LEAST_S, limit_s):
            break
        question = {
            "kind": kind,
            "devices": left,
            "size": _SIZE,
            "speed_size": _SPEED_SIZE,
            "loops": _LOOPS,
            "pinned_bytes": _PINNED,
            "hang_s": left_s * 0.9,
        }
        end = run_script(python, script, question, limit_s=left_s, environ=environ)
        try:
            answers = msgspec.convert(end.answers, type=prepared(list[_Answered]))
        except msgspec.ValidationError as error:
            problem = f"its answer cannot be read: {error}"
            return [found.get(index) or GpuProduct(device=index, problem=problem) for index in range(gpus)]
        begun = [answer.device for answer in answers if answer.begun]
        found |= {answer.device: _product(answer) for answer in answers if answer.done}
        stuck = [index for index in begun if index not in found]
        problem = one_line(end.problem) or "its process ended earlier"
        if stuck:
            found[stuck[0]] = GpuProduct(device=stuck[0], problem=problem)
        elif not begun:
            # torch itself does not load: the result would be the same on every GPU
            return [found.get(index) or GpuProduct(device=index, problem=problem) for index in range(gpus)]
    return [found.get(i) or GpuProduct(device=i, problem=_NO_TIME) for i in range(gpus)]


def _product(answer: _Answered) -> GpuProduct:
    return GpuProduct(
        device=answer.device,
        name=answer.name,
        problem=one_line(answer.error),
        float32=answer.float32,
        bfloat16=answer.bfloat16,
        tflops=answer.tflops,
        pinned_problem=one_line(answer.pinned_error),
        to_gpu_gb_s=answer.to_gpu_gb_s,
        to_host_gb_s=answer.to_host_gb_s,
    )


def gpu_findings(
    products: Sequence[GpuProduct], *, tflops: float | None, pcie_gb_s: float | None = None
) -> Iterator[FindingRow]:
    """Judge the products of a node.

    Parameters
    ----------
    tflops:
        The profile's rate in bfloat16, where it has one.
    pcie_gb_s:
        The profile's rate between host and GPU, where it has one.
    """
    for product in products:
        name = f"GPU {product.device}" + (f" ({product.name})" if product.name else "")
        if product.problem == _NO_TIME:
            what = f"{name} was not tested: other tests took all the time"
            yield FindingRow(
                "gpu-open", Severity.WARNING, "", what, "fix the other findings about GPUs, and check again"
            )
            continue
        if product.problem:
            what = f"{name} cannot multiply matrices: {product.problem}"
            way = "drain the node; `nvidia-smi -q -i` and `dmesg | grep -i xid` there say more"
            yield FindingRow("gpu-fails", Severity.ERROR, "", what, way)
            continue
        for dtype, error, most in (
            ("float32", product.float32, _FLOAT32),
            ("bfloat16", product.bfloat16, _BFLOAT16),
        ):
            if error is None or error > most:
                shown = "it is not a number" if error is None else f"by {error:.1e} of the norm, {most:g} are allowed"
                what = f"{name} computes wrong products in {dtype}: they differ from the processor's, {shown}"
                way = "drain the node and have the GPU replaced: its results cannot be trusted"
                yield FindingRow("gpu-wrong", Severity.ERROR, "", what, way)
        if tflops and 0 < product.tflops < _SLOW * tflops:
            what = f"{name} makes {product.tflops:.0f} TFLOP/s in bfloat16, and the profile says {tflops:g}"
            way = "`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER` there says what slows it; or correct gpu.tflops"
            yield FindingRow("gpu-slow", Severity.WARNING, "", what, way)
        if product.pinned_problem:
            what = f"{name} does not reach pinned memory of the host: {product.pinned_problem}"
            way = "set LimitMEMLOCK=infinity for slurmd, and look at the memory that the job may take"
            yield FindingRow("pinned-memory", Severity.ERROR, "", what, way)
        slowest = min(product.to_gpu_gb_s, product.to_host_gb_s)
        if pcie_gb_s and 0 < slowest < _SLOW_COPY * pcie_gb_s:
            what = f"{name} copies {slowest:.1f} GB/s from or to the host, and the profile says {pcie_gb_s:g}"
            way = "`nvidia-smi -q -d PCIE` there says generation and lanes of the link; or correct gpu.pcie_gb_s"
            yield FindingRow("pcie-slow", Severity.WARNING, "", what, way)
