"""Bytes that the backward pass of FlashAttention takes on a GPU, by torch's source. Pure arithmetic on shapes.

``mha_varlen_bwd`` in ``ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` adds up the gradient of the queries in
float32, and writes gradients of keys and values for each head of the queries where keys have fewer heads. Its 128
further rows for each sequence are not counted.
"""

from __future__ import annotations

WIDEST = 256
"""Maximum channels of a head; wider ones have another kernel."""
_STEP, _NARROW, _WIDE = 8, 32, 64
"""Multiples that heads are padded to: inputs, and accumulators up to 128 channels and above."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200. A deterministic pass has as many accumulators as there are for a head of a sequence."""


def head_width(key_dim: int, value_dim: int) -> int:
    """Return the channels of a head as the kernel takes it: keys and values are padded to the same width."""
    return _aligned(max(key_dim, value_dim), _STEP)


def accumulator_bytes(
    tokens: int, heads: int, key_heads: int, width: int, *, deterministic: bool = False, head_ranks: int = 1
) -> int:
    """Return the bytes of what the kernel adds up: of ``tokens`` and ``heads``, in half precision.

    ``head_ranks`` share the heads, and each has the tokens of all of them. A deterministic pass has several
    accumulators of queries where heads are few; counted is one sequence, which has most.
    """
    padded = _aligned(width, _NARROW if width <= 128 else _WIDE)
    copies = -(-_MULTIPROCESSORS // max(1, heads // head_ranks)) if deterministic else 1
    each_head = 4 * tokens * heads * width if key_heads != heads else 0
    return 4 * tokens * heads * (copies * padded + 1) + each_head


def backward_bytes(
    tokens: int,
    heads: int,
    key_heads: int,
    widths: tuple[int, int],
    *,
    deterministic: bool = False,
    head_ranks: int = 1,
) -> int:
    """Return the bytes of a backward pass: accumulators, gradients, and copies of what is padded.

    ``widths`` are the channels of keys and of values. Where they differ, values, output and its gradient are copied.
    """
    width = head_width(*widths)
    gradients = 2 * tokens * (heads + 2 * key_heads) * width
    copies = 2 * tokens * (key_heads + 2 * heads) * width if widths[0] != widths[1] else 0
    added = accumulator_bytes(tokens, heads, key_heads, width, deterministic=deterministic, head_ranks=head_ranks)
    return added + gradients + copies


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
