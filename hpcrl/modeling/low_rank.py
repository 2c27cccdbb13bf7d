"""Low-rank adapters of a linear layer, and of a matrix of all experts; `hpcrl.modeling.adapters` puts them in place."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.blocks import local_part

Mode = Literal["apart", "merged", "off"]
"""``apart``: ``W x + s · B (A x)``, as it is trained; ``merged``: ``(W + s · B A) x`` with the sum rounded to the dtype
of W, as engines do it; ``off``: ``W x``."""


def multiply_groups(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows ``x [rows, in]``, sorted by group with ``counts [groups]``, each by its group's matrix.

    ``weight`` is ``[groups, out, in]``; all is in one dtype.
    """
    ends = counts.cumsum(0).to(torch.int32)
    return multiply_aligned(x, weight, ends, transposed=True)


def multiply_aligned(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """Compute ``torch.nn.functional.grouped_mm`` for widths of any size.

    torch refuses matrices whose rows are no multiple of 16 bytes. Such ones get zeros at the end of their rows, which
    change no product, and the numbers of the result that these made are cut off. All others are used as they are.

    Parameters
    ----------
    weight:
        ``[groups, in, out]``, or with ``transposed`` ``[groups, out, in]``.
    ends:
        End of each group's rows, int32.
    """
    multiple = 16 // x.element_size()
    last, second = -weight.shape[2] % multiple, -weight.shape[1] % multiple
    width = weight.shape[1 if transposed else 2]
    if last or second:
        weight = F.pad(weight, (0, last, 0, second))
        x = F.pad(x, (0, last if transposed else second))
    y = F.grouped_mm(x, weight.transpose(1, 2) if transposed else weight, offs=ends)
    return y[:, :width] if y.shape[1] != width else y


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight [out, in] + scale · b [out, r] @ a [r, in]``, computed in float32 for any dtypes.

    A ``weight`` that is float32 already is changed in place, and returned.
    """
    return weight.float().addmm_(b.float(), a.float(), alpha=scale)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter, ``lora_A [r, in]`` and ``lora_B [out, r]``: float32, whatever the weight is."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    mode: Mode = "apart"

    @classmethod
    def of(cls, linear: nn.Linear, rank: int, scale: float) -> AdaptedLinear:
        """Take the place of ``linear`` and its parameters."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias, made.scale = linear.weight, linear.bias, scale
        device = linear.weight.device
        made.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        made.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, in_features]`` to ``[T, out_features]``."""
        if self.mode == "apart":
            return super().forward(x) + F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B)
        return F.linear(x, self.effective(), self.bias)

    def effective(self) -> Tensor:
        """Return the numbers that it multiplies with, ``[out, in]``, with gradients to A and B."""
        if self.mode == "off":
            return self.weight
        if self.mode == "merged":
            return add_product(self.weight.detach().clone(), self.lora_A, self.lora_B, self.scale).to(self.weight.dtype)
        return torch.addmm(self.weight, self.lora_B, self.lora_A, alpha=self.scale)


class Outer(NamedTuple):
    """A factor that all experts of a layer share: ``holder.<name>``, wherever that module is."""

    holder: nn.Module
    name: Literal["lora_A", "lora_B"]

    @property
    def factor(self) -> Tensor:
        """Return the current factor, ``[r, in]`` or ``[out, r]``: FSDP2 replaces the parameter during a pass."""
        found: Tensor = getattr(self.holder, self.name)
        return found


class GroupedAdapter(nn.Module):
    """Adapters of a matrix of all experts ``[E, out, in]``: ``lora_A [E, r, in]`` and ``lora_B [E, out, r]``, float32.

    Of these one may be common to all experts, and then lies elsewhere.
    """

    def __init__(
        self, matrix: Tensor, rank: int, scale: float, *, outer: Literal["lora_A", "lora_B"] | None = None
    ) -> None:
        """Make the adapters of ``matrix``, uninitialised; ``outer`` is what all experts have in common."""
        super().__init__()
        experts, out, inside = matrix.shape
        self.scale = scale
        self.mode: Mode = "apart"
        shapes = {"lora_A": (rank, inside), "lora_B": (out, rank)}
        self.outer: Outer | None = None
        for name, shape in shapes.items():
            whole = shape if name == outer else (experts, *shape)
            own = nn.Parameter(torch.empty(whole, device=matrix.device))
            if name == outer:
                holder = nn.Module()
                holder.register_parameter(name, own)
                # in a tuple: a module that is an attribute would be a child
                self.outer = Outer(holder, outer)
            else:
                self.register_parameter(name, own)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the addend to the product of rows ``[rows, in]``, sorted by expert: ``[rows, out]``."""
        return self._multiply("lora_B", self._multiply("lora_A", x, counts) * self.scale, counts)

    def _multiply(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        factor = self._factor(name)
        return F.linear(x, factor) if factor.dim() == 2 else multiply_groups(x, factor, counts)

    def effective(self, weight: Tensor) -> Tensor:
        """Return the factor that replaces ``weight [experts here, out, in]``."""
        if self.mode != "merged":
            return weight
        a, b = (self._factor(name).expand(len(weight), -1, -1) for name in ("lora_A", "lora_B"))
        merged = [add_product(weight[e].clone(), a[e], b[e], self.scale).to(weight.dtype) for e in range(len(weight))]
        return torch.stack(merged)

    def _factor(self, name: str) -> Tensor:
        if self.outer is not None and self.outer.name == name:
            return self.outer.factor
        return local_part(getattr(self, name))
