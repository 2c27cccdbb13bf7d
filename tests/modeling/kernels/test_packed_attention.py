"""Attention of packed sequences: every kernel beside a loop over queries, with windows, sinks and heads in groups."""

import itertools

import pytest
import torch

from hpcrl.modeling.kernels import fused, plain
from hpcrl.modeling.kernels.attend import attend
from hpcrl.modeling.kernels.fused import FusedKernel
from hpcrl.modeling.kernels.kernel import QKV, Segments
from hpcrl.modeling.kernels.plain import PlainKernel

KERNELS = {"plain": PlainKernel(), "fused": FusedKernel()}
#: starts of queries and of keys, causal or not
CAUSAL = ([0, 5], [0, 6, 12, 18], [0, 1, 8, 11, 11, 30], [0, 3, 12, 22, 33, 45])
OTHERS = (([0, 2, 7], [0, 4, 5]), ([0, 3, 3, 6], [0, 2, 9, 9]))
SHAPES = {"equal": (4, 4, 8, 8), "grouped": (6, 2, 8, 8), "narrow values": (4, 4, 12, 5), "one key head": (6, 1, 4, 7)}


def one_query_at_a_time(inputs, segments, scale, sinks):
    """Float64; a query without keys and sinks is 0."""
    rows, (q, k, v) = [], inputs
    share = q.shape[1] // k.shape[1]
    runs = zip(itertools.pairwise(segments.queries), itertools.pairwise(segments.keys), strict=True)
    for (begin, end), (first, last) in runs:
        for t in range(begin, end):
            low, high = first, last
            if segments.causal:
                low, high = first if segments.window is None else max(first, t + 1 - segments.window), t + 1
            for head in range(q.shape[1]):
                keys, values = (x[low:high, head // share] for x in (k, v))
                scores = keys @ q[t, head] * scale
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                weights = scores.softmax(0)[: high - low] if len(scores) else scores
                rows.append(weights @ values)
    return torch.stack(rows).view(*q.shape[:2], v.shape[2])


def check(kernel, segments, shape, *, with_sinks=False, dtype=torch.float64, tolerance=1e-9):
    heads, key_heads, key_dim, value_dim = SHAPES[shape]
    torch.manual_seed(0)
    queries, keys = segments.queries[-1], segments.keys[-1]
    sizes = [(queries, heads, key_dim), (keys, key_heads, key_dim), (keys, key_heads, value_dim)]
    inputs = [torch.randn(size, dtype=dtype).double().requires_grad_() for size in sizes]
    if with_sinks:
        inputs.append(torch.randn(heads, dtype=dtype).double().requires_grad_())
    sinks = inputs[3] if with_sinks else None
    expected = one_query_at_a_time(inputs[:3], segments, 0.3, sinks)
    weights = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, inputs, weights)]
    own = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = attend(QKV(*own[:3]), segments, scale=0.3, sinks=own[3] if with_sinks else None, kernel=KERNELS[kernel])
    found = [out, *torch.autograd.grad(out, own, weights.to(dtype))]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("starts", CAUSAL, ids=str)
def test_causal_attention_equals_a_loop_over_queries(kernel, shape, starts):
    for window in (None, 1, 4):
        for with_sinks in (False, True):
            segments = Segments(tuple(starts), tuple(starts), causal=True, window=window)
            check(kernel, segments, shape, with_sinks=with_sinks)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("starts", OTHERS, ids=str)
def test_attention_over_other_tokens_equals_a_loop(kernel, shape, starts):
    """As blocks of a ring have it; segments without queries or without keys among them."""
    check(kernel, Segments(*map(tuple, starts), causal=False), shape)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_dtypes(kernel, dtype, tolerance):
    for window in (None, 4):
        segments = Segments((0, 7, 9, 30), (0, 7, 9, 30), causal=True, window=window)
        check(kernel, segments, "grouped", with_sinks=True, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 6])
def test_how_queries_are_cut_changes_nothing(kernel, window, monkeypatch):
    segments = Segments((0, 40, 43, 75), (0, 40, 43, 75), causal=True, window=window)
    monkeypatch.setattr(plain, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(fused, "_WINDOW_STEP", 7)
    monkeypatch.setattr(fused, "_LONG", 20)
    fused._parts.cache_clear()
    check(kernel, segments, "grouped", with_sinks=True)
    fused._parts.cache_clear()


def test_padding_is_a_third_at_most_whatever_the_lengths():
    lengths = [100_000, *range(1, 1500, 7)]
    starts = (0, *itertools.accumulate(lengths))
    seen, padded = 0, 0
    for part in fused._parts(Segments(starts, starts, causal=True)):
        if isinstance(part.queries, fused._Row):
            seen += part.queries.tokens.stop - part.queries.tokens.start
        else:
            seen += len(part.queries.tokens)
            padded += part.queries.places.numel() - len(part.queries.tokens)
    assert seen == starts[-1]
    assert padded <= (seen - 100_000) / 3


@pytest.mark.parametrize(
    ("lengths", "together"),
    [
        ([16] * 128, [128]),  # 2,048 tokens keep the kernel busy
        ([16] * 129, [128, 1]),
        ([1000, 1000, 1000], [2, 1]),
        ([2047, 2047], [1, 1]),
        ([2048, 16, 16], [1, 2]),
        ([16, 12, 11], [2, 1]),  # padded by a third at most
        ([11, 16, 12, 16], [3, 1]),
    ],
)
def test_short_sequences_of_like_lengths_share_a_call(lengths, together, monkeypatch):
    starts = tuple(itertools.accumulate(lengths, initial=0))
    calls, forward = [], fused._forward

    def noted(qkv, part, scale):
        y, sums = forward(qkv, part, scale)
        calls.append(len(y))
        return y, sums

    monkeypatch.setattr(fused, "_forward", noted)
    q, k, v = (torch.randn(starts[-1], 1, 4) for _ in range(3))
    attend(QKV(q, k, v), Segments(starts, starts, causal=True), scale=0.5, sinks=None, kernel=KERNELS["fused"])
    assert sorted(calls, reverse=True) == sorted(together, reverse=True)
    assert sum(calls) == len(lengths)
