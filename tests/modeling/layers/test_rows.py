"""Rows on their way to experts and back: values and gradients as of plain indexing, with and without rows."""

import pytest
import torch

from hpcrl.modeling.layers.dispatch import LocalDispatcher
from hpcrl.modeling.layers.rows import RowOrder, copy_rows, inverse, mix_rows, permute_rows

TOKENS, K, WIDTH = 7, 3, 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def shuffled(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


#: places in the order of rows: all of them; without tokens 0, 3 and 6, and one of token 1; none; of no token
PLACES = {
    "all": (shuffled(TOKENS * K), TOKENS),
    "some": (torch.tensor([8, 4, 12, 17, 6, 13, 3, 15, 7, 14, 16]), TOKENS),
    "none": (torch.tensor([], dtype=torch.int64), TOKENS),
    "no tokens": (torch.tensor([], dtype=torch.int64), 0),
}
ORDERS = pytest.mark.parametrize("case", PLACES)


def order_of(case):
    places, tokens = PLACES[case]
    return RowOrder.of(places, tokens, K)


def inputs_of(case, dtype):
    """Of tokens, of rows, and weights, in which what no row has is not a number."""
    places, tokens = PLACES[case]
    generator = torch.Generator().manual_seed(1)
    x, y, weights = (
        torch.randn(shape, generator=generator) for shape in ((tokens, WIDTH), (len(places), WIDTH), (tokens, K))
    )
    there = torch.zeros(tokens * K, dtype=torch.bool).index_fill(0, places, value=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = weights.masked_fill(~there.view(tokens, K), float("nan")).to(wide)
    return [tensor.requires_grad_() for tensor in (x.to(dtype), y.to(dtype), weights)]


def plain_mix(y, weights, case):
    """As autograd would have it, in float64."""
    places, tokens = PLACES[case]
    shares = weights.flatten()[places].to(y.dtype).double()
    mixed = torch.zeros(tokens, WIDTH, dtype=torch.float64)
    return mixed.index_add(0, places // K, y.double() * shares[:, None])


@ORDERS
def test_gradients_are_those_of_differences(case):
    order, (x, y, _) = order_of(case), inputs_of(case, torch.float64)
    weights = torch.rand(PLACES[case][1], K, dtype=torch.float64, requires_grad=True)
    permutation = shuffled(len(y), 2)
    assert torch.autograd.gradcheck(lambda x: copy_rows(x, order), (x,))
    assert torch.autograd.gradcheck(lambda y, weights: mix_rows(y, order, weights), (y, weights))
    assert torch.autograd.gradcheck(lambda y: permute_rows(y, permutation, inverse(permutation)), (y,))


@DTYPES
@ORDERS
def test_they_are_what_indexing_makes_of_them(case, dtype):
    """Each rounded once: in bfloat16 as near as a number of it can be."""
    order, (x, y, weights) = order_of(case), inputs_of(case, dtype)
    permutation = shuffled(len(y), 2)
    pairs = [
        (copy_rows(x, order), x.double()[order.places // K], (x,)),
        (mix_rows(y, order, weights), plain_mix(y, weights, case), (y, weights)),
        (permute_rows(y, permutation, inverse(permutation)), y.double()[permutation], (y,)),
    ]
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    for found, wanted, inputs in pairs:
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        gradients = [torch.autograd.grad(f, inputs, grad.to(f.dtype)) for f in (found, wanted)]
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, **tolerance)
        for own, other, leaf in zip(*gradients, inputs, strict=True):
            assert own.dtype == leaf.dtype
            torch.testing.assert_close(own, other, **tolerance)


@DTYPES
def test_sums_do_not_depend_on_the_order_of_rows(dtype):
    # a processor's dot product begins at a multiple of 64 bytes: rows of all models are such
    y = torch.randn(TOKENS * K, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights, results = torch.rand(TOKENS, K, requires_grad=True), []
    for seed in range(2):
        # the row of a place is the same, wherever it lies
        places = shuffled(TOKENS * K, seed)
        order = RowOrder.of(places, TOKENS, K)
        x = torch.ones(TOKENS, 32, dtype=dtype, requires_grad=True)
        mixed = mix_rows(y[places], order, weights)
        (of_x,) = torch.autograd.grad(copy_rows(x, order), x, y[places])
        results.append((mixed, of_x, *torch.autograd.grad(mixed.sum(), weights)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("own", [copy_rows, mix_rows])
def test_little_is_kept(own):
    """No copy of rows beside those that come in, and nothing outside of what can be kept elsewhere."""
    order, (x, y, weights) = order_of("all"), inputs_of("all", torch.bfloat16)
    floats = []

    def pack(tensor):
        floats.extend([tensor.data_ptr()] if tensor.is_floating_point() else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        own(x, order) if own is copy_rows else own(y, order, weights)
    assert floats == ([] if own is copy_rows else [y.data_ptr(), weights.data_ptr()])


@DTYPES
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_tokens_come_back_from_experts_that_are_all_here(tokens, dtype):
    """Of six experts the third gets none; what each expert makes is known."""
    allowed = torch.tensor([0, 1, 3, 4, 5])
    generator = torch.Generator().manual_seed(4)
    chosen = allowed[torch.rand(tokens, 5, generator=generator).argsort(1)[:, :2]]
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(tokens, 2, generator=generator, requires_grad=True)
    scale = torch.arange(1.0, 7.0)
    rows, counts, combine = LocalDispatcher(6).dispatch(x, weights, chosen)
    assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=6).tolist()
    y = combine(rows * scale.to(dtype).repeat_interleave(counts)[:, None])
    wanted = x.double() * (weights.to(dtype) * scale[chosen]).double().sum(1, keepdim=True)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    found, expected = (torch.autograd.grad(value.sum(), (x, weights)) for value in (y, wanted))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=10 * tolerance)
