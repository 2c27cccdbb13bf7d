"""Finds the backend that multiplies in FP8, and checks it against the reference before a trainer begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8.backends import Backend, Groups, Reference
from hpcrl.modeling.fp8.deep_gemm import DeepGemm
from hpcrl.modeling.fp8.quantiser import PLAIN
from hpcrl.modeling.fp8.scaled_mm import ScaledMm

_WHERE = "trainer.precision.fp8.backend"
_TOLERANCE = 0.01
"""Maximum relative norm of the difference: rounding to bfloat16 makes 0.2 %, scales of wrong rows 100 %."""
_ROWS, _COLUMNS, _SUMMED = 256, 384, 512
_COUNTS = (130, 0, 70)
_LONG_ROWS, _LONG_COUNTS = 128, (150_000, 0, 144, 112_000)
"""On a GPU sums over tokens are tried once more, over about as many (262,144 and what groups are padded with) as a rank
of a large run has in one layer: what a library has room for, and which program it takes, depends on this number."""


def find_backend(name: str, device: torch.device) -> Backend:
    """Return the backend ``name`` of `Fp8Config.backend` for ``device``; all but the reference are tried there first.

    Raises
    ------
    UsageError
        The backend cannot be used here, or its numbers differ from the reference; or ``auto``, and no backend for this
        device can be used.
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
    """Yield each kind of product of `Backend` by name, of random numbers whose magnitudes differ between blocks.

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


def long_products(backend: Backend, device: torch.device, counts: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield the products of `Backend` that sum over tokens, by name, for experts with ``counts`` tokens."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(tokens: int) -> Tensor:
        return torch.randn(tokens, _LONG_ROWS, generator=draw, device=device).bfloat16()

    tokens = sum(counts)
    grad, x = normal(tokens), normal(tokens)
    yield f"multiply_rows over {tokens} tokens", backend.multiply_rows(PLAIN.rows(grad.T), PLAIN.rows(x.T))
    groups = Groups.of(torch.tensor(counts, device=device), tokens)
    of_grad, of_x = (PLAIN.rows(groups.spread(each).T) for each in (grad, x))
    yield f"multiply_within_groups of {tokens} tokens", backend.multiply_within_groups(of_grad, of_x, groups)


def all_products(
    backend: Backend, device: torch.device, long_counts: tuple[int, ...] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield `products`, and `long_products` unless ``long_counts`` is None."""
    yield from products(backend, device)
    if long_counts is not None:
        yield from long_products(backend, device, long_counts)


def long_counts_for(device: torch.device) -> tuple[int, ...] | None:
    """Return tokens of experts for `long_products`; None on a CPU, where no library multiplies and it takes seconds."""
    return None if device.type == "cpu" else _LONG_COUNTS


def try_backend(backend: Backend, device: torch.device) -> None:
    """Compare ``backend`` on ``device`` with the reference (LookupError if it fails or differs)."""
    long_counts = long_counts_for(device)
    tried = all_products(backend, device, long_counts)
    for name, wanted in all_products(Reference(), device, long_counts):
        try:
            _, found = next(tried)
        except Exception as error:
            # compilers and drivers raise any type: the backend cannot be used
            raise LookupError(f"{backend.version} fails on {device.type}: {type(error).__name__}: {error}") from error
        distance = float("inf")
        if found.shape == wanted.shape:
            distance = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if not distance <= _TOLERANCE:
            raise LookupError(
                f"{backend.version} differs from the reference when tried: {name} by {distance:.1%} of its norm"
            )
