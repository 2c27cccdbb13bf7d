"""Products on GPUs, with the processor in place of each: those that crash, hang, fail or differ are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpcrl.sites.gpu_products import SCRIPT, GpuProduct, gpu_findings, multiply_on_gpus
from hpcrl.sites.profile_check import Severity

GOOD = GpuProduct(device=3, name="NVIDIA H200", float32=1e-7, bfloat16=2e-3, tflops=700.0)


def broken(tmp_path: Path, code: str) -> Path:
    """A script whose second device does something else."""
    path = tmp_path / "script.py"
    before = "        say(path, device=index, begun=True)\n"
    changed = SCRIPT.read_text().replace(before, f"{before}        if index == 1:\n            {code}\n")
    assert code in changed
    path.write_text(changed)
    return path


def test_the_processor_gives_its_own_products() -> None:
    products = multiply_on_gpus(sys.executable, 2, kind="cpu")
    assert [product.device for product in products] == [0, 1]
    assert list(gpu_findings(products, tflops=989.0)) == []
    for product in products:
        assert product.float32 is not None
        assert product.bfloat16 is not None
        assert 0 < product.float32 < 1e-5
        assert 1e-4 < product.bfloat16 < 1e-2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.abort()", "SIGABRT"),
        ("torch.randn = lambda *given, **others: 1 / 0", "ZeroDivisionError"),
        ("sys.exit('fell off the bus')", "fell off the bus"),
    ],
    ids=["crash", "error", "exit"],
)
def test_the_others_are_tried_all_the_same(code: str, words: str, tmp_path: Path) -> None:
    first, second, third = multiply_on_gpus(sys.executable, 3, kind="cpu", script=broken(tmp_path, code))
    assert (first.device, first.problem, second.device) == (0, "", 1)
    assert words in second.problem
    if "Zero" not in words:  # that one breaks the process for all that come after
        assert (third.device, third.problem) == (2, "")
    (found,) = gpu_findings([second], tflops=None)
    assert (found.code, found.severity) == ("gpu-fails", Severity.ERROR)
    assert "GPU 1" in found.what
    assert words in found.what


@pytest.mark.slow
def test_a_gpu_that_hangs_is_passed_over(tmp_path: Path) -> None:
    products = multiply_on_gpus(
        sys.executable, 2, kind="cpu", script=broken(tmp_path, "time.sleep(3600)"), limit_s=40.0
    )
    assert (products[0].problem, products[1].device) == ("", 1)
    assert "it takes longer than 40 s" in products[1].problem


def test_without_torch_each_says_why(tmp_path: Path) -> None:
    products = multiply_on_gpus(sys.executable, 2, environ={"PYTHONHOME": str(tmp_path)}, kind="cpu")
    assert [product.device for product in products] == [0, 1]
    assert all(product.problem for product in products)


@pytest.mark.parametrize(
    ("change", "code", "severity", "words"),
    [
        ({"float32": 1e-3}, "gpu-wrong", Severity.ERROR, "float32"),
        ({"bfloat16": None}, "gpu-wrong", Severity.ERROR, "it is not a number"),
        ({"problem": "CUDA error: uncorrectable ECC error"}, "gpu-fails", Severity.ERROR, "ECC"),
        ({"tflops": 200.0}, "gpu-slow", Severity.WARNING, "200 TFLOP/s"),
    ],
)
def test_what_is_wrong_has_a_code(change: dict[str, object], code: str, severity: Severity, words: str) -> None:
    (found,) = gpu_findings([replace(GOOD, **change)], tflops=989.0)
    assert (found.code, found.severity) == (code, severity)
    assert words in found.what
    assert "GPU 3 (NVIDIA H200)" in found.what


def test_a_good_gpu_is_not_a_finding_and_speed_needs_a_figure() -> None:
    assert list(gpu_findings([GOOD], tflops=989.0)) == []
    assert list(gpu_findings([replace(GOOD, tflops=1.0)], tflops=None)) == []
