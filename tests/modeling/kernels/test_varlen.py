"""Attention by torch's FlashAttention: the adapter over functions of its contract here, the kernel itself on a GPU."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from varlen_stand_in import varlen_attn_of_2_11, varlen_attn_of_2_13, varlen_backward

from hpcrl.modeling.kernels import varlen
from hpcrl.modeling.kernels.attend import attend
from hpcrl.modeling.kernels.kernel import QKV, Segments
from hpcrl.modeling.kernels.plain import PlainKernel
from hpcrl.modeling.kernels.varlen import VarlenKernel

#: heads of queries and of keys, channels of keys and of values: as Qwen3, as multi-head latent attention, odd ones
SHAPES = {
    "equal": (4, 4, 16, 16),
    "grouped": (6, 2, 32, 32),
    "one key head": (4, 1, 16, 16),
    "192 and 128 channels": (4, 4, 192, 128),
    "values of 5 channels": (6, 3, 12, 5),
}
#: an empty segment among others, one token, and one sequence
STARTS = ((0, 7, 7, 30), (0, 1, 45), (0, 64))
#: keys of another rank: segments without queries or without keys
APART = (((0, 3, 3, 9), (0, 4, 9, 9)),)


def segments() -> list[Segments]:
    causal = [Segments(starts, starts, causal=True, window=window) for starts in STARTS for window in (None, 1, 4)]
    return causal + [Segments(*starts, causal=False) for starts in APART]


def results(inputs: list[Tensor], grad: Tensor, own: Segments, by: Any) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(QKV(*leaves), own, scale=0.2, kernel=by)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(device: torch.device, shape: str, tolerance: float) -> None:
    """In bfloat16 beside plain attention of the same numbers in float64."""
    heads, key_heads, key_dim, value_dim = SHAPES[shape]
    draw = torch.Generator().manual_seed(0)
    for own in segments():
        queries, keys = own.queries[-1], own.keys[-1]
        sizes = [(queries, heads, key_dim), (keys, key_heads, key_dim), (keys, key_heads, value_dim)]
        drawn = [torch.randn(size, generator=draw).bfloat16() for size in sizes]
        grad = torch.randn(queries, heads, value_dim, generator=draw).bfloat16()
        found = results([x.to(device) for x in drawn], grad.to(device), own, VarlenKernel())
        wanted = results([x.double() for x in drawn], grad.double(), own, PlainKernel())
        assert len(found) == len(wanted) == 4
        for name, each, other in zip(("out", "q", "k", "v"), found, wanted, strict=True):
            assert each.dtype == torch.bfloat16
            # a query that sees itself alone has no gradient
            distance = float((each.cpu().double() - other).norm() / other.norm().clamp(1.0))
            assert distance < tolerance, (name, own, distance)


@pytest.fixture(params=[varlen_attn_of_2_11, varlen_attn_of_2_13], ids=["2.11", "2.13"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A release of torch, by what its function takes."""
    monkeypatch.setattr(varlen, "varlen_attn", request.param)

    def backward(*inputs: Any) -> Any:
        # what was not taken forward is not counted on backward
        assert request.param is varlen_attn_of_2_13 or inputs[1].shape[1] == inputs[2].shape[1]
        return varlen_backward(*inputs)

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    varlen._knows_groups.cache_clear()
    yield request.param
    varlen._knows_groups.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("release")
def test_attention_is_that_of_plain_torch_with_each_release(shape: str) -> None:
    check(torch.device("cpu"), shape, 0.01)


def test_a_release_that_knows_groups_gets_keys_as_they_are(
    release: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []

    def spy(*inputs: Any, **options: Any) -> Any:
        heads.append((inputs[1].shape[1], options.get("enable_gqa", False)))
        return release(*inputs, **options)

    # first asked, and then called
    assert varlen._knows_groups() == (release is varlen_attn_of_2_13)
    monkeypatch.setattr(varlen, "varlen_attn", spy)
    own = Segments((0, 5), (0, 5), causal=True)
    for key_heads in (2, 6):
        q, k = torch.randn(5, 6, 16).bfloat16(), torch.randn(5, key_heads, 16).bfloat16()
        VarlenKernel().forward(QKV(q, k, k), own, 0.2)
    assert heads == ([(2, True), (6, False)] if release is varlen_attn_of_2_13 else [(6, False), (6, False)])


def shape_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_stand_in_has_the_signature_of_the_torch_that_is_installed() -> None:
    stand_ins = {"2.11": varlen_attn_of_2_11, "2.13": varlen_attn_of_2_13}
    if (own := stand_ins.get(".".join(torch.__version__.split(".")[:2]))) is not None:
        assert shape_of(own) == shape_of(varlen_attn)
    # what is given by position, and what by name, is there in each release
    given = [name for name, *_ in shape_of(varlen_attn)]
    assert given[:7] == [name for name, *_ in shape_of(varlen_attn_of_2_11)][:7]
    assert {"return_aux", "scale", "window_size"} <= set(given)
    backward = torch.ops.torch_attn._varlen_attn_backward.default._schema
    assert [each.name for each in backward.arguments] == list(inspect.signature(varlen_backward).parameters)


def test_the_lowest_torch_is_one_that_is_in_the_table_of_signatures() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in ("trainer", "engine"):
        (bound,) = (each for each in project["optional-dependencies"][extra] if each.startswith("torch"))
        assert re.fullmatch(r"torch>=2\.11", bound)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_gpu_is_that_of_plain_torch(shape: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check(torch.device("cuda"), shape, 0.02)
