"""The quantiser gives the same bits on processors and on GPUs, whose quotients by a number of the host differ."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from cuda_arithmetic import DividesAsCuda
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hpcrl.modeling.fp8 import fused_quantiser
from hpcrl.modeling.fp8.fused_quantiser import find_quantiser, try_quantiser
from hpcrl.modeling.fp8.quantiser import (
    PLAIN,
    SCALE_OF_AMAX,
    Quantised,
    Quantiser,
    block_amax,
    quantise,
    quantise_blocks,
    quantise_rows,
    scales_of,
)

CPU = torch.device("cpu")


def magnitudes(number: int) -> Tensor:
    """Float32 of all sizes that largest magnitudes have."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(number, generator=draw) * torch.exp2(torch.randint(-60, 60, (number,), generator=draw))


def weights() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(3, 200, 300, generator=draw) * torch.exp2(torch.randint(-9, 9, (3, 200, 1), generator=draw))


def bits(made: Quantised) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in made]


def test_a_quotient_by_448_is_not_the_same_on_both_devices() -> None:
    """What the constant is for: on a GPU of NVIDIA more than half of such scales differ."""
    found = magnitudes(100_000)
    on_processor = found / 448.0
    with DividesAsCuda() as device:
        on_gpu = found / 448.0
    assert device.quotients == 1
    assert 0.5 < float((on_processor != on_gpu).float().mean()) < 0.65
    assert torch.equal(on_gpu, found * SCALE_OF_AMAX)
    torch.testing.assert_close(on_gpu, on_processor, rtol=2e-7, atol=0)


def test_the_constant_is_one_over_448_in_float32() -> None:
    assert struct.unpack("f", struct.pack("f", SCALE_OF_AMAX)) == (SCALE_OF_AMAX,)
    # half of the step between float32 numbers of this size
    assert abs(Fraction(SCALE_OF_AMAX) - Fraction(1, 448)) <= Fraction(2) ** (-9 - 23) / 2
    assert torch.finfo(torch.float8_e4m3fn).max == 448


@pytest.mark.parametrize("name", Quantiser._fields)
def test_no_bit_depends_on_how_a_device_divides(name: str) -> None:
    make = getattr(PLAIN, name)
    x = weights()
    on_processor = [bits(make(each)) for each in (x, x.mT, x.bfloat16())]
    with DividesAsCuda() as device:
        made = [make(each) for each in (x, x.mT, x.bfloat16())]
    assert [bits(each) for each in made] == on_processor
    assert device.quotients == 0


def test_versions_of_weights_do_not_depend_on_it_either() -> None:
    """The way of a hand-off: a part of a matrix that is cut between ranks."""
    part = weights()[0, 40:190]
    wanted = quantise(part, (40, 0), scales_of(block_amax(part, (40, 0))))
    with DividesAsCuda() as device:
        found = quantise(part, (40, 0), scales_of(block_amax(part, (40, 0))))
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert device.quotients == 0


def test_the_trial_passes_with_the_quotients_of_a_gpu() -> None:
    """A program computes as it is written, whatever torch does with quotients: here that is the plain quantiser
    outside of a GPU's arithmetic, and what it is compared with is inside."""

    def outside(make: Callable[[Tensor], Quantised]) -> Callable[[Tensor], Quantised]:
        def run(x: Tensor) -> Quantised:
            with _disable_current_modes():
                return make(x)

        return run

    with DividesAsCuda() as device:
        try_quantiser(Quantiser(*map(outside, PLAIN)), CPU)
    assert device.quotients == 0


def test_the_trial_finds_a_quantiser_that_divides() -> None:
    def divided(x: Tensor) -> Quantised:
        made = quantise_rows(x)
        return made._replace(scales=made.scales / SCALE_OF_AMAX / 448.0)

    with pytest.raises(LookupError, match="quantiser of rows gives other bits"):
        try_quantiser(Quantiser(divided, quantise_blocks), CPU)


@pytest.mark.parametrize("rows", [1, 3, 4, 128, 131])
def test_scales_of_rows_are_columns_that_begin_at_16_bytes(rows: int) -> None:
    aligned = -(-rows // 4) * 4
    for lead, strides in (((), ()), ((2,), (3 * aligned,)), ((2, 5), (5 * 3 * aligned, 3 * aligned))):
        made = quantise_rows(torch.randn(*lead, rows, 300)).scales
        assert made.shape == (*lead, rows, 3)
        assert made.stride() == (*strides, 1, aligned)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), None),
        (ModuleNotFoundError("No module named 'torch.nothing'", name="torch.nothing"), "No module named"),
        (ImportError("undefined symbol"), "ImportError: undefined symbol"),
        (AssertionError("no compiler"), "AssertionError: no compiler"),
        (KeyError("CUDA_PATH"), "KeyError: 'CUDA_PATH'"),
    ],
)
def test_a_triton_that_does_not_load_is_named(
    error: Exception, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it is not installed plain torch quantises in its place."""

    def fail() -> Quantiser:
        raise error

    monkeypatch.setattr(fused_quantiser, "fused_quantiser", fail)
    if message is None:
        assert find_quantiser(CPU) is PLAIN
        return
    with pytest.raises(LookupError, match=f"quantises with Triton, which does not load: {message}"):
        find_quantiser(CPU)
