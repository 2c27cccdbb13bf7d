"""Programs in Triton for logits: a row is read once for what is known of its distribution, and once for the gradient.

The pass over a row keeps a running maximum, the sum of exponentials and the sum of these times logits (the online
softmax of https://arxiv.org/abs/1805.02867, extended by the entropy). Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise_rows(
    logits, targets, logprobs, entropies, normalisers, columns, stride, temperature, BLOCK: tl.constexpr
):
    """Compute the target's log-probability, the entropy and the log of the sum of exponentials of one row.

    The row is one of ``logits [rows, columns]`` divided by ``temperature``; results are float32.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    place = tl.arange(0, BLOCK)
    # as tensors of one element: a loop keeps the types of what it changes
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + place < columns
        piece = tl.load(begin + first + place, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        highest = tl.maximum(largest, tl.max(piece, 0))
        # of a row whose logits are all -inf so far
        rescale = tl.where(largest == highest, 1.0, tl.exp(largest - highest))
        exponentials = tl.where(inside, tl.exp(piece - highest), 0.0)
        total = total * rescale + tl.sum(exponentials, 0)
        # what has no probability has no part in the mean, also where it is -inf
        weighted = weighted * rescale + tl.sum(tl.where(exponentials == 0.0, 0.0, exponentials * piece), 0)
        largest = highest
    target = tl.load(targets + row)
    own = tl.load(begin + target).to(tl.float32) / temperature
    normaliser = largest + tl.log(total)
    one = tl.arange(0, 1)
    tl.store(logprobs + row + one, own - normaliser)
    tl.store(entropies + row + one, normaliser - weighted / total)
    tl.store(normalisers + row + one, normaliser)


@triton.jit
def put_gradient_rows(logits, targets, normalisers, slopes, columns, stride, temperature, BLOCK: tl.constexpr):
    """Replace one block of a row of ``logits`` by the gradient of a loss, rounded to their dtype.

    ``slopes [rows]`` float32 is the gradient of the loss with respect to the log-probability of each target.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    at = logits + row * stride + place
    piece = tl.load(at, mask=inside, other=0.0).to(tl.float32) / temperature
    scale = tl.load(slopes + row) / temperature
    gradient = tl.exp(piece - tl.load(normalisers + row)) * -scale
    gradient += tl.where(place == tl.load(targets + row), scale, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)
