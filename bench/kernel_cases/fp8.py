"""Products in block FP8 at the sizes of GLM-5 on the reference run, beside DeepGEMM alone; and the quantiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hpcrl.modeling.fp8.backends import Groups
from hpcrl.modeling.fp8.find_fp8 import find_backend
from hpcrl.modeling.fp8.fused_quantiser import find_quantiser
from hpcrl.modeling.fp8.products import grouped_product, linear_product
from hpcrl.modeling.fp8.quantiser import PLAIN, quantise_blocks, quantise_rows
from kernel_cases.attention import drawn
from kernel_cases.case import Case, Make, NotHere, library

#: outputs and inputs of GLM-5's linear layers: latents and queries, output of attention, a shared expert
LINEARS = ((2_048, 6_144), (16_384, 2_048), (6_144, 16_384), (4_096, 6_144), (6_144, 2_048))
#: of an expert: gate with up, and down
EXPERTS = ((4_096, 6_144), (6_144, 2_048))
#: 131,072 tokens on 4 ranks; 256 experts distributed over 8 ranks, each with as many tokens, and 8 a token
TOKENS, LOCAL_EXPERTS, PER_TOKEN = 32_768, 32, 8


def fp8(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Forward of DeepGEMM on what is quantised already, ours on the same, and ours with quantiser and gradients."""
    dtype = torch.float32 if tiny else torch.bfloat16
    name = "reference" if device.type == "cpu" else "deep_gemm"
    names = (name,) if device.type == "cpu" else ("deep_gemm", "torch")
    normal, tokens = drawn(device, dtype), 64 if tiny else TOKENS
    for out, inside in ((48, 160),) if tiny else LINEARS:
        x, weight = normal(tokens, inside), normal(out, inside)
        sizes, flops = {"rows": tokens, "out": out, "in": inside}, 2.0 * tokens * out * inside
        candidates: dict[str, Make] = {"alone": partial(alone, name, device, x, weight)}
        for each in names:
            candidates[f"{each}, quantised before"] = partial(quantised, each, device, x, weight)
        candidates["bfloat16" if not tiny else "float32"] = partial(plain, x, weight)
        yield Case("fp8 linear", sizes, flops, candidates)
        both: dict[str, Make] = {each: partial(linear, each, device, x, weight) for each in names}
        yield Case("fp8 linear both", sizes, 3 * flops, both)
        for what, matrix in (("rows", x), ("rows of the transposed", x.T), ("blocks", weight)):
            ways: dict[str, Make] = {
                each: partial(quantiser, each, device, what, matrix) for each in ("torch", "triton")
            }
            yield Case(f"fp8 quantise {what}", sizes, 0, ways)
    experts = 3 if tiny else LOCAL_EXPERTS
    for out, inside in ((48, 160),) if tiny else EXPERTS:
        rows = tokens if tiny else tokens * PER_TOKEN
        x, weight = normal(rows, inside), normal(experts, out, inside)
        counts = torch.full((experts,), rows // experts, device=device)
        counts[0] += rows - int(counts.sum())
        sizes, flops = {"rows": rows, "experts": experts, "out": out, "in": inside}, 2.0 * rows * out * inside
        yield Case("fp8 grouped", sizes, flops, {"alone": partial(alone_grouped, name, device, x, weight, counts)})
        both = {each: partial(grouped, each, device, x, weight, counts) for each in names}
        yield Case("fp8 grouped both", sizes, 3 * flops, both)


def quantiser(name: str, device: torch.device, what: str, matrix: Any) -> Callable[[], Any]:
    """Plain torch, or one pass by a program in Triton."""
    if name == "triton" and device.type != "cuda":
        raise NotHere("it is for GPUs")
    kind = PLAIN if name == "torch" else find_quantiser(device)
    run = kind.blocks if what == "blocks" else kind.rows
    return lambda: run(matrix)


def alone(name: str, device: torch.device, x: Any, weight: Any) -> Callable[[], Any]:
    """The library's own call, its output there before; on processors the reference's product."""
    backend, a, b = find_backend(name, device), quantise_rows(x), quantise_blocks(weight)
    if device.type == "cpu":
        return lambda: backend.multiply(a, b, x.dtype)
    product = x.new_empty(len(x), len(b.values))
    return lambda: library("deep_gemm").fp8_gemm_nt(tuple(a), tuple(b), product)


def quantised(name: str, device: torch.device, x: Any, weight: Any) -> Callable[[], Any]:
    backend, a, b = find_backend(name, device), quantise_rows(x), quantise_blocks(weight)
    return lambda: backend.multiply(a, b, x.dtype)


def plain(x: Any, weight: Any) -> Callable[[], Any]:
    return lambda: x @ weight.T


def alone_grouped(name: str, device: torch.device, x: Any, weight: Any, counts: Any) -> Callable[[], Any]:
    """Forward on rows that lie at multiples of 128 and are quantised already."""
    groups, backend = Groups.of(counts, len(x)), find_backend(name, device)
    a, b = quantise_rows(groups.spread(x)), quantise_blocks(weight)
    if device.type == "cpu":
        return lambda: backend.multiply_groups(a, b, groups, x.dtype)
    product = x.new_empty(len(a.values), b.values.shape[1])
    return lambda: library("deep_gemm").m_grouped_fp8_gemm_nt_contiguous(tuple(a), tuple(b), product, groups.experts)


def linear(name: str, device: torch.device, x: Any, weight: Any) -> Callable[[], Any]:
    backend = find_backend(name, device)
    x, weight, grad = x.detach().requires_grad_(), weight.detach().requires_grad_(), x.new_ones(len(x), len(weight))
    return lambda: linear_product(x, weight, backend).backward(grad)


def grouped(name: str, device: torch.device, x: Any, weight: Any, counts: Any) -> Callable[[], Any]:
    backend, grad = find_backend(name, device), x.new_ones(len(x), weight.shape[1])
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return lambda: grouped_product(x, weight, counts, backend).backward(grad)
