"""Norm, gate and rotation, whose gradients are written by hand: those of autograd, with less kept."""

import pytest
import torch
import torch.nn.functional as F

from hpcrl.modeling.layers.norm import RMSNorm, ZeroCentredRMSNorm
from hpcrl.modeling.layers.swiglu import swiglu
from hpcrl.modeling.rope import RotaryTables, apply_rotary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROWS, WIDTH, EPS = 60, 48, 1e-5


def plain_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def plain_gate(gate, up):
    return F.silu(gate) * up


def fused_gate(gate, up):
    return swiglu(torch.cat((gate, up), dim=-1))


def separate_gate(gate, up):
    # memory of these is written: inputs of a test are not
    return swiglu(gate.clone(), up.clone())


def norm(x, weight):
    return torch.func.functional_call(RMSNorm(WIDTH, EPS), {"weight": weight}, (x,))


def plain_zero_centred(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.float())).to(x.dtype)


def zero_centred(x, weight):
    return torch.func.functional_call(ZeroCentredRMSNorm(WIDTH, EPS), {"weight": weight}, (x,))


def rotation(interleaved, *, by_hand):
    """A rotation of half of the channels, whose backward pass is ours or autograd's."""
    angles = torch.rand(ROWS, 1, WIDTH // 4, generator=torch.Generator().manual_seed(1)) * 6
    angles = torch.cat((angles, angles), dim=-1)
    tables = RotaryTables(angles.cos(), angles.sin())

    def rotate(x):
        if by_hand:
            return apply_rotary(x, tables, interleaved=interleaved)
        width = WIDTH // 2
        first, second = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else x[..., :width].chunk(2, dim=-1)
        cos, sin = (table[..., : width // 2] for table in tables)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.cat((*(part.to(x.dtype) for part in turned), x[..., width:]), dim=-1)

    return rotate


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_no_copies_for_its_gradient(interleaved):
    """Autograd would keep a product of half of the channels for each of its operations."""
    kept = []
    (x,) = inputs_of((ROWS, 2, WIDTH), dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = rotation(interleaved, by_hand=True)(x.requires_grad_())
    assert y.requires_grad
    # cosines and sines of the pairs
    assert kept == [ROWS * WIDTH // 4] * 2


def computed(function, inputs, grad):
    """The result, and the gradient of each input."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    y.backward(grad)
    return [y.detach(), *(x.grad for x in inputs)]


def inputs_of(*shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@DTYPES
@pytest.mark.parametrize("own", [fused_gate, separate_gate])
def test_a_gate_is_what_autograd_makes_of_it(own, dtype):
    gate, up, grad = inputs_of(*[(ROWS, WIDTH)] * 3, dtype=dtype)
    for found, wanted in zip(computed(own, (gate, up), grad), computed(plain_gate, (gate, up), grad), strict=True):
        # the exponential of strided values is another kernel's
        torch.testing.assert_close(found, wanted)


@DTYPES
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS, 3, WIDTH)])
@pytest.mark.parametrize(("own", "plain"), [(norm, plain_norm), (zero_centred, plain_zero_centred)])
def test_a_norm_is_what_autograd_makes_of_it(own, plain, shape, dtype):
    x, weight, grad = inputs_of(shape, (WIDTH,), shape, dtype=dtype)
    found, wanted = computed(own, (x, weight), grad), computed(plain, (x, weight), grad)
    assert torch.equal(found[0], wanted[0])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for gradient, other in zip(found[1:], wanted[1:], strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(
            gradient.float(), other.float(), rtol=tolerance, atol=tolerance * other.abs().max().item()
        )


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_what_autograd_makes_of_it(interleaved, dtype):
    x, grad = inputs_of((ROWS, 3, WIDTH), (ROWS, 3, WIDTH), dtype=dtype)
    found, wanted = (computed(rotation(interleaved, by_hand=by_hand), (x,), grad) for by_hand in (True, False))
    assert torch.equal(found[0], wanted[0])
    # autograd rounds each of two addends to the dtype of the input
    torch.testing.assert_close(found[1], wanted[1], **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))


def test_a_part_of_a_wider_tensor_is_normed():
    """As latents of MLA are, which lie beside rotary keys."""
    wide, weight, grad = inputs_of((ROWS, WIDTH + 8), (WIDTH,), (ROWS, WIDTH), dtype=torch.float32)
    part = [lambda x, w, f=f: f(x[:, :WIDTH], w) for f in (norm, plain_norm)]
    for found, wanted in zip(*(computed(f, (wide, weight), grad) for f in part), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("own", "inputs", "kept"),
    [
        (norm, (ROWS * WIDTH, WIDTH), ROWS * WIDTH + WIDTH),
        (zero_centred, (ROWS * WIDTH, WIDTH), ROWS * WIDTH + WIDTH),
        (separate_gate, (ROWS * WIDTH, ROWS * WIDTH), 2 * ROWS * WIDTH),
        (fused_gate, (ROWS * WIDTH, ROWS * WIDTH), 2 * ROWS * WIDTH),
    ],
)
def test_inputs_alone_are_kept(own, inputs, kept):
    """Not the normed values, a copy in float32, or the activated gate."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    tensors = [torch.ones(n).view(-1, WIDTH) if n > WIDTH else torch.ones(n) for n in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        own(*(tensor.bfloat16().requires_grad_() for tensor in tensors))
    assert sum(sizes) == kept


def test_a_frozen_norm_has_no_gradient():
    x, weight = inputs_of((ROWS, WIDTH), (WIDTH,), dtype=torch.float32)
    norm(x.requires_grad_(), weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
