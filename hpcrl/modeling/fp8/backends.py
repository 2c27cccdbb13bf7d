"""Products of quantised matrices behind one interface, and the plain one that defines what they are.

A backend gets whole blocks (`hpcrl.modeling.fp8.quantiser`) and adds up in float32. Rows of experts lie in groups that
begin at multiples of 128.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.modeling.fp8.quantiser import PLAIN, Quantised, Quantiser
from hpcrl.weights.format.quantise import BLOCK


class Groups(NamedTuple):
    """Layout of experts' rows in which each expert begins at a multiple of 128. The counts are not copied to the host.

    Attributes
    ----------
    places:
        ``[rows]`` int64: new position of each row.
    experts:
        ``[spread]`` int32: the expert of each position, -1 after the last expert.
    sizes:
        ``[experts]`` int64: positions of each expert, multiples of 128.
    """

    places: Tensor
    experts: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, counts: Tensor, rows: int) -> Groups:
        """Lay out ``rows`` that are sorted by expert, of which each of ``[experts]`` has ``counts``."""
        sizes = (counts + BLOCK - 1) // BLOCK * BLOCK
        ends = sizes.cumsum(0)
        if counts.device.type == "cpu":
            spread = max(int(ends[-1]), BLOCK)
        else:
            # as many as there can be: the device is not waited for
            spread = max(-(-(rows + (BLOCK - 1) * min(len(counts), rows)) // BLOCK) * BLOCK, BLOCK)
        shift = (ends - sizes) - (counts.cumsum(0) - counts)
        places = torch.arange(rows, device=counts.device)
        places += shift.repeat_interleave(counts, output_size=rows)
        at = torch.searchsorted(ends, torch.arange(spread, device=counts.device), right=True)
        return cls(places, torch.where(at < len(counts), at, -1).int(), sizes)

    def spread(self, rows: Tensor) -> Tensor:
        """Return rows ``[rows, columns]`` in their places, with zeros between them."""
        # in place: index_copy would make a second copy of all rows
        return rows.new_zeros(len(self.experts), rows.shape[1]).index_copy_(0, self.places, rows)


class Backend(Protocol):
    """Multiplies. Results are in ``dtype`` where one is asked for, else float32; sums are float32."""

    name: str
    version: str
    """Version of the library, for messages."""
    quantiser: Quantiser
    """Quantiser for this backend, bit-identical with the plain one."""

    def multiply(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b.mT`` of rows ``a [M, K]`` and blocks ``b [N, K]``."""
        ...

    def multiply_rows(self, a: Quantised, b: Quantised) -> Tensor:
        """Return ``a @ b.mT`` of rows ``a [M, K]`` and rows ``b [N, K]``."""
        ...

    def multiply_groups(self, a: Quantised, b: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Multiply each row of ``a [spread, K]`` by its expert's block of ``b [experts, N, K]``.

        Rows between the experts' are undefined.
        """
        ...

    def multiply_within_groups(self, a: Quantised, b: Quantised, groups: Groups) -> Tensor:
        """Return ``[experts, M, N]``: ``a [M, spread] @ b [N, spread].mT``, summed over each expert's places."""
        ...


class Reference:
    """Plain torch on any device: multiplies the numbers that quantised matrices represent, in float32."""

    name = "reference"
    version: str = torch.__version__
    quantiser = PLAIN

    def multiply(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        return (a.dequantised() @ b.dequantised().mT).to(dtype)

    def multiply_rows(self, a: Quantised, b: Quantised) -> Tensor:
        """See `Backend`."""
        return a.dequantised() @ b.dequantised().mT

    def multiply_groups(self, a: Quantised, b: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        ends = groups.sizes.cumsum(0).int()
        return F.grouped_mm(a.dequantised(), b.dequantised().mT, offs=ends).to(dtype)

    def multiply_within_groups(self, a: Quantised, b: Quantised, groups: Groups) -> Tensor:
        """See `Backend`."""
        ends = groups.sizes.cumsum(0).int()
        return F.grouped_mm(a.dequantised(), b.dequantised().mT, offs=ends)
