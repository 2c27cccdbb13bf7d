"""Dense attention by FlashAttention as torch has it, for packed sequences on GPUs in half precision."""

from __future__ import annotations

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from hpcrl.modeling.kernels.kernel import QKV, Attended, Segments
from hpcrl.modeling.memory.transfer import kept_for_layers, to_device

_STEP = 8
"""FlashAttention requires heads whose width is a multiple of this."""


class VarlenKernel:
    """See `hpcrl.modeling.kernels.kernel.Kernel`.

    The backward pass adds in the order of arrival, unless torch is set to be deterministic
    (``torch.use_deterministic_algorithms``).
    """

    name = "varlen"
    widest = 256
    """Maximum channels of a head."""

    def forward(self, inputs: QKV, segments: Segments, scale: float) -> Attended:
        """See `Kernel`."""
        width = inputs.v.shape[2]
        q, k, v = _widen(*inputs)
        options: dict[str, Any] = {}
        if (share := q.shape[1] // k.shape[1]) > 1:
            if _knows_groups():
                options["enable_gqa"] = True
            else:
                k, v = _for_each_head(k, share), _for_each_head(v, share)
        out, lse = varlen_attn(
            q,
            k,
            v,
            *_starts(segments, q),
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=_window(segments),
            **options,
        )
        # [heads, Q]; FlashAttention returns plus infinity for a query without keys
        lse = lse.transpose(0, 1).masked_fill(lse.transpose(0, 1) == float("inf"), float("-inf"))
        return Attended(out[..., :width].contiguous(), lse)

    def backward(self, grad: Tensor, inputs: QKV, attended: Attended, segments: Segments, scale: float) -> QKV:
        """See `Kernel`."""
        widths, lse = [x.shape[2] for x in inputs], attended.lse
        q, k, v, out, grad = _widen(*inputs, attended.out, grad)
        window = _window(segments)
        key_heads, share = k.shape[1], q.shape[1] // k.shape[1]
        apart = share > 1 and not _knows_groups()
        if apart:
            k, v = _for_each_head(k, share), _for_each_head(v, share)
        found = torch.ops.torch_attn._varlen_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.transpose(0, 1).contiguous(),
            *_starts(segments, q),
            window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            scale,
            list(window),
        )
        if apart:
            of_q, *of_keys = found
            found = of_q, *(torch.unflatten(x, 1, (key_heads, share)).sum(2) for x in of_keys)
        return QKV(*(x[..., :n] for x, n in zip(found, widths, strict=True)))


@cache
def _knows_groups() -> bool:
    """Return whether torch's function takes fewer heads of keys than of queries: from torch 2.12 on."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _for_each_head(x: Tensor, share: int) -> Tensor:
    """Repeat ``[K, key_heads, dim]`` for each query head of a key head; repeats are neighbours."""
    return x.repeat_interleave(share, 1)


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad tensors with zeros to the width that the kernel requires; zeros do not change the result."""
    width = -(-max(x.shape[2] for x in tensors) // _STEP) * _STEP
    return tuple(F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in tensors)


def _starts(segments: Segments, q: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return the starts of queries and of keys on the device, and the longest segment of each."""
    (of_queries, longest_q), (of_keys, longest_k) = (
        _on_device(starts, q.device) for starts in (segments.queries, segments.keys)
    )
    return of_queries, of_keys, longest_q, longest_k


# a ring has other segments for the keys of each rank
@kept_for_layers(64)
def _on_device(starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    (found,) = to_device([torch.tensor(starts, dtype=torch.int32)], device)
    return found, max(end - begin for begin, end in pairwise(starts))


def _window(segments: Segments) -> tuple[int, int]:
    """Return the numbers of keys before and after a query that it sees, without its own; -1: all."""
    if not segments.causal:
        return -1, -1
    return (-1 if segments.window is None else segments.window - 1), 0
