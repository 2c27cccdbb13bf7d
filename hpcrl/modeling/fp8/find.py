"""Which backend multiplies in FP8, and whether it does so as the reference does: tried before a trainer begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8.backends import Backend, Groups, Reference
from hpcrl.modeling.fp8.deep_gemm import DeepGemm
from hpcrl.modeling.fp8.quantiser import PLAIN
from hpcrl.modeling.fp8.scaled_mm import ScaledMm

__all__ = ["find_backend", "products", "try_backend"]

_WHERE = "trainer.precision.fp8.backend"
_TOLERANCE = 0.01
"""Norm of what differs over that of the reference: rounding to bfloat16 is 0.2 %, scales of other rows all of it."""
_ROWS, _COLUMNS, _SUMMED = 256, 384, 512
_COUNTS = (130, 0, 70)


def find_backend(name: str, device: torch.device) -> Backend:
    """The backend ``name`` of `Fp8Config.backend` for ``device``; but for the reference, it has been tried there.

    Raises
    ------
    UsageError
        It cannot be used here, or gives other numbers than the reference; or ``auto``, and none of those for this
        device can.
    """
    if name == "reference" or (name == "auto" and device.type == "cpu"):
        return Reference()
    kinds: dict[str, Callable[[torch.device], Backend]] = {"deep_gemm": DeepGemm, "torch": ScaledMm}
    problems = []
    for kind in kinds if name == "auto" else (name,):
        try:
            backend = kinds[kind](device)
            try_backend(backend, device)
            return backend
        except LookupError as error:
            problems.append(f"{kind} {error.args[0]}")
    hint = "set it to reference, which is slow and runs everywhere, or leave trainer.precision.fp8 out"
    raise UsageError(f"{_WHERE}: {name}: {'; '.join(problems)}\n    hint: {hint}")


def products(backend: Backend, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each kind of product of `Backend` by name, of the same random numbers, whose magnitudes differ between blocks.

    Shapes are those of `Backend`, but `multiply_groups` comes without the rows between those of experts.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        magnitudes = torch.exp2(torch.randint(-3, 4, (*size[:-1], size[-1] // 128), generator=draw))
        numbers = torch.randn(size, generator=draw) * magnitudes.repeat_interleave(128, -1)
        return numbers.to(device, torch.bfloat16)

    x, weight = normal(_ROWS, _SUMMED), normal(_COLUMNS, _SUMMED)
    yield "multiply", backend.multiply(PLAIN.rows(x), PLAIN.blocks(weight), torch.bfloat16)
    yield "multiply_rows", backend.multiply_rows(PLAIN.rows(x), PLAIN.rows(weight))
    groups = Groups.of(torch.tensor(_COUNTS, device=device), sum(_COUNTS))
    spread, experts = groups.spread(normal(sum(_COUNTS), _SUMMED)), normal(len(_COUNTS), _COLUMNS, _SUMMED)
    found = backend.multiply_groups(PLAIN.rows(spread), PLAIN.blocks(experts), groups, torch.bfloat16)
    # rows between those of experts are anything
    yield "multiply_groups", found[groups.places]
    gradient = groups.spread(normal(sum(_COUNTS), _COLUMNS))
    yield (
        "multiply_within_groups",
        backend.multiply_within_groups(PLAIN.rows(gradient.mT), PLAIN.rows(spread.mT), groups),
    )


def try_backend(backend: Backend, device: torch.device) -> None:
    """LookupError where ``backend`` fails on ``device``, or differs from the reference."""
    tried = products(backend, device)
    for name, wanted in products(Reference(), device):
        try:
            _, found = next(tried)
        except Exception as error:
            # compilers and drivers raise what they like; whatever it is, the backend is not to be had
            raise LookupError(f"{backend.version} fails on {device.type}: {type(error).__name__}: {error}") from error
        distance = float("inf")
        if found.shape == wanted.shape:
            distance = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if not distance <= _TOLERANCE:
            raise LookupError(
                f"{backend.version} differs from the reference when tried: {name} by {distance:.1%} of its norm"
            )
