"""Attention with gradients, by the kernel for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.kernels.fused import FusedKernel
from hpcrl.modeling.kernels.kernel import QKV, Attended, Kernel, Segments
from hpcrl.modeling.kernels.plain import PlainKernel

_AMPERE, _HOPPER = (8, 0), (9, 0)


def kernel_for(inputs: QKV) -> Kernel:
    """Return the fastest kernel that supports these inputs."""
    q, _, v = inputs
    if q.device.type == "cpu":
        return FusedKernel()
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        # importing it takes time and asks for a build with CUDA
        from hpcrl.modeling.kernels.varlen import VarlenKernel  # noqa: PLC0415

        fits = max(q.shape[2], v.shape[2]) <= VarlenKernel.widest
        if fits and torch.cuda.get_device_capability(q.device) >= _AMPERE:
            return VarlenKernel()
    return PlainKernel()


def use_flash_attention_3(device: torch.device, dtype: torch.dtype) -> None:
    """Let torch's FlashAttention be that of the package ``flash_attn_3`` in this process (torch 2.11 and later).

    Raises
    ------
    UsageError
        It is not installed, or is not for this device or dtype.
    """
    problem = ""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        problem = f"is for GPUs of NVIDIA's Hopper, and this trainer computes on another device ({device.type})"
    elif dtype not in (torch.bfloat16, torch.float16):
        problem = f"computes in half precision, and trainer.dtype is {str(dtype).removeprefix('torch.')}"
    else:
        try:
            # importing it takes time
            from torch.nn.attention import activate_flash_attention_impl  # noqa: PLC0415

            activate_flash_attention_impl("FA3")
        except Exception as error:  # noqa: BLE001 - raised below
            # its import looks for compilers and drivers, and may raise any type
            reason = f"{type(error).__name__}: {error}"
            problem = f"needs the package flash_attn_3 where the trainer runs, which does not load: {reason}"
    if problem:
        raise UsageError(
            f"trainer.kernels.attention: flash_attention_3 {problem}\n    hint: leave trainer.kernels.attention out"
        )


def attend(
    inputs: QKV,
    segments: Segments,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Compute attention of queries over the keys of their segments.

    Parameters
    ----------
    inputs:
        Queries, keys and values.
    segments:
        Segments of keys that each query sees.
    scale:
        Factor of the scores; None for ``key_dim ** -0.5``.
    sinks:
        ``[heads]``: a score without a value that takes part in the softmax of each head (gpt-oss); None: there is none.
    kernel:
        Kernel to use; None: that of `kernel_for`.

    Returns
    -------
    Tensor
        ``[Q, heads, value_dim]``.
    """
    scale = inputs.q.shape[2] ** -0.5 if scale is None else scale
    how = _How(segments, scale, kernel or kernel_for(inputs))
    out: Tensor = _Attention.apply(how, sinks, *inputs)  # type: ignore[no-untyped-call]
    return out


def merge(so_far: Attended, more: Attended) -> Attended:
    """Combine two attention results for the same queries, at least float32, into a softmax over the keys of both."""
    lse = torch.logaddexp(so_far.lse, more.lse)
    shares = [(part.lse - lse).exp()[..., None] for part in (so_far, more)]
    return Attended(so_far.out * shares[0] + more.out * shares[1], lse)


def add_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Return the attention of a softmax that has ``sinks [heads]`` in addition to the keys."""
    out, lse = attended
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    return Attended(out * (lse - with_sinks).exp()[..., None].to(out.dtype), with_sinks)


def sink_gradients(grad: Tensor, attended: Attended, sinks: Tensor) -> Tensor:
    """Return gradients of ``sinks [heads]``: a score without a value takes weight from all others."""
    out, lse = attended
    weights = (sinks.to(lse.dtype) - lse).exp()
    return -(weights * (grad.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)


class _How(NamedTuple):
    segments: Segments
    scale: float
    kernel: Kernel


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, sinks: Tensor | None, *inputs: Tensor) -> Tensor:
        attended = how.kernel.forward(QKV(*inputs), how.segments, how.scale)
        if sinks is not None:
            attended = add_sinks(attended, sinks)
        ctx.save_for_backward(sinks, *inputs, *attended)
        ctx.how = how
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sinks, q, k, v, out, lse = ctx.saved_tensors
        how, attended, (grad,) = ctx.how, Attended(out, lse), gradients
        found = how.kernel.backward(grad, QKV(q, k, v), attended, how.segments, how.scale)
        return None, None if sinks is None else sink_gradients(grad, attended, sinks), *found
