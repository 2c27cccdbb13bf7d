"""Programs in Triton for sparse attention: forward, backward, sums of rows, and the scores of an indexer.

Compiled with Triton 3.6 and 3.7. All tensors are contiguous; shapes stand in `hpcrl.modeling.sparse_kernels.by_triton`.
A channel of keys is one of ``VALUE`` that are values too, or one of ``REST`` (rotary) that are not; ``BLOCK_…`` are
powers of 2 that have room for them. ``WIDE``: elements of rows have places beyond 32 bits. No program writes what
another one writes: results are equal on every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(start, rows, channels, inside, CHANNELS: tl.constexpr, stride):
    """Load channels of some rows of ``start [.., stride]``; zeros for rows not inside and beyond ``CHANNELS``."""
    at = start + (rows * stride)[:, None] + channels[None, :]
    if channels.shape[0] == CHANNELS:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (channels < CHANNELS)[None, :], other=0.0)


@triton.jit
def attend_forward(
    q,
    rows,
    chosen,
    out,
    lse,
    scale,
    heads,
    width,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute some heads of one query over its chosen rows, by the online softmax."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    of_value, of_rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    dim: tl.constexpr = VALUE + REST
    # one base of 64 bits a program and offsets of 32 bits: pairs of registers for each row would not fit
    query = token * heads
    q_value = _tile(q + query * dim, head, of_value, there, VALUE, dim)
    q_rest = _tile(q + query * dim + VALUE, head, of_rest, there, REST, dim)
    highest = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for begin in range(0, width, BLOCK_K):
        place = begin + tl.arange(0, BLOCK_K)
        key = tl.load(chosen + token * width + place, mask=place < width, other=-1)
        seen = key >= 0
        key = key.to(tl.int64) if WIDE else key
        k_value = _tile(rows, key, of_value, seen, VALUE, dim)
        scores = tl.dot(q_value, tl.trans(k_value), input_precision=PRECISION)
        if REST > 0:
            k_rest = _tile(rows + VALUE, key, of_rest, seen, REST, dim)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * (scale * _LOG2_E), float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(weights, 1)
        sums = tl.dot(weights.to(k_value.dtype), k_value, sums * rescale[:, None], input_precision=PRECISION)
        highest = now
    # a query that sees nothing gets 0, and a normaliser of minus infinity
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    inside = there[:, None] & (of_value < VALUE)[None, :]
    at = (out + query * VALUE) + (head * VALUE)[:, None] + of_value[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + query + head, (highest + tl.log2(total)) / _LOG2_E, mask=there)


@triton.jit
def attend_queries(
    q,
    rows,
    chosen,
    grad,
    lse,
    inner,
    grad_q,
    weights_out,
    slopes_out,
    scale,
    heads,
    width,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of some heads of one query, and the weights and score gradients that `sum_rows` needs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    of_value, of_rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    dim: tl.constexpr = VALUE + REST
    # one base of 64 bits a program and offsets of 32 bits: pairs of registers for each row would not fit
    query = token * heads
    q_value = _tile(q + query * dim, head, of_value, there, VALUE, dim)
    q_rest = _tile(q + query * dim + VALUE, head, of_rest, there, REST, dim)
    grad_out = _tile(grad + query * VALUE, head, of_value, there, VALUE, VALUE)
    normaliser = tl.load(lse + query + head, mask=there, other=0.0)
    middle = tl.load(inner + query + head, mask=there, other=0.0)
    of_q_value = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    of_q_rest = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    for begin in range(0, width, BLOCK_K):
        place = begin + tl.arange(0, BLOCK_K)
        key = tl.load(chosen + token * width + place, mask=place < width, other=-1)
        seen = key >= 0
        key = key.to(tl.int64) if WIDE else key
        k_value = _tile(rows, key, of_value, seen, VALUE, dim)
        scores = tl.dot(q_value, tl.trans(k_value), input_precision=PRECISION)
        if REST > 0:
            k_rest = _tile(rows + VALUE, key, of_rest, seen, REST, dim)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        weights = tl.exp2((scores * scale - normaliser[:, None]) * _LOG2_E)
        weights = tl.where(seen[None, :], weights, 0.0)
        of_weights = tl.dot(grad_out, tl.trans(k_value), input_precision=PRECISION)
        exact = weights * (of_weights - middle[:, None]) * scale
        # there are always heads. As the result of a branch slopes go through shared memory to both products, where
        # they would else be kept in registers that are not there: 8 bytes a thread spill with it, 524 without
        if heads > 0:  # noqa: SIM108
            slopes = exact.to(k_value.dtype)
        else:
            slopes = weights.to(k_value.dtype)
        of_q_value = tl.dot(slopes, k_value, of_q_value, input_precision=PRECISION)
        if REST > 0:
            of_q_rest = tl.dot(slopes, k_rest, of_q_rest, input_precision=PRECISION)
        at = (head * width)[:, None] + place[None, :]
        inside = there[:, None] & (place < width)[None, :]
        tl.store(weights_out + query * width + at, weights.to(weights_out.dtype.element_ty), mask=inside)
        tl.store(slopes_out + query * width + at, slopes, mask=inside)
    to = (grad_q + query * dim) + (head * dim)[:, None]
    inside = there[:, None] & (of_value < VALUE)[None, :]
    tl.store(to + of_value[None, :], of_q_value.to(grad_q.dtype.element_ty), mask=inside)
    if REST > 0:
        inside = there[:, None] & (of_rest < REST)[None, :]
        tl.store(to + VALUE + of_rest[None, :], of_q_rest.to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(
    parts,
    order,
    ends,
    target,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add to some channels of one row of ``target`` those of ``parts`` that belong to it, in their order."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < DIM
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    if begin < end:
        at = target + row * DIM + channel
        total = tl.load(at, mask=inside, other=0.0)
        for first in range(begin, end, BLOCK_N):
            number = first + tl.arange(0, BLOCK_N)
            part = tl.load(order + number, mask=number < end, other=0)
            values = _tile(parts, part, channel, number < end, DIM, DIM)
            total += tl.sum(values.to(tl.float32), 0)
        tl.store(at, total, mask=inside)


@triton.jit
def index_scores(
    q,
    k,
    weights,
    visible,
    scores,
    tokens,
    keys,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PRODUCTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute scores of a range of keys for a range of queries: the sum over heads of ``weight · relu(q · k)``.

    One product has the heads of ``QUERIES`` queries. The keys stay where they are for ``PRODUCTS`` of them. Where no
    query of a product sees a key, nothing is computed.
    """
    begin = tl.program_id(1) * BLOCK_K
    key, channel = begin + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    row, own = tl.arange(0, QUERIES * BLOCK_H), tl.arange(0, QUERIES)
    head = row % BLOCK_H
    own_k = _tile(k, key.to(tl.int64), channel, key < keys, DIM, DIM)
    for product in range(PRODUCTS):
        first = (tl.program_id(0) * PRODUCTS + product) * QUERIES
        query = first + own
        seen = tl.load(visible + query, mask=query < tokens, other=0)
        total = tl.full((QUERIES, BLOCK_K), float("-inf"), tl.float32)
        if begin < tl.max(seen, 0):
            token = first + row // BLOCK_H
            there = (head < HEADS) & (token < tokens)
            place = token.to(tl.int64) * HEADS + head
            own_q = _tile(q, place, channel, there, DIM, DIM)
            weight = tl.load(weights + place, mask=there, other=0.0).to(tl.float32)
            each = tl.dot(own_q, tl.trans(own_k), input_precision=PRECISION)
            each = tl.maximum(each, 0.0) * weight[:, None]
            found = tl.sum(tl.reshape(each, (QUERIES, BLOCK_H, BLOCK_K)), 1)
            total = tl.where(key[None, :] < seen[:, None], found, total)
        at = scores + query.to(tl.int64)[:, None] * keys + key[None, :]
        tl.store(at, total, mask=(query < tokens)[:, None] & (key < keys)[None, :])
