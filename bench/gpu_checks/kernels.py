"""The cases of `kernels.py` in the time of a session, and blocks of programs that are chosen by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_cases import KINDS
from kernel_cases.attention import GLM5, TINY, drawn, some_earlier
from kernels import measure

from gpu_checks.check import Check, Row, Session, seconds_of
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.by_triton import HOPPER, SMALL, TritonKernel
from hpcrl.modeling.sparse_kernels.find import find_sparse_kernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen

_MOST_OF_REFERENCE = 8_192
"""Tokens that the reference of sparse attention is asked for."""


def cases(session: Session, kind: str) -> Iterator[Row]:
    """Every candidate of a kind."""
    device = session.device
    for case in KINDS[kind](device, session.tiny):
        for name in case.candidates:
            row = {"kind": case.kind, **case.sizes}
            if session.late:
                yield row | {"candidate": name, "left_out": "no time"}
            elif name != "reference" or case.sizes.get("tokens", 0) <= _MOST_OF_REFERENCE:
                yield row | measure(case, name, device, repeats=2)


def blocks(session: Session) -> Iterator[Row]:
    """Sparse attention with 32 and with 64 heads in a program."""
    device = session.device
    if device.type != "cuda":
        yield {"not_here": "its programs are for GPUs"}
        return
    shape, tokens = (TINY, 64) if session.tiny else (GLM5, 16_384)
    normal = drawn(device, torch.bfloat16)
    kernel = find_sparse_kernel("triton", device, GLM5)
    assert isinstance(kernel, TritonKernel)
    q, rows = normal(tokens, shape.heads, shape.dim), normal(tokens, shape.dim)
    grad = normal(tokens, shape.heads, shape.value_dim)
    chosen = some_earlier(tokens, shape.width, device)
    inputs = Chosen(q, rows, chosen, shape.value_dim, shape.dim**-0.5)
    pairs = 2.0 * int((chosen >= 0).sum()) * shape.heads
    for name, sizes in (("32 heads", SMALL), ("64 heads", HOPPER)):
        kernel._blocks = sizes
        forward = seconds_of(lambda: kernel.forward(inputs), device)
        attended = Attended(*kernel.forward(inputs))
        backward = seconds_of(lambda: kernel.backward(grad, inputs, attended), device, 3)  # noqa: B023 - called at once
        yield {
            "blocks": name,
            "tokens": tokens,
            "forward_ms": forward * 1e3,
            "forward_tflops": pairs * (shape.dim + shape.value_dim) / forward / 1e12,
            "backward_ms": backward * 1e3,
            "backward_tflops": pairs * (3 * shape.dim + 2 * shape.value_dim) / backward / 1e12,
        }


KERNELS = (
    Check("kernels.blocks", blocks, 90),
    *(Check(f"kernels.{kind}", partial(cases, kind=kind), 120) for kind in ("fp8", "sparse", "index", "dense", "head")),
)
