"""Layers of a model that multiply in block FP8: which they are is what a version in FP8 quantises."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpcrl.errors import UsageError
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.backends import Backend
from hpcrl.modeling.fp8.linear import Fp8Linear
from hpcrl.modeling.fp8.products import grouped_product
from hpcrl.modeling.layers.moe import Experts, SquaredExperts
from hpcrl.weights.format.quantise import QuantisedModules

_WHERE = "trainer.precision.fp8"


def use_fp8(model: Decoder, wanted: QuantisedModules, backend: Backend) -> None:
    """Let the matrices of ``wanted`` be multiplied in FP8, in a model that is not sharded yet.

    Parameters have the names, shapes and dtypes that they had.

    Raises
    ------
    UsageError
        A pattern of ``wanted.keep`` has no effect, the experts of this family are published in a way that is not
        quantised, or nothing is left to be quantised.
    """
    found = list(_quantised(model, wanted))
    _check(model, wanted, found)
    for name in found:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Fp8Linear.of(module, backend))
        else:
            assert isinstance(module, Experts | SquaredExperts)
            module.product = Fp8Grouped(backend)


class Fp8Grouped:
    """A `hpcrl.modeling.layers.moe.GroupedProduct` in block FP8."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, counts: Tensor, *, parts: int = 1) -> Tensor:
        return grouped_product(x, weight, counts, self.backend, parts=parts)


def _quantised(model: Decoder, wanted: QuantisedModules) -> Iterator[str]:
    """Yield the modules whose matrices are all quantised when they are published."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            matrices = {f"{name}.weight": module.weight}
        elif isinstance(module, Experts | SquaredExperts):
            matrices = {f"{name}.{own}": matrix for own, matrix in module.named_parameters(recurse=False)}
        else:
            continue
        regions = [region for own, matrix in matrices.items() for region in model.adapter.regions(own, matrix.shape)]
        inside = [wanted.has(region.name, region.shape) for region in regions]
        if any(inside) and not all(inside):
            kept = regions[inside.index(False)].name
            what = f"keep has {kept}, but not all of the {len(regions)} matrices that are multiplied with it ({name})"
            raise UsageError(f"{_WHERE}.{what}\n    hint: give a pattern of all of them, such as '*.experts.*'")
        if inside and all(inside):
            yield name


def _check(model: Decoder, wanted: QuantisedModules, found: list[str]) -> None:
    for pattern in wanted.keep:
        others = QuantisedModules(wanted.linears, wanted.experts, tuple(p for p in wanted.keep if p != pattern))
        if list(_quantised(model, others)) == found:
            hint = "give published names of modules, such as 'model.layers.0.*' or '*.self_attn.kv_b_proj'"
            raise UsageError(f"{_WHERE}.keep: {pattern!r} keeps nothing that would be in FP8\n    hint: {hint}")
    sparse = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    if wanted.experts and sparse and not any(name in found for name in sparse) and not wanted.keep:
        what = f"{_WHERE}.experts: the experts of a layer are published as one tensor, which no version has in FP8"
        raise UsageError(f"{what}\n    hint: set {_WHERE}.experts: false")
    if not found:
        raise UsageError(f"{_WHERE}: nothing is left to be multiplied in FP8\n    hint: leave {_WHERE} out")
