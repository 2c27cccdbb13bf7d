"""What a GPU computes, against the reference: the project's own tests, and products at the sizes of GLM-5."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch
from harness import ROOT
from torch import Tensor

from gpu_checks.check import Check, Row, Session, seconds_of
from hpcrl.modeling.fp8.backends import Backend, Reference
from hpcrl.modeling.fp8.find_fp8 import find_backend
from hpcrl.modeling.fp8.fused_quantiser import find_quantiser
from hpcrl.modeling.fp8.products import grouped_product, linear_product
from hpcrl.modeling.fp8.quantiser import PLAIN
from hpcrl.modeling.memory.host_memory import pinned_bytes

TOLERANCE = 0.01
"""Of the norm of a difference by the norm of what is right: results are bfloat16."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "deep_gemm", "liger-kernel", "cut-cross-entropy")


def machine(session: Session) -> Iterator[Row]:
    """The card, its driver, and versions of packages."""
    device = session.device
    on_gpu = device.type == "cuda"
    yield {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / (1 << 30) if on_gpu else 0,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
    }
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    yield {"packages": found}


def ceilings(session: Session) -> Iterator[Row]:
    """A large copy on the device, and large products: what other figures are shares of."""
    device = session.device
    size = (1 << 22) if session.tiny else (4 << 30)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds_of(partial(target.copy_, source), device)
    yield {"what": "copy on the device", "gb_s": 2 * size / copied / 1e9}
    n = 256 if session.tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield {"what": f"bfloat16 product {n}", "tflops": 2 * n**3 / seconds_of(lambda: a @ b, device, 10) / 1e12}
    if device.type == "cuda":
        one = torch.ones((), device=device)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        product = seconds_of(
            lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), device, 10
        )
        yield {"what": f"FP8 product {n}, one scale", "tflops": 2 * n**3 / product / 1e12}


def tests(session: Session) -> Iterator[Row]:
    """The tests that are marked ``gpu``; a skip is a failure here."""
    report = session.scratch / "tests.xml"
    folders = ["tests/modeling", "tests/trainer"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["--continue-on-collection-errors"]
    if not session.tiny:
        command += ["-n", "4"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([*command, *folders], cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if not report.is_file():
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    passed = 0
    on_gpu = torch.cuda.is_available()
    for case in ET.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            passed += 1
            continue
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        # of a traceback the last lines say what happened
        message = (problem.get("message") or "").splitlines() or [""]
        if problem.tag == "skipped" and not on_gpu:
            continue
        yield {"failed": f"{name}: {problem.tag}: {message[0]}"[:400], "trace": (problem.text or "")[-2500:]}
    yield {"passed": passed}


def quantiser(session: Session) -> Iterator[Row]:
    """Bits of the quantiser of one pass, against plain torch."""
    device = session.device
    kind = find_quantiser(device)
    draw = torch.Generator(device).manual_seed(0)
    sizes = ((64, 300), (3, 130, 260)) if session.tiny else ((32_768, 6_144), (32, 4_096, 6_144))
    for size in sizes:
        x = torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)
        for turned, each in (("as it is", x), ("transposed", x.mT)):
            for name, own, plain in zip(kind._fields, kind, PLAIN, strict=True):
                found, wanted = own(each), plain(each)
                scales = int((found.scales != wanted.scales).sum())
                codes = int((found.values.view(torch.uint8) != wanted.values.view(torch.uint8)).sum())
                row = {"size": "x".join(map(str, size)), "way": turned, "what": name}
                yield row | {"other_scales": scales, "other_codes": codes} | _wrong(scales or codes, "other bits")
                del found, wanted


def products(session: Session) -> Iterator[Row]:
    """Products in FP8 and their gradients at the sizes of GLM-5, against the reference on the same numbers."""
    device = session.device
    dtype = torch.float32 if session.tiny else torch.bfloat16
    draw = torch.Generator(device).manual_seed(0)
    rows, out, inside, experts = (64, 48, 160, 3) if session.tiny else (32_768, 4_096, 6_144, 32)
    names = ("reference",) if device.type == "cpu" else ("torch", "deep_gemm")

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=device, dtype=dtype)

    def results(run: Callable[..., Tensor], backend: Backend, x: Tensor, weight: Tensor, *more: Any) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = run(x, weight, *more, backend)
        # of other numbers in each row and column
        y.backward(y.detach().roll(1, 0))
        assert x.grad is not None
        assert weight.grad is not None
        return [y.detach(), x.grad, weight.grad]

    def compare(what: str, run: Callable[..., Tensor], *inputs: Tensor) -> Iterator[Row]:
        wanted = results(run, Reference(), *inputs)
        for name in names:
            try:
                found = results(run, find_backend(name, device), *inputs)
            except Exception as error:  # noqa: BLE001 - the other backend is looked at all the same
                yield {"what": what, "backend": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            errors = [
                float((own.float() - other.float()).norm() / other.float().norm())
                for own, other in zip(found, wanted, strict=True)
            ]
            kinds = ("product", "grad_input", "grad_weight")
            row = {"what": what, "backend": name} | dict(zip(kinds, errors, strict=True))
            yield row | _wrong(not max(errors) < TOLERANCE, "differs from the reference")

    yield from compare("linear", linear_product, normal(rows, inside), normal(out, inside))
    # as uneven as routers are, an expert without any, and one of one row
    total = rows if session.tiny else rows * 8
    share = torch.rand(experts, generator=draw, device=device) ** 2
    counts = (share / share.sum() * (total - 1)).long()
    counts[0], counts[1] = 0, 1
    counts[2] += total - int(counts.sum())

    def grouped(x: Tensor, weight: Tensor, counts: Tensor, backend: Backend) -> Tensor:
        return grouped_product(x, weight, counts, backend)

    yield from compare("grouped", grouped, normal(total, inside), normal(experts, out, inside), counts)


def pinned(session: Session) -> Iterator[Row]:
    """What pinned memory takes of the host for what is asked: torch's own, and ours."""
    if session.device.type != "cuda":
        yield {"not_here": "is for GPUs"}
        return
    device, sizes = session.device, [(37 + 11 * i) * 1_000_003 for i in range(10)]
    makes: dict[str, Callable[[int], Tensor]] = {
        "torch": lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "hpcrl": lambda size: pinned_bytes(size, device),
    }
    for name, make in makes.items():
        before, begun = psutil.virtual_memory().available, time.perf_counter()
        held = [make(size) for size in sizes]
        for each in held:
            each.fill_(7)
        seconds = time.perf_counter() - begun
        # others on the machine take and give some as well
        taken = before - psutil.virtual_memory().available
        row = {"who": name, "asked_mb": sum(sizes) / 1e6, "taken_mb": taken / 1e6, "seconds": seconds}
        there = torch.empty_like(held[-1], device=device)
        there.copy_(held[-1], non_blocking=True)
        torch.cuda.synchronize(device)
        yield row | _wrong(not all(each.is_pinned() for each in held) or int(there.min()) != 7, "not pinned, or wrong")
        del held, there


def _wrong(is_wrong: Any, what: str) -> Row:
    return {"failed": what} if is_wrong else {}


CORRECTNESS = (
    Check("correctness.machine", machine, 60),
    Check("correctness.ceilings", ceilings, 60),
    Check("correctness.tests", tests, 240),
    Check("correctness.quantiser", quantiser, 60),
    Check("correctness.products", products, 120),
    Check("correctness.pinned", pinned, 30),
)
