"""A linear layer that multiplies in block FP8."""

from __future__ import annotations

from torch import Tensor, nn

from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.fp8.backends import Backend
from hpcrl.modeling.fp8.products import linear_product, rounded
from hpcrl.modeling.low_rank import AdaptedLinear


class Fp8Linear(nn.Linear):
    """A linear layer whose products are in FP8; the weight is quantised each time that it is used."""

    backend: Backend

    @classmethod
    def of(cls, linear: nn.Linear, backend: Backend) -> Fp8Linear:
        """Take the place of ``linear`` and its parameters."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.backend = backend
        return made

    @opaque
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, in_features]`` to ``[T, out_features]``."""
        y = linear_product(x, self.weight, self.backend)
        return y if self.bias is None else y + self.bias


def effective_weight(linear: nn.Linear) -> Tensor:
    """Return the numbers that ``linear`` multiplies with, for callers that multiply in another way.

    ``[out_features, in_features]``, with gradient to the weight, or to the factors of its adapter. A weight in FP8 is
    rounded to FP8 and returned in its own dtype.
    """
    if isinstance(linear, AdaptedLinear):
        return linear.effective()
    return rounded(linear.weight) if isinstance(linear, Fp8Linear) else linear.weight
