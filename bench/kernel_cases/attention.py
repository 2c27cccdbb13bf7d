"""Sparse attention at GLM-5's sizes, its indexer with the choice, and dense attention at Qwen3-30B-A3B's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.attention.sparse import attend_chosen, choose_tokens
from hpcrl.modeling.kernels.attend import attend, use_flash_attention_3
from hpcrl.modeling.kernels.kernel import QKV, Kernel, Segments
from hpcrl.modeling.kernels.plain import PlainKernel
from hpcrl.modeling.sparse_kernels.find import find_sparse_kernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape
from kernel_cases.case import Case, Make

NAMES = ("reference", "triton", "flash_mla", "flash_mla_cudnn")
GLM5 = SparseShape(64, 576, 512, 2048, 32, 128, torch.bfloat16)
TINY = SparseShape(4, 24, 16, 32, 2, 16, torch.float32)
TOKENS = (8_192, 32_768, 131_072)
DENSE_TOKENS = (8_192, 32_768, 131_072)
MOST_OF_PLAIN = 8_192
"""Tokens that plain dense attention is asked for: it makes all scores, a chunk at a time."""


def drawn(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Makes tensors of normal numbers."""
    draw = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(size, generator=draw, device=device, dtype=dtype)


def some_earlier(tokens: int, width: int, device: torch.device) -> Tensor:
    """For each token ``width`` earlier ones at most, ``[tokens, width]`` int32: one at random of each equal part."""
    draw = torch.Generator(device).manual_seed(1)
    place = torch.arange(width, device=device)
    chosen = torch.empty(tokens, width, dtype=torch.int32, device=device)
    for begin in range(0, tokens, 4096):
        seen = torch.arange(begin, min(begin + 4096, tokens), device=device)[:, None] + 1
        part = seen / width
        random = ((place + torch.rand(len(seen), width, generator=draw, device=device)) * part).long()
        found = torch.where(seen <= width, place.expand(len(seen), -1), random.clamp(max=seen - 1))
        chosen[begin : begin + len(seen)] = found.masked_fill(found >= seen, -1).int()
    return chosen


def sparse(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Forward, and forward with backward."""
    shape = TINY if tiny else GLM5
    for tokens in (64,) if tiny else TOKENS:
        normal = drawn(device, shape.dtype)
        q, rows = normal(tokens, shape.heads, shape.dim), normal(tokens, shape.dim)
        grad = normal(tokens, shape.heads, shape.value_dim)
        chosen = some_earlier(tokens, shape.width, device)
        pairs = int((chosen >= 0).sum())
        products = {"forward": shape.dim + shape.value_dim, "both": 4 * shape.dim + 3 * shape.value_dim}

        def make(name: str, backward: bool, parts: Any = (q, rows, chosen, grad)) -> Callable[[], Any]:
            own_q, own_rows, own_chosen, own_grad = parts
            kernel = find_sparse_kernel(name, device, shape)

            def run() -> None:
                inputs = Chosen(
                    own_q.detach().requires_grad_(backward),
                    own_rows.detach().requires_grad_(backward),
                    *(own_chosen, shape.value_dim, shape.dim**-0.5),
                )
                out = attend_chosen(inputs, kernel)
                if backward:
                    out.backward(own_grad)

            return run

        for what, each in products.items():
            candidates: dict[str, Make] = {name: partial(make, name, what == "both") for name in NAMES}
            sizes = {"tokens": tokens, "heads": shape.heads, "chosen": shape.width}
            yield Case(f"sparse {what}", sizes, 2.0 * pairs * shape.heads * each, candidates)


def index(device: torch.device, tiny: bool) -> Iterator[Case]:
    """The indexer's scores and the choice of 4,096 queries at the end of a sequence."""
    shape = TINY if tiny else GLM5
    for tokens in (64,) if tiny else TOKENS:
        normal, queries = drawn(device, shape.dtype), min(tokens, 4096)
        q, k = normal(queries, shape.index_heads, shape.index_dim), normal(tokens, shape.index_dim)
        weights = normal(queries, shape.index_heads).float()
        visible = torch.arange(tokens - queries, tokens, device=device) + 1

        def make(name: str, *, choose: bool, parts: Any = (q, k, weights, visible)) -> Callable[[], Any]:
            kernel, (own_q, own_k, own_weights, seen) = find_sparse_kernel(name, device, shape), parts
            if choose:
                return lambda: choose_tokens(own_q, own_k, own_weights, seen, shape.width, kernel=kernel)
            step = kernel.rows_at_once(shape.index_heads, len(own_k))
            starts = range(0, len(own_q), step)

            def scores(part: slice) -> Tensor:
                return kernel.index_scores(own_q[part], own_k, own_weights[part], seen[part])

            return lambda: [scores(slice(i, i + step)) for i in starts]

        flops = 2.0 * queries * tokens * shape.index_heads * shape.index_dim
        for what in ("scores", "choice"):
            candidates: dict[str, Make] = {name: partial(make, name, choose=what == "choice") for name in NAMES[:2]}
            yield Case(f"index {what}", {"tokens": tokens, "queries": queries}, flops, candidates)


def dense(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Causal attention of one sequence, forward and backward: 32 heads on 4 of 128 channels."""
    heads, key_heads, dim = (4, 2, 16) if tiny else (32, 4, 128)
    dtype = torch.float32 if tiny else torch.bfloat16
    for tokens in (64,) if tiny else DENSE_TOKENS:
        normal = drawn(device, dtype)
        tensors = [normal(tokens, n, dim).requires_grad_() for n in (heads, key_heads, key_heads)]
        segments, grad = Segments((0, tokens), (0, tokens), causal=True), normal(tokens, heads, dim)

        def make(kernel: Kernel | None, before: Any = None, parts: Any = (tensors, segments, grad)) -> Any:
            if before is not None:
                before(device, dtype)
            inputs, own_segments, own_grad = parts
            return lambda: attend(QKV(*inputs), own_segments, kernel=kernel).backward(own_grad)

        candidates: dict[str, Make] = {"auto": partial(make, None)}
        if tokens <= MOST_OF_PLAIN:
            candidates["plain"] = partial(make, PlainKernel())
        # it stays in use in this process: behind all others of its size, and sizes begin anew with what torch has
        candidates["flash_attention_3"] = partial(make, None, use_flash_attention_3)
        yield Case("dense both", {"tokens": tokens, "heads": heads}, 3.5 * 2 * tokens**2 * heads * dim, candidates)
        if device.type == "cuda":
            torch.nn.attention.restore_flash_attention_impl()
